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
    Field,
    FieldPath,
    find_path,
    key_of,
    path_of,
    put_together,
    read_column,
    show,
    take_apart,
)
from torchbudget.data.collate.layouts import (
    Layout,
    PaddingRule,
    PaddingValue,
    RowRule,
    StackedLayout,
    join,
    own_padding,
    pad,
    stack,
)
from torchbudget.errors import CollateError, OptionError

Rule: TypeAlias = str | tuple[str, ...]
BatchT = TypeVar("BatchT", bound=Batch)

RULES: Final = ("padded", "joined", "stacked", "listed")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCollate:
    """The base of `PadCollate` and `PackCollate`, which explain the options."""

    fields: Mapping[Any, Rule] | None = None
    _ids: str | None = field(default=None, repr=False)  # the field whose lengths are the batch's
    _row: RowRule = field(default=RowRule(), init=False, repr=False)  # of fields without a rule

    # Each option that may have a value per field, and the function that checks one.
    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {}
    _ragged: ClassVar[str] = ""  # the rule of ragged fields without one

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
        values, layouts = [], {}
        for one in fields:
            try:
                with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
                    value, layout = self._write(one, rules.get(one.path), shared)
            except (RuntimeError, TypeError) as error:  # other devices, or tensors that are sparse
                raise CollateError(f"{show(one.path)}: torch cannot join it: {error}") from error
            values.append(value)
            has_all = one.present is None
            layouts[one.path] = layout if has_all else replace(layout, present=one.present)
        data = put_together(structure, iter(values))
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
            return values, StackedLayout(shapes=np.array(lengths, np.int64))
        if field.present is not None and kind != "stacked" and np.ndim(field.values[0]):
            # A sample without the field is an empty one, of length 0.
            field = field._replace(values=_filled(field, field.values[0][:0]))
        column = read_column(field)
        if kind == "stacked" or not column.shapes.shape[1]:
            return stack(column)
        if (kind or self._ragged) == "joined":
            row = self._row if rule is None else RowRule()
            return join(column, row, own_padding(field.names) or 0, shared)
        return pad(column, *self._padding(field, column.shapes.shape[1]), shared)

    def _padding(self, field: Field, ndim: int) -> tuple[PaddingRule, PaddingValue]:
        """How a field of d axes is padded."""
        return PaddingRule(0.0, (1,) * ndim, (0,)), own_padding(field.names) or 0

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

        It is the first ragged field without a rule, if all of those are equally long in each
        sample. It never depends on which samples share a batch.

        Raises:
            CollateError: the lengths of these fields differ.
        """
        ragged = [path for path, layout in layouts.items() if layout.length_axes]
        if (self._ids,) in ragged:
            return (self._ids,)
        one, *others = [path for path in ragged if path not in rules] or ragged or [*layouts][:1]
        for other in others:
            if layouts[other] is not layouts[one]:
                self._check_alike(layouts, one, other)
        return one

    def _check_alike(
        self, layouts: Mapping[FieldPath, Layout], one: FieldPath, other: FieldPath
    ) -> None:
        ours, theirs = layouts[one].lengths, layouts[other].lengths
        axes = min(ours.shape[1], theirs.shape[1])
        differ = (ours[:, :axes] != theirs[:, :axes]).any(axis=1)
        for i in np.flatnonzero(differ)[:1].tolist():
            raise CollateError(
                f"sample {i} of the batch: {show(one)} has the length {_by(ours[i, :axes])}, and "
                f"{show(other)} {_by(theirs[i, :axes])}: give a rule to the one whose lengths are "
                f'not the batch\'s, as in fields={{{key_of(other)!r}: "{self._ragged}"}}, or '
                '"stacked" for a field of one fixed shape'
            )


def _by(lengths: IntArray) -> str:
    return " by ".join(map(str, lengths.tolist()))


def check_ids(batch: Batch, name: str, kind: type[Layout], option: str) -> None:
    """Raise a `CollateError` if a field is not of one token id per position, padded or joined."""
    layouts = batch._known.layouts
    if not isinstance(layouts.get((name,)), kind) or batch[name].ndim != 2:
        shape = f" of shape {list(batch[name].shape)}" if (name,) in layouts else ""
        raise CollateError(
            f"{option} takes dict samples with a field {name!r} of one token id per position, got "
            f"samples of {', '.join(map(show, layouts))}{shape}"
        )


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


def _read_rule(rule: Any) -> tuple[str, ...]:
    words = rule if isinstance(rule, tuple) else (rule,)
    layouts = [word for word in words if word in RULES]
    if len(layouts) > 1 or not words or not set(words) <= {*RULES, OPTIONAL}:
        raise OptionError(
            'fields must be a mapping from field to rule, which is "padded", "joined", "stacked", '
            f'"listed", "{OPTIONAL}", or a tuple of one of these and "{OPTIONAL}", got {rule!r}'
        )
    return words
