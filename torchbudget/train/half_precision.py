"""The backward of a loss times a factor, where the loss is of half precision, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from torchbudget.errors import OptionError

_SMALLEST: Final = -14  # the exponent of the smallest normal number of float16


def backward_times(
    loss: Tensor,
    factor: float,
    parameters: Callable[[], Sequence[Tensor]],
    scaler: torch.amp.GradScaler | None,
    **options: Any,
) -> None:
    """Backward of `loss * factor`, as if the product were of float32.

    A loss of half precision gets its gradient in its own dtype, in which most factors would be
    rounded, by up to 0.4 %, or become infinite. So the graph carries a power of 2 that is at most
    1, and the rest is multiplied where gradients come to the leaves, in their dtype.

    Args:
        loss: a scalar.
        factor: above 0.
        parameters: that may be leaves of graphs which are made in the backward, as of a reentrant
            checkpoint; other leaves are found.
        scaler: of the gradients.
        options: of `torch.autograd.backward`.
    """
    carried = carried_factor(factor, loss.dtype)
    rest = factor / carried
    scaled = loss if carried == 1 else loss * carried
    if scaler is not None:
        scaled = scaler.scale(scaled)
    leaves = [] if rest == 1 else dict.fromkeys((*parameters(), *_leaves(loss)))
    hooked = [leaf for leaf in leaves if leaf.requires_grad]
    handles = [leaf.register_hook(lambda gradient: gradient * rest) for leaf in hooked]
    try:
        torch.autograd.backward(scaled, **options)
    finally:
        for handle in handles:
            handle.remove()


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The leaves of a graph; O(nodes)."""
    nodes: list[Any] = [loss.grad_fn]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            yield node.variable
        nodes.extend(inner for inner, _ in node.next_functions)


def check_carried(loss: Tensor, factor: float) -> None:
    """Raise an `OptionError` where the graph cannot carry the whole factor.

    For FSDP, under which gradients do not come to the parameters that the optimizer has.
    """
    if carried_factor(factor, loss.dtype) != factor:
        raise OptionError(
            f"under fully_shard a loss of {loss.dtype} cannot carry its weight exactly: compute it "
            "in float32, as in F.cross_entropy(logits.float(), labels)"
        )


def carried_factor(factor: float, dtype: torch.dtype) -> float:
    """What the graph carries of a factor: all of it, or the power of 2 below it, at most 1.

    >>> carried_factor(0.3, torch.float32), carried_factor(0.3, torch.bfloat16)
    (0.3, 0.25)
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return factor
    _, exponent = math.frexp(factor)
    return math.ldexp(1.0, max(_SMALLEST, min(exponent - 1, 0)))
