"""The gradient of a criterion over the whole batch, with the activations of one micro-batch.

A contrastive loss compares every sample with every other one: it is no sum over micro-batches, so
the batch cannot be cut. But its gradient reaches the model through each sample's representation
alone. So first all representations are computed without graphs, and the criterion gives the
gradient of each; then each micro-batch is run again, with its graph, and its backward starts from
there (Gao et al., "Scaling deep contrastive learning batch size under memory limited setup",
2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from torchbudget.checks import several
from torchbudget.distributed import Ranks
from torchbudget.errors import OptionError, StepError
from torchbudget.random_state import RandomState
from torchbudget.restoring import TrainingState
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.batches import Replayed, unmasked
from torchbudget.train.retry import Buffers
from torchbudget.train.step import check_scalar


def joint_backward(
    forward: Callable[[Any], Any],
    micro_batches: Iterable[Any],
    criterion: Callable[[Any], Tensor],
    accumulator: GradAccumulator | None = None,
    *,
    modules: nn.Module | Sequence[nn.Module] = (),
) -> Tensor:
    """Run the backward of `criterion(forward(whole batch))` in micro-batches, exactly.

    Only the activations of one micro-batch are in memory at a time. Every micro-batch runs twice,
    with the same random numbers of the global generators on all devices, so that dropout is the
    same in both runs. Buffers are updated once; batch normalisation still takes its statistics from
    each micro-batch. On several ranks the criterion gets the representations of all ranks, in the
    order of the ranks, and every rank computes all of it.

    Args:
        forward: returns the representations of a micro-batch: a tensor whose first axis is the
            sample, or several in tuples, lists and dicts. Their dtypes and further axes, and
            numbers and tensors without an axis, such as a temperature, must be the same in all
            micro-batches and on all ranks; the criterion gets one of each number.
        micro_batches: the micro-batches of this rank, at least one; all are kept until the end.
        criterion: returns the loss of the whole batch, a scalar, from the representations of all
            samples, in the same structure. Its own parameters get gradients, too.
        accumulator: takes the step with the gradients. Without an accumulator they are added to
            `.grad`, on this rank only.
        modules: further modules whose buffers the forward may change. Modules of the accumulator,
            and modules that `forward` refers to, are known.

    Returns:
        The loss, detached; the same on every rank.

    Raises:
        OptionError: no micro-batches, no tensors, representations of another kind, a loss that is
            no scalar, or a forward that changes its micro-batch in place; on all ranks.
        StepError: micro-batches are pending in the accumulator.

    >>> model = torch.nn.Linear(3, 2)
    >>> x = torch.randn(6, 3)
    >>> joint_backward(model, x.split(2), lambda z: (z @ z.T).logsumexp(1).mean()) > 0
    tensor(True)
    """
    batches = [Replayed(unmasked(batch)) for batch in micro_batches]
    known = [*several("modules", modules, nn.Module), *TrainingState(forward).modules]
    if accumulator is None:
        return _two_passes(forward, batches, criterion, Buffers(known), None)
    buffers = Buffers([*known, *accumulator.modules])
    with accumulator.ranks.together():
        if accumulator.pending:
            raise StepError(
                f"{accumulator.pending} micro-batches are pending in the accumulator, but "
                "joint_backward takes a step of its own: call accumulator.step() first"
            )
    # Every rank has the whole loss, with weight 1, and the step divides by their number: so the
    # criterion's own parameters get their gradient once.
    with accumulator.micro_batch(1, last=True):
        return _two_passes(forward, batches, criterion, buffers, accumulator)


def _two_passes(
    forward: Callable[[Any], Any],
    micro_batches: Sequence[Replayed],
    criterion: Callable[[Any], Tensor],
    buffers: Buffers,
    accumulator: GradAccumulator | None,
) -> Tensor:
    ranks = Ranks(alone=True) if accumulator is None else accumulator.ranks
    # For each micro-batch: the random state, the leaves of its outputs, and their kinds.
    states, parts, kinds = [], [], []
    with ranks.together():
        if not micro_batches:
            raise OptionError("joint_backward needs at least one micro-batch on every rank")
        with torch.no_grad():
            for micro_batch in micro_batches:
                states.append(RandomState.take())
                outputs = forward(micro_batch.fresh())
                leaves, structure = tree_flatten(outputs)
                kinds.append(str(tree_map(_kind, outputs)))
                parts.append([one.detach() if isinstance(one, Tensor) else one for one in leaves])
                _check_rows(parts[-1])
                micro_batch.check()
    torch.clear_autocast_cache()  # before 2.11, an open autocast has cached casts without a graph
    buffers.restore()
    after = RandomState.take()
    mine = [[len(one) if _has_rows(one) else 0 for one in leaves] for leaves in parts]
    of_ranks = ranks.gather_objects((kinds, mine))
    found = sorted({kind for of_rank, _ in of_ranks for kind in of_rank})
    if len(found) > 1:
        raise OptionError(
            "the forward's outputs must be the same in all micro-batches and on all ranks, but for "
            f"the number of samples n: got {', '.join(found[:4])}. Return numbers of a sample in a "
            "tensor whose first axis is the sample, and pad further axes to one length"
        )
    whole, starts = [], []  # of each leaf; and the row at which the next micro-batch begins
    for place, leaves in enumerate(zip(*parts, strict=True)):
        rows = [sum(one[place] for one in of_rank) for _, of_rank in of_ranks]
        starts.append(sum(rows[: ranks.rank]))
        has_rows = _has_rows(leaves[0])
        whole.append(_of_all_ranks(torch.cat(leaves), rows, ranks) if has_rows else leaves[0])
    for leaf in whole:
        if isinstance(leaf, Tensor):
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    loss = criterion(tree_unflatten(whole, structure))
    check_scalar(loss)
    if accumulator is None:
        loss.backward()
    else:
        accumulator.backward(loss)
    for number, (micro_batch, state) in enumerate(zip(micro_batches, states, strict=True)):
        state.restore()
        outputs, gradients = [], []
        leaves = tree_leaves(forward(micro_batch.fresh()))
        for place, (leaf, of_all) in enumerate(zip(leaves, whole, strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            gradient = of_all.grad
            if leaf.ndim:
                own = slice(starts[place], starts[place] + len(leaf))
                starts[place] = own.stop
                # The step divides by the number of ranks, but a representation is on one rank.
                gradient = None if gradient is None else gradient[own] * len(of_ranks)
            elif number:  # of all copies, the gradient goes back through the first one
                continue
            if gradient is not None and leaf.requires_grad:
                outputs.append(leaf)
                gradients.append(gradient)
        with nullcontext() if accumulator is None else accumulator.backward_runs():
            torch.autograd.backward(outputs, gradients)
        del leaves, leaf, outputs, gradients  # frees their graphs before the next one is made
    after.restore()
    return loss.detach()


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0


def _kind(leaf: Any) -> Any:
    if _has_rows(leaf):
        return f"{leaf.dtype} of shape {('n', *leaf.shape[1:])}"
    return leaf.item() if isinstance(leaf, Tensor) else leaf


def _check_rows(leaves: Sequence[Any]) -> None:
    """Raise an `OptionError` if an output has no row for each sample."""
    shapes = [tuple(one.shape) for one in leaves if _has_rows(one)]
    if not shapes:
        raise OptionError("the forward must return tensors whose first axis is the sample")
    if (1,) in shapes and max(shape[0] for shape in shapes) > 1:
        raise OptionError(
            f"the forward returned a tensor of shape (1,) and others of shapes {shapes}: if it is "
            "one number for all samples, squeeze it, as in scale.squeeze()"
        )


def _of_all_ranks(mine: Tensor, rows: Sequence[int], ranks: Ranks) -> Tensor:
    """The rows of all ranks, in their order."""
    if len(ranks) == 1:
        return mine
    # all_gather needs equal shapes: each rank pads to the most rows of any.
    padded = mine.new_zeros(max(rows), *mine.shape[1:])
    padded[: len(mine)] = mine
    parts = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(parts, padded, group=ranks.group)
    return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])
