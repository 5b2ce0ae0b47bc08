"""The rule of each field in a batch, which `PadCollate` and `PackCollate` share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeAlias, TypeVar

import numpy as np
import torch

from torchbudget.cost.protocol import IntArray
from torchbudget.data.collate.batch import Arrangement, Batch
from torchbudget.data.collate.columns import (
    OPTIONAL,
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
from torchbudget.data.collate.layouts import Layout, StackedLayout, stack
from torchbudget.errors import CollateError, OptionError

Rule: TypeAlias = str | tuple[str, ...]
BatchT = TypeVar("BatchT", bound=Batch)
CollateT = TypeVar("CollateT", bound="FieldCollate")

RULES: Final = ("padded", "joined", "stacked", "listed")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCollate:
    """The base of `PadCollate` and `PackCollate`, which explain the options."""

    fields: Mapping[Any, Rule] | None = None
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
        return {**rules, **self._per_field}

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
        rules: dict[FieldPath, Any] = {path_of(n): rule for n, rule in (self.fields or {}).items()}
        structure, fields = take_apart(samples, rules)
        optional = [path for path, rule in rules.items() if OPTIONAL in rule]
        self._check_names([*(one.path for one in fields), *optional])
        shared: dict[Any, Any] = {}
        try:
            with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
                written = [self._write(one, rules.get(one.path), shared) for one in fields]
        except (RuntimeError, TypeError):
            for one in fields:
                check_dense(one)
            raise
        layouts = {
            one.path: layout if one.present is None else replace(layout, present=one.present)
            for one, (_, layout) in zip(fields, written, strict=True)
        }
        data = put_together(structure, iter([value for value, _ in written]))
        arrangement = Arrangement(
            num_samples=len(samples), layouts=layouts, measured=self._measured(layouts, rules)
        )
        plain, mapping, sequence = kinds
        kind = mapping if isinstance(data, dict) else sequence if isinstance(data, tuple) else plain
        return kind(data, arrangement)

    def _write(
        self, field: Field, rule: tuple[str, ...] | None, shared: dict[Any, Any]
    ) -> tuple[Any, Layout]:
        """The value of a field in the batch, and the places of the samples in it."""
        kind = next((word for word in rule or () if word != OPTIONAL), None)
        if field.kind in ("text", "listed"):
            if kind not in (None, "listed"):
                field.fail(0, f"numbers, since the field is {kind}", "a string")
            values = _filled(field, None)
            has_lengths = field.kind == "text" and field.present is None
            lengths = [(len(text),) for text in values] if has_lengths else [()] * len(values)
            return values, StackedLayout(shapes=np.array(lengths, np.int64), is_list=True)
        if field.present is not None and kind != "stacked" and np.ndim(field.values[0]):
            # A sample without the field is an empty one, of length 0.
            field = field._replace(values=_filled(field, field.values[0][:0]))
        column = read_column(field)
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

    def _measured(
        self, layouts: Mapping[FieldPath, Layout], rules: Mapping[FieldPath, Any]
    ) -> FieldPath:
        """The path of the field whose lengths are the batch's.

        It is the field that sizes are taken of; else the first ragged field without a rule, if all
        of those are equally long in each sample. It never depends on which samples share a batch.

        Raises:
            CollateError: the lengths of these fields differ.
        """
        lengths = {layout: layout.lengths for layout in set(layouts.values())}
        ragged = {p: lengths[layout] for p, layout in layouts.items() if lengths[layout].shape[1]}
        if (self._sized_field,) in ragged:
            return (self._sized_field,)
        one, *others = [path for path in ragged if path not in rules] or ragged or layouts
        for other in others:
            if layouts[other] is not layouts[one] and ragged:
                self._check_alike(ragged, one, other)
        return one

    def _check_alike(
        self, lengths: Mapping[FieldPath, IntArray], one: FieldPath, other: FieldPath
    ) -> None:
        ours, theirs = lengths[one], lengths[other]
        axes = min(ours.shape[1], theirs.shape[1])
        differ = (ours[:, :axes] != theirs[:, :axes]).any(axis=1)
        for i in np.flatnonzero(differ)[:1].tolist():
            raise CollateError(
                f"sample {i} of the batch: {show(one)} has the length {_by(ours[i, :axes])}, and "
                f"{show(other)} {_by(theirs[i, :axes])}: give a rule to the one whose lengths are "
                f'not the batch\'s, as in fields={{{key_of(other)!r}: "{self._ragged}"}}, or '
                '"stacked" for a field of one fixed shape'
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HookedCollate:
    """A collate with hooks on the batch of inputs and on the batch of targets.

    Args:
        collate_fn: makes a batch of a list of samples.
        on_input: applied to the batch, or to its first field if samples are pairs; its result is
            used instead.
        on_target: applied to the second field of pairs.

    Raises:
        CollateError: when called with samples that are no pairs, if there is `on_target`.

    >>> collate = HookedCollate(collate_fn=PadCollate(), on_input=lambda x: x / 10)
    >>> collate([([1.0, 2.0], 3)])
    (tensor([[0.1000, 0.2000]]), tensor([3]))
    """

    collate_fn: Callable[[list[Any]], Any]
    on_input: Callable[[Any], Any] | None = None
    on_target: Callable[[Any], Any] | None = None

    def __call__(self, samples: list[Any]) -> Any:
        """The batch after the hooks: a pair if samples are pairs."""
        batch = self.collate_fn(samples)
        if not (isinstance(samples[0], tuple) and len(samples[0]) == 2):
            if self.on_target is not None:
                raise CollateError(
                    "on_target is for samples that are pairs, tuples of an input and a target; got "
                    f"samples of type {type(samples[0]).__name__}"
                )
            return batch if self.on_input is None else self.on_input(batch)
        inputs, targets = batch
        return (
            inputs if self.on_input is None else self.on_input(inputs),
            targets if self.on_target is None else self.on_target(targets),
        )

    def of_sized_field(self, name: Any | None) -> HookedCollate:
        """The same collate for samples whose sizes are those of a field."""
        return replace(self, collate_fn=sized_by(self.collate_fn, name))


def _read_rule(rule: Any) -> tuple[str, ...]:
    words = rule if isinstance(rule, tuple) else (rule,)
    layouts = [word for word in words if word in RULES]
    if len(layouts) > 1 or not words or not set(words) <= {*RULES, OPTIONAL}:
        raise OptionError(
            'fields must be a mapping from field to rule, which is "padded", "joined", "stacked", '
            f'"listed", "{OPTIONAL}", or a tuple of one of these and "{OPTIONAL}", got {rule!r}'
        )
    return words
