"""The gradient of a criterion over the whole batch, with the activations of one micro-batch.

A contrastive loss compares every sample with every other, so that the batch cannot be cut: its loss
is no sum over micro-batches. Yet its gradient goes through each sample's representation alone.
First all representations are computed without graphs; the criterion gives the gradient of each;
then each micro-batch is run again, with its graph, and goes backward from there. (Gao et al.,
"Scaling deep contrastive learning batch size under memory limited setup", 2021.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from torchbudget.errors import OptionError
from torchbudget.random_state import RandomState
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.process_group import Ranks
from torchbudget.train.retry import Buffers


def joint_backward(
    forward: Callable[[Any], Any],
    micro_batches: Iterable[Any],
    criterion: Callable[[Any], Tensor],
    accumulator: GradAccumulator | None = None,
) -> Tensor:
    """Backward of `criterion(forward(whole batch))`, holding one micro-batch's activations.

    Every micro-batch is run twice, with the same random numbers, so that dropout is the same in
    both; buffers (as of batch normalisation, whose statistics stay the micro-batches') are updated
    once. Over several ranks the criterion sees the representations of all, in the order of the
    ranks, and each computes the whole of it.

    Args:
        forward: from a micro-batch to its representations: a tensor whose first axis is the
            sample, or several in tuples, lists and dicts.
        micro_batches: of this rank, at least one; held until the end.
        criterion: from all representations, of the same structure, to a scalar: the loss of the
            whole batch. Its own parameters get their gradients too.
        accumulator: takes the step with these gradients. Without one they are added to `.grad`,
            on this rank alone.

    Returns:
        The loss, detached; the same on every rank.

    Raises:
        OptionError: no micro-batches, no tensors, or a loss that is no scalar.

    >>> model = torch.nn.Linear(3, 2)
    >>> x = torch.randn(6, 3)
    >>> joint_backward(model, x.split(2), lambda z: (z @ z.T).logsumexp(1).mean()) > 0
    tensor(True)
    """
    held = list(micro_batches)
    if not held:
        raise OptionError("joint_backward needs at least one micro-batch on every rank")
    if accumulator is None:
        modules = [forward] if isinstance(forward, nn.Module) else []
        return _two_passes(forward, held, criterion, modules, None, torch.autograd.backward)
    share = 1 / len(accumulator.ranks)

    def backward(loss: Tensor) -> None:
        # Every rank has the whole loss, of which its share counts: so the criterion's own
        # parameters get one gradient when those of all ranks are summed.
        accumulator.backward(loss if accumulator.mean else loss * share)

    with accumulator.micro_batch(share, last=True):
        return _two_passes(
            forward, held, criterion, accumulator.modules, accumulator.ranks, backward
        )


def _two_passes(
    forward: Callable[[Any], Any],
    micro_batches: Sequence[Any],
    criterion: Callable[[Any], Tensor],
    modules: Sequence[nn.Module],
    ranks: Ranks | None,
    backward: Callable[[Tensor], None],
) -> Tensor:
    buffers = Buffers(modules)
    states, parts = [], []
    with torch.no_grad():
        for micro_batch in micro_batches:
            states.append(RandomState.take())
            parts.append(tree_map(lambda leaf: leaf.detach(), forward(micro_batch)))
    buffers.put_back()
    after = RandomState.take()
    structure = tree_flatten(parts[0])[1]
    whole = [torch.cat(leaves) for leaves in zip(*(tree_flatten(p)[0] for p in parts), strict=True)]
    starts = [0] * len(whole)
    if ranks is not None and len(ranks) > 1:
        whole, starts = ranks.gathered(whole)
    for leaf in whole:
        leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
    loss = criterion(tree_unflatten(whole, structure))
    if loss.numel() != 1:
        raise OptionError(f"the criterion must give a scalar, got the shape {tuple(loss.shape)}")
    backward(loss)
    times = 1 if ranks is None else len(ranks)
    for micro_batch, state, part in zip(micro_batches, states, parts, strict=True):
        state.restore()
        outputs, gradients = [], []
        numbers = [len(leaf) for leaf in tree_flatten(part)[0]]
        leaves = tree_flatten(forward(micro_batch))[0]
        for number, (leaf, joined) in enumerate(zip(leaves, whole, strict=True)):
            start = starts[number]
            starts[number] = start + numbers[number]
            if joined.grad is not None and leaf.requires_grad:
                outputs.append(leaf)
                gradients.append(joined.grad[start : starts[number]] * times)
        torch.autograd.backward(outputs, gradients)
        del leaves, leaf, outputs, gradients
    after.restore()
    return loss.detach()
