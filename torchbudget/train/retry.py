"""A micro-batch as a transaction: what ran out of memory leaves nothing behind, and is split."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchbudget.cost.measuring.running import is_out_of_memory
from torchbudget.errors import OptionError, TorchBudgetError
from torchbudget.random_state import RandomState
from torchbudget.train.totals import Pending


class Buffers:
    """What the buffers of modules hold, copied; a forward may write into one, or make a new one.

    Args:
        modules: with their parts.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._held = [
            (part._buffers, name, buffer, buffer.detach().clone())
            for module in modules
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        """Let them be, and hold, what they were and held."""
        for holder, name, buffer, copy in self._held:
            holder[name] = buffer.copy_(copy)


class Attempt:
    """What must be as before, if a micro-batch is to be tried again.

    Gradients are set aside, so that those of the micro-batch come by themselves: a second set of
    them is held while it runs. Generators of the CPU and of the current device, and the modules'
    buffers, are copied.

    Args:
        parameters: that are trained.
        modules: whose buffers the forward may change.

    Attributes:
        before: parameters and their gradients of before.
    """

    def __init__(self, parameters: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
        self.before = [(parameter, parameter.grad) for parameter in parameters]
        self._buffers = Buffers(modules)
        self._random_state = RandomState.take()
        for parameter in parameters:
            parameter.grad = None

    def undo(self) -> None:
        """Put everything back, and give freed memory back to the device."""
        for parameter, gradient in self.before:
            parameter.grad = gradient
        self._buffers.put_back()
        self._random_state.restore()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class Undo:
    """Everything as it was before a batch that is run in parts.

    Args:
        attempt: the first one on it, which failed.
        parameters: whose gradients are copied.
        pending: what the step held.
    """

    def __init__(self, attempt: Attempt, parameters: Sequence[Tensor], pending: Pending) -> None:
        self._attempt = attempt
        self._pending = pending
        self._held = [
            (p, None if p.grad is None else (p.grad, p.grad.detach().clone())) for p in parameters
        ]

    @torch.no_grad()
    def undo(self) -> Pending:
        """Put it all back; what the step held."""
        self._attempt.undo()
        for parameter, held in self._held:
            parameter.grad = None if held is None else held[0].copy_(held[1])
        return self._pending


def ran_out(function: Callable[[Any], object], batch: Any) -> bool:
    """Call it; whether it ran out of memory. Then the traceback, which holds tensors, is gone."""
    try:
        function(batch)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, TorchBudgetError) or not is_out_of_memory(error):
            raise
        return True
    return False


def num_samples(batch: Any) -> int:
    """How many samples a batch holds: as it says, or along the first axis of its tensors.

    Raises:
        OptionError: there are no tensors, or they do not agree.
    """
    if hasattr(batch, "num_samples"):
        return int(batch.num_samples)
    leaves = [leaf for leaf in tree_flatten(batch)[0] if leaf is not None]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if len({len(tensor) for tensor in tensors}) != 1 or len(tensors) < len(leaves):
        raise OptionError(
            "the batch does not say how many samples it holds, and is not made of tensors with one "
            "common first axis alone; pass a batch of a torchbudget collate"
        )
    return len(tensors[0])


def halves(batch: Any) -> list[Any]:
    """Two batches of half the samples each, in order."""
    if hasattr(batch, "split") and hasattr(batch, "num_samples"):
        return list(batch.split(2))
    leaves, structure = tree_flatten(batch)
    half = (num_samples(batch) + 1) // 2
    parts = [
        [leaf[cut] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for cut in (slice(None, half), slice(half, None))
    ]
    return [tree_unflatten(part, structure) for part in parts]
