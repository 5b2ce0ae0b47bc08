"""Batches of any structure: their number of samples, halves, moving, and running them twice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
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


def masked_rows(batch: Any) -> int:
    """The number of rows of a batch's tensors that are no samples: see `max_shapes`."""
    return int(getattr(batch, "masked_rows", 0))


def unmasked(batch: Any) -> Any:
    """The batch without rows that are no samples."""
    return batch.split(1)[0] if masked_rows(batch) else batch


def check_splittable(batch: Any) -> None:
    """Raise an `OptionError` if `halves` cannot cut the batch."""
    if not isinstance(batch, SplittableBatch):
        _rows(batch)


def cuts_units(batch: Any, source: Any) -> bool:
    """Whether `halves` may cut a unit that the source of the batch keeps in one micro-batch.

    Only a batch type of the user's own knows units.
    """
    if not getattr(source, "keeps_units", False):
        return False
    return not isinstance(batch, SplittableBatch) or getattr(batch.split, "cuts_units", False)


def halves(batch: Any) -> list[Any]:
    """Two batches of half the samples each, in order; the first has one more of an odd number."""
    if isinstance(batch, SplittableBatch):
        return list(batch.split(2))
    half = (_rows(batch) + 1) // 2

    def part(rows: slice) -> Any:
        return _mapped(lambda leaf: None if leaf is None else leaf[rows], batch)

    return [part(slice(None, half)), part(slice(half, None))]


def moved(batch: Any, device: torch.device | str | None) -> Any:
    """The batch on a device; without one, the batch itself."""
    if device is None:
        return batch
    early = may_return_early(device)
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=early)

    def to(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=early) if isinstance(leaf, Tensor) else leaf

    return _mapped(to, batch)


class Replayed:
    """A batch that a forward may see several times, each time unchanged.

    A forward may take its containers apart, but must not change its tensors, which are not cloned.

    Args:
        batch: of any structure.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._versions = [
            (name, tensor, tensor._version)
            for name, tensor in _named_leaves(batch)
            if isinstance(tensor, Tensor) and not tensor.is_inference()  # which has no version
        ]

    def fresh(self) -> Any:
        """Return the batch in containers of its own."""
        return _mapped(_copied, self._batch)

    def check(self) -> None:
        """Raise an `OptionError` if a tensor was changed in place."""
        for name, tensor, version in self._versions:
            if tensor._version != version:
                raise OptionError(
                    f"the forward changed batch{name} in place, so a second run of the batch would "
                    "read other numbers: change a copy, as in ids = ids.masked_fill(…)"
                )


def _rows(batch: Any) -> int:
    lengths = [  # no set: in a trace they may be symbols, which have no hash
        len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else None  # None: has no first axis
        for _, leaf in _named_leaves(batch)
        if leaf is not None
    ]
    rows = lengths[0] if lengths else None
    if rows is None or any(one is None or one != rows for one in lengths):
        raise OptionError(
            "the number of samples is unknown: the batch has no num_samples, and its tensors do "
            "not all have the same first axis; pass a batch of a torchbudget collate"
        )
    return rows


def _is_mapping(batch: Any) -> bool:
    """Whether it is a mapping that torch's trees do not know, as transformers' `BatchEncoding`."""
    return isinstance(batch, Mapping) and any(leaf is batch for leaf in tree_leaves(batch))


def _named_leaves(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        inner: list[tuple[Any, Any]] = list(batch.items())
    elif isinstance(batch, (list, tuple)):
        inner = list(enumerate(batch))
    else:
        inner = list(enumerate(tree_leaves(batch)))  # of a class that torch's trees know, or itself
    for key, one in inner:
        if one is batch:
            yield name, one
        else:
            yield from _named_leaves(one, f"{name}[{key!r}]")


def _mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with its leaves replaced; a mapping is rebuilt by its type from a dict."""

    def replaced(leaf: Any) -> Any:
        if _is_mapping(leaf):
            return type(leaf)({key: _mapped(function, value) for key, value in leaf.items()})
        return function(leaf)

    return tree_map(replaced, batch, is_leaf=_is_mapping)


def _copied(leaf: Any) -> Any:
    """A shallow copy of an object with attributes; of a tensor, the tensor itself."""
    has_attributes = hasattr(leaf, "__dict__") and not callable(leaf)
    return copy.copy(leaf) if has_attributes and not isinstance(leaf, Tensor) else leaf
