"""A micro-batch as a transaction: what ran out of memory leaves nothing behind, and is split."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchbudget.cost.run import is_out_of_memory
from torchbudget.errors import OptionError, TorchBudgetError


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
        self._buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
        self._cpu = torch.get_rng_state()
        self._cuda: Tensor | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = torch.cuda.get_rng_state()
        for parameter in parameters:
            parameter.grad = None

    def undo(self) -> None:
        """Put everything back, and give freed memory back to the device."""
        for parameter, gradient in self.before:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
        torch.set_rng_state(self._cpu)
        gc.collect()
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
            torch.cuda.empty_cache()


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
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, Tensor)]
    lengths = {tensor.shape[0] if tensor.ndim else None for tensor in tensors}
    if len(lengths) != 1 or None in lengths:
        raise OptionError(
            "the batch does not say how many samples it holds, and its tensors have not one common "
            "first axis; pass a batch of a torchbudget collate"
        )
    return int(tensors[0].shape[0])


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
