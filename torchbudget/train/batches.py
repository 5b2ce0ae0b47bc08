"""Batches of any structure: their number of samples, their halves, and moving them to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from torchbudget.errors import OptionError
from torchbudget.machine.device import may_return_early
from torchbudget.protocols import HasNumSamples, SplittableBatch


def num_samples(batch: Any) -> int:
    """The number of samples in a batch: what it says, or the length of its tensors' first axis.

    Raises:
        OptionError: it does not say, and is not made of tensors with one common first axis alone.
    """
    return int(batch.num_samples) if isinstance(batch, HasNumSamples) else _rows(batch)


def check_splittable(batch: Any) -> None:
    """Raise an `OptionError` where `halves` could not cut the batch."""
    if not isinstance(batch, SplittableBatch):
        _rows(batch)


def halves(batch: Any) -> list[Any]:
    """Two batches of half the samples each, in order; the first has one more of an odd number."""
    if isinstance(batch, SplittableBatch):
        return list(batch.split(2))
    half = (_rows(batch) + 1) // 2
    return [_mapped(itemgetter(rows), batch) for rows in (slice(None, half), slice(half, None))]


def moved(batch: Any, device: torch.device | str | None) -> Any:
    """The batch on a device; without one, the batch itself."""
    if device is None:
        return batch
    early = may_return_early(device)
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=early)
    return _mapped(lambda tensor: tensor.to(device, non_blocking=early), batch)


def _rows(batch: Any) -> int:
    lengths = {
        len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None  # None: has no first axis
        for leaf in _leaves(batch)
        if leaf is not None
    }
    rows = lengths.pop() if len(lengths) == 1 else None
    if rows is None:
        raise OptionError(
            "the batch does not say how many samples it has, and is not made of tensors with one "
            "common first axis alone; pass a batch of a torchbudget collate"
        )
    return rows


def _is_mapping(batch: Any) -> bool:
    """Whether it is a mapping that torch's trees do not know, as transformers' `BatchEncoding`."""
    return isinstance(batch, Mapping) and any(leaf is batch for leaf in tree_leaves(batch))


def _leaves(batch: Any) -> list[Any]:
    leaves = tree_leaves(batch, is_leaf=_is_mapping)
    return [
        inner
        for leaf in leaves
        for inner in (_leaves(list(leaf.values())) if _is_mapping(leaf) else [leaf])
    ]


def _mapped(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """The batch with its tensors replaced; a mapping is rebuilt by its type from a dict."""

    def replaced(leaf: Any) -> Any:
        if _is_mapping(leaf):
            return type(leaf)({key: _mapped(function, value) for key, value in leaf.items()})
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(replaced, batch, is_leaf=_is_mapping)
