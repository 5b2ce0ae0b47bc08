"""The rule of each field in a batch, which `PadCollate` and `PackCollate` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import numpy as np
import torch

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.batch import Arrangement, Batch, Entry
from torchbudget.data.collate.columns import (
    Column,
    Field,
    FieldPath,
    check_dense,
    find_path,
    key_of,
    path_of,
    put_together,
    read_column,
    show,
    take_apart,
)
from torchbudget.data.collate.layouts import Layout, stack
from torchbudget.errors import CollateError, OptionError

Rule: TypeAlias = str | tuple[str, ...]
BatchT = TypeVar("BatchT", bound=Batch)
CollateT = TypeVar("CollateT", bound="FieldCollate")

OPTIONAL: Final = "optional"
RULES: Final = ("padded", "joined", "stacked", "listed")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCollate:
    """The base of `PadCollate` and `PackCollate`, which explain the options."""

    fields: Mapping[Any, Rule] | None = None
    dtype: torch.dtype | Mapping[Any, torch.dtype] | None = None
    # The field that a stream's sizes are taken of. An argument, for replace() to keep.
    _sized_field: Any | None = field(default=None, repr=False)

    # Each option that may have a value per field, and the function that checks one.
    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {}

    def __post_init__(self) -> None:
        """Read every option once, so that an invalid one fails here and not in a worker."""
        if self.fields is not None and not isinstance(self.fields, Mapping):
            raise OptionError(f"fields must be a mapping from field to rule, got {self.fields!r}")
        for option, read in self._readers().items():
            given = getattr(self, option)
            is_mapping = isinstance(given, Mapping)
            # A copy: later changes to the caller's mapping must not change a frozen value.
            kept = {k: read(v) for k, v in given.items()} if is_mapping else read(given)
            object.__setattr__(self, option, kept)

    def _readers(self) -> dict[str, Callable[[Any], Any]]:
        rules = {} if self.fields is None else {"fields": _read_rule}
        return {**rules, "dtype": _read_dtype, **self._per_field}

    def of_sized_field(self: CollateT, name: Any | None) -> CollateT:
        """The same collate for samples whose sizes are those of a field, as a stream's are."""
        return self if name is None else replace(self, _sized_field=name)

    def _collate(
        self, samples: Sequence[Any], kinds: tuple[type[BatchT], type[BatchT], type[BatchT]]
    ) -> BatchT:
        """Make a batch of the class that fits its samples.

        Args:
            samples: at least one.
            kinds: the classes for samples that are neither dicts nor tuples, for dicts, for tuples.

        Raises:
            CollateError: the samples cannot form one batch; or an option names a field that the
                samples do not have.
        """
        rules = {path_of(name): rule for name, rule in (self.fields or {}).items()}
        listed = {path for path, rule in rules.items() if "listed" in rule}
        optional = {path for path, rule in rules.items() if OPTIONAL in rule}
        structure, fields = take_apart(samples, listed, optional)
        self._check_names([*(one.path for one in fields), *optional])
        shared: dict[Any, Any] = {}
        try:
            with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
                written = [self._write(one, rules.get(one.path), shared) for one in fields]
        except (RuntimeError, TypeError):
            for one in fields:
                check_dense(one)
            raise
        entries = tuple(
            Entry(one.path, layout, one.present)
            for one, (_, layout) in zip(fields, written, strict=True)
        )
        data = put_together(structure, iter([value for value, _ in written]))
        arrangement = Arrangement(
            num_samples=len(samples), entries=entries, measured=self._measured(entries, rules)
        )
        plain, mapping, sequence = kinds
        kind = mapping if isinstance(data, dict) else sequence if isinstance(data, tuple) else plain
        return kind(data, arrangement)

    def _write(
        self, field: Field, rule: Rule | None, shared: dict[Any, Any]
    ) -> tuple[Any, Layout | None]:
        """The value of a field in the batch, and the places of the samples in a tensor."""
        kind = next((word for word in rule or () if word != OPTIONAL), None)
        if field.kind in ("text", "listed"):
            if kind not in (None, "listed"):
                field.fail(0, f"numbers, since the field is {kind}", "a string")
            return _filled(field, None), None
        if field.present is not None and kind != "stacked" and np.ndim(field.values[0]):
            # A sample without the field is an empty one, of length 0.
            field = field._replace(values=_filled(field, field.values[0][:0]))
        column = read_column(field, of_field(self.dtype, field.path, None))
        if kind == "stacked" or not column.shapes.shape[1]:
            return stack(column)
        return self._write_ragged(column, kind, is_own=rule is not None, shared=shared)

    def _write_ragged(
        self, column: Column, kind: str | None, *, is_own: bool, shared: dict[Any, Any]
    ) -> tuple[torch.Tensor, Layout]:
        raise NotImplementedError

    def _check_names(self, paths: Sequence[FieldPath]) -> None:
        """Raise a `CollateError` where an option names a field that the samples do not have."""
        for option in self._readers():
            given = getattr(self, option)
            for name in given if isinstance(given, dict) else ():
                find_path(name, paths, option)

    def _measured(self, entries: Sequence[Entry], rules: Mapping[FieldPath, Rule]) -> FieldPath:
        """The path of the field whose lengths are the batch's.

        It is the field that sizes are taken of; else the first ragged field without a rule, if all
        of those are equally long in each sample. It never depends on which samples share a batch.

        Raises:
            CollateError: the lengths of these fields differ.
        """
        ragged = {path: one for path, one, _ in entries if one is not None and one.ragged_axes}
        if (self._sized_field,) in ragged:
            return (self._sized_field,)
        alike = [path for path in ragged if path not in rules] or list(ragged)
        for other in alike[1:]:
            if ragged[other] is not ragged[alike[0]]:
                self._check_alike(ragged, alike[0], other)
        tensors = (path for path, one, _ in entries if one is not None)
        return alike[0] if alike else next(tensors, entries[0].path)

    def _check_alike(
        self, layouts: Mapping[FieldPath, Layout], one: FieldPath, other: FieldPath
    ) -> None:
        axes = min(layouts[one].ragged_axes, layouts[other].ragged_axes)
        ours, theirs = layouts[one].lengths[:, :axes], layouts[other].lengths[:, :axes]
        for i in np.flatnonzero((ours != theirs).any(axis=1))[:1].tolist():
            raise CollateError(
                f"sample {i} of the batch: {show(one)} has the length {_by(ours[i])}, and "
                f"{show(other)} {_by(theirs[i])}: give a rule to the one whose lengths are not the "
                f'batch\'s, as in fields={{{key_of(other)!r}: "{self._ragged}"}}, or "stacked" for '
                "a field of one fixed shape"
            )

    _ragged: ClassVar[str] = ""


