"""Batches of any structure: their number of samples, halves, moving, and running them twice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

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


class Replayed:
    """A batch that a forward may see several times, each time as it came.

    A forward may take its containers apart, but must not change its tensors, which are not cloned.

    Args:
        batch: of any structure.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._versions = [
            (name, tensor, tensor._version)
            for name, tensor in _named_tensors(batch)
            if not tensor.is_inference()  # which has no version
        ]

    def fresh(self) -> Any:
        """Return the batch in containers of its own."""
        return tree_map(_with_own_containers, self._batch, is_leaf=_is_mapping)

    def check(self) -> None:
        """Raise an `OptionError` where a tensor was changed in place."""
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise OptionError(
                    f"the forward changed batch{name} in place, so that another run of the batch "
                    "would see other numbers: change a copy, as in ids = ids.masked_fill(…)"
                )


def _named_tensors(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in tree_flatten_with_path(batch, is_leaf=_is_mapping)[0]:
        if isinstance(leaf, Tensor):
            yield keystr(path), leaf
        elif _is_mapping(leaf):
            yield from ((keystr(path) + name, one) for name, one in _named_tensors(dict(leaf)))
        elif _has_attributes(leaf):
            inner = tree_flatten_with_path(vars(leaf))[0]
            yield from ((keystr(path) + keystr(p), one) for p, one in inner if _is_tensor(one))


def _with_own_containers(leaf: Any) -> Any:
    if _is_mapping(leaf):
        own = {key: tree_map(_with_own_containers, value) for key, value in leaf.items()}
        return type(leaf)(own)
    if isinstance(leaf, Tensor) or not _has_attributes(leaf):
        return leaf
    copied = copy.copy(leaf)
    vars(copied).update({k: tree_map(lambda one: one, v) for k, v in vars(leaf).items()})
    return copied


def _has_attributes(leaf: Any) -> bool:
    return hasattr(leaf, "__dict__") and not callable(leaf)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


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
