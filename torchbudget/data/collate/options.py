"""The options that all collates have, each one value for all fields or one per field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch

from torchbudget.checks import is_int
from torchbudget.data.collate.structure import FieldPath, find_path
from torchbudget.errors import OptionError

Axes: TypeAlias = int | tuple[int, ...]
CollateT = TypeVar("CollateT", bound="CollateOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollateOptions:
    """The base of `PadCollate` and `PackCollate`, which explain the options."""

    length_axes: Axes | Mapping[Any, Axes] = 0
    length_field: Any | None = None
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None = None
    _sized_field: Any | None = field(default=None, repr=False)  # an argument, for replace() to keep

    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {}  # each option, and what checks it

    def __post_init__(self) -> None:
        """Read every option once, so that an invalid one fails here and not in a worker."""
        for option, read in self._per_field.items():
            given = getattr(self, option)
            is_mapping = isinstance(given, Mapping)
            # A copy: later changes to the caller's mapping must not change a frozen value.
            kept = {k: read(v) for k, v in given.items()} if is_mapping else read(given)
            object.__setattr__(self, option, kept)

    def of_sized_field(self: CollateT, name: Any | None) -> CollateT:
        """The same for samples whose sizes are those of a field, as a stream's are."""
        return self if name is None else replace(self, _sized_field=name)

    def check_names(self, paths: Sequence[FieldPath]) -> None:
        """Raise a `CollateError` where an option names a field that the samples do not have."""
        for option in self._per_field:
            given = getattr(self, option)
            for name in given if isinstance(given, dict) else ():
                find_path(name, paths, option)


@runtime_checkable
class TakesSizedField(Protocol):
    """A collate whose batches report the lengths of a field."""

    def of_sized_field(self, name: Any | None, /) -> Callable[[list[Any]], Any]:
        """The same for samples whose sizes are those of a field."""


def of_sized_field(
    collate_fn: Callable[[list[Any]], Any], name: Any | None
) -> Callable[[list[Any]], Any]:
    """A collate for samples whose sizes are those of a field; one of another kind as it is."""
    return (
        collate_fn.of_sized_field(name) if isinstance(collate_fn, TakesSizedField) else collate_fn
    )


def of_field(option: Any, path: FieldPath, default: Any) -> Any:
    """What an option says of a field."""
    if not isinstance(option, dict):
        return option
    return option.get(path, option.get(path[0], default) if len(path) == 1 else default)


def read_axes(axes: Any) -> tuple[int, ...]:
    """Axes as a tuple."""
    named = axes if isinstance(axes, tuple) else (axes,)
    if not all(map(is_int, named)) or len(set(named)) < len(named):
        raise OptionError(f"length_axes must be an int or a tuple of different ints, got {axes!r}")
    return named


def read_dtype(dtype: Any) -> torch.dtype | None:
    """A dtype, or `None`."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype must be a torch.dtype or a mapping of those, got {dtype!r}")
    return dtype