def _by(lengths: IntArray) -> str:
    return " by ".join(map(str, lengths.tolist()))


def _filled(field: Field, value: Any) -> Sequence[Any]:
    """The values of all samples, with another value for samples without the field."""
    if field.present is None:
        return list(field.values)
    values = iter(field.values)
    return [next(values) if has else value for has in field.present.tolist()]


def of_field(option: Any, path: FieldPath, default: Any) -> Any:
    """The value of an option for a field."""
    if not isinstance(option, dict):
        return option
    return option.get(path, option.get(path[0], default) if len(path) == 1 else default)


def sized_by(
    collate_fn: Callable[[list[Any]], Any], name: Any | None
) -> Callable[[list[Any]], Any]:
    """The collate for samples whose sizes are those of a field; one of another kind as it is."""
    of_sized_field = getattr(collate_fn, "of_sized_field", None)
    return collate_fn if of_sized_field is None else of_sized_field(name)


def _read_rule(rule: Any) -> tuple[str, ...]:
    words = rule if isinstance(rule, tuple) else (rule,)
    layouts = [word for word in words if word in RULES]
    if len(layouts) > 1 or not words or not set(words) <= {*RULES, OPTIONAL}:
        raise OptionError(
            'fields must be a mapping from field to rule, which is "padded", "joined", "stacked", '
            f'"listed", "{OPTIONAL}", or a tuple of one of these and "{OPTIONAL}", got {rule!r}'
        )
    return words


def _read_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise OptionError(f"dtype must be a torch.dtype or a mapping of those, got {dtype!r}")
    return dtype
