"""The gradient of a criterion over the whole batch, with the activations of one micro-batch.

A contrastive loss compares every sample with every other one: it is no sum over micro-batches, so
the batch cannot be cut. But its gradient reaches the model through each sample's representation
alone. So first all representations are computed without graphs, and the criterion gives the
gradient of each; then each micro-batch is run again, with its graph, and its backward starts from
there. (Gao et al.,
"Scaling deep contrastive learning batch size under memory limited setup", 2021.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from torchbudget.checks import several
from torchbudget.errors import OptionError
from torchbudget.random_state import RandomState
from torchbudget.restoring import TrainingState
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.retry import Buffers


def joint_backward(
    forward: Callable[[Any], Any],
    micro_batches: Iterable[Any],
    criterion: Callable[[Any], Tensor],
    accumulator: GradAccumulator | None = None,
    *,
    modules: nn.Module | Sequence[nn.Module] = (),
) -> Tensor:
    """Backward of `criterion(forward(whole batch))` with one micro-batch's activations.

    Every micro-batch is run twice, with the same numbers of the global random generators, those of
    all devices included, so that dropout is the same in both; buffers are updated once (batch
    normalisation still takes its statistics from each micro-batch). Over several ranks the
    criterion gets the representations of all, in the order of the ranks, and every rank computes
    the whole of it.

    Args:
        forward: from a micro-batch to its representations: a tensor whose first axis is the
            sample, or several in tuples, lists and dicts.
        micro_batches: of this rank, at least one; all are kept until the end.
        criterion: from all representations, of the same structure, to a scalar: the loss of the
            whole batch. Its own parameters get their gradients too.
        accumulator: takes the step with these gradients. Without one they are added to `.grad`,
            on this rank alone.
        modules: whose buffers the forward may change, beside those of the accumulator and those
            that `forward` refers to, in its closure for one.

    Returns:
        The loss, detached; the same on every rank.

    Raises:
        OptionError: no micro-batches, no tensors, a loss that is no scalar, or a module whose
            buffers changed and that was neither found nor given.

    >>> model = torch.nn.Linear(3, 2)
    >>> x = torch.randn(6, 3)
    >>> joint_backward(model, x.split(2), lambda z: (z @ z.T).logsumexp(1).mean()) > 0
    tensor(True)
    """
    batches = list(micro_batches)
    if not batches:
        raise OptionError("joint_backward needs at least one micro-batch on every rank")
    known = ForwardModules(forward, several("modules", modules, nn.Module), accumulator)
    if accumulator is None:
        return _two_passes(forward, batches, criterion, known, None)
    # Every rank has the whole loss, with weight 1, and the step divides by their number: so the
    # criterion's own parameters get their gradient once.
    with accumulator.micro_batch(1, last=True):
        return _two_passes(forward, batches, criterion, known, accumulator)


class ForwardModules:
    """The modules whose buffers a forward may change.

    Args:
        forward: in which they are searched.
        given: beside those that are found.
        accumulator: that has some, too.
    """

    def __init__(
        self,
        forward: Callable[[Any], Any],
        given: Sequence[nn.Module],
        accumulator: GradAccumulator | None,
    ) -> None:
        found = TrainingState(forward)
        self.known = [*given, *found.modules, *(accumulator.modules if accumulator else ())]
        # A hook on all modules would be compiled into the graph of those that are.
        self._watches = not found.is_compiled

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise an `OptionError` where a module runs inside that is not known, and has changed."""
        known = {id(part) for module in self.known for part in module.modules()}
        others: dict[nn.Module, Any] = {}

        def note(module: nn.Module, _: Any) -> None:
            if id(module) not in known and module not in others:
                others[module] = _versions(module)

        handle = register_module_forward_pre_hook(note) if self._watches else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
        changed = [module for module, before in others.items() if _versions(module) != before]
        if changed:
            raise OptionError(
                f"the forward changes buffers of a module, {type(changed[0]).__name__}, that was "
                "not found in its closure, so that they would be updated twice: pass modules="
            )


def _versions(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(one), one._version) for one in module._buffers.values() if one is not None]


def _two_passes(
    forward: Callable[[Any], Any],
    micro_batches: Sequence[Any],
    criterion: Callable[[Any], Tensor],
    modules: ForwardModules,
    accumulator: GradAccumulator | None,
) -> Tensor:
    buffers = Buffers(modules.known)
    states, parts = [], []  # of each micro-batch: random generators, and representations
    with torch.no_grad(), modules.watched():
        for micro_batch in micro_batches:
            states.append(RandomState.take())
            parts.append(tree_map(lambda leaf: leaf.detach(), forward(micro_batch)))
    torch.clear_autocast_cache()  # before 2.11, an open autocast has cached casts without a graph
    buffers.restore()
    after = RandomState.take()
    structure = tree_structure(parts[0])
    whole = [torch.cat(leaves) for leaves in zip(*map(tree_leaves, parts), strict=True)]
    starts = [0] * len(whole)  # the row of each tensor at which the next micro-batch begins
    if accumulator is not None:
        whole, starts = accumulator.ranks.gather_rows(whole)
    for leaf in whole:
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    loss = criterion(tree_unflatten(whole, structure))
    if loss.numel() != 1:
        raise OptionError(f"the criterion must give a scalar, got the shape {tuple(loss.shape)}")
    if accumulator is None:
        loss.backward()
    else:
        accumulator.backward(loss)
    # The step divides by the number of ranks, but each representation is on one rank only.
    factor = 1 if accumulator is None else len(accumulator.ranks)
    for micro_batch, state in zip(micro_batches, states, strict=True):
        state.restore()
        outputs, gradients = [], []
        leaves = tree_leaves(forward(micro_batch))
        for number, (leaf, of_all) in enumerate(zip(leaves, whole, strict=True)):
            rows = slice(starts[number], starts[number] + len(leaf))
            starts[number] = rows.stop
            if of_all.grad is not None and leaf.requires_grad:
                outputs.append(leaf)
                gradients.append(of_all.grad[rows] * factor)
        with nullcontext() if accumulator is None else accumulator.backward_runs():
            torch.autograd.backward(outputs, gradients)
        del leaves, leaf, outputs, gradients  # graphs, before the next one is made
    after.restore()
    return loss.detach()
