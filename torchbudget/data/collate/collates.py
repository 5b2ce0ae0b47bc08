"""The collates: a rule per field, padded to one shape or joined, also into rows of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from torchbudget.checks import (
    HasSizeMultiple,
    at_least_one,
    check_flags,
    is_int,
    natural,
    optional,
    shape_of,
    size_multiple_of,
)
from torchbudget.cost.protocol import CostModel, IntArray
from torchbudget.data.collate.batch import (
    Arrangement,
    Batch,
    PackedBatch,
    PackedMapping,
    PackedSequence,
    PaddedBatch,
    PaddedMapping,
    PaddedSequence,
)
from torchbudget.data.collate.columns import (
    MISSING,
    OPTIONAL,
    Field,
    FieldPath,
    find_path,
    key_of,
    new_tensor,
    path_of,
    put_together,
    read_column,
    show,
    take_apart,
)
from torchbudget.data.collate.layouts import (
    ATTENTION_MASK,
    IGNORED_LABEL,
    LABELS,
    OWN_PADDING,
    SIGNED,
    JoinedLayout,
    Layout,
    PaddedLayout,
    PaddingRule,
    PaddingValue,
    RowRule,
    join,
    join_positions,
    on_device,
    own_padding,
    pad,
    stack,
)
from torchbudget.errors import CollateError, OptionError

Rule: TypeAlias = str | tuple[str, ...]
Axes: TypeAlias = int | tuple[int, ...]
Side: TypeAlias = str | float

RULES: Final = ("padded", "joined", "stacked", "listed")
IDS: Final = "input_ids"
_POSITIONS: Final = "position_ids"
_TYPES: Final = "mm_token_type_ids"
_GRIDS: Final = ("image_grid_thw", "video_grid_thw")
_MADE: Final = (_POSITIONS, "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
                "seq_idx", "use_cache")  # fmt: skip


def _read_rule(rule: Any) -> tuple[str, ...]:
    words = rule if isinstance(rule, tuple) else (rule,)
    layouts = [word for word in words if word in RULES]
    if len(layouts) > 1 or not words or not set(words) <= {*RULES, OPTIONAL}:
        raise OptionError(
            'fields must be a mapping from field to rule, which is "padded", "joined", "stacked", '
            f'"listed", "{OPTIONAL}", or a tuple of one of these and "{OPTIONAL}", got {rule!r}'
        )
    return words


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldCollate:
    """The base of `PadCollate` and `PackCollate`, which explain the options."""

    fields: Mapping[Any, Rule] = field(default_factory=dict, hash=False)
    _ids: str | None = field(default=None, repr=False)  # the field whose lengths are the batch's
    # Padding values of fields without a rule, by name.
    _own_padding: dict[Any, int] = field(default_factory=OWN_PADDING.copy, hash=False, repr=False)
    _row: RowRule = field(default=RowRule(), init=False, repr=False)  # of fields without a rule

    # Each option that may have a value per field, and the function that checks one.
    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {"fields": _read_rule}
    _ragged: ClassVar[str] = ""  # the rule of ragged fields without one
    # The batches of samples that are neither dicts nor tuples, of dicts, of tuples.
    _kinds: ClassVar[tuple[type[Batch], type[Batch], type[Batch]]]

    def __post_init__(self) -> None:
        """Read every option once, so that an invalid one fails here and not in a worker."""
        if not isinstance(self.fields, Mapping):
            raise OptionError(f"fields must be a mapping from field to rule, got {self.fields!r}")
        for option, read in self._per_field.items():
            given = getattr(self, option)
            is_mapping = isinstance(given, Mapping)
            # A copy: later changes to the caller's mapping must not change a frozen value.
            kept = {k: read(v) for k, v in given.items()} if is_mapping else read(given)
            object.__setattr__(self, option, kept)

    def _collate(self, samples: Sequence[Any], length: int = 0) -> Any:
        """Make a batch of the class that fits its samples, of which there is at least one.

        Args:
            samples: samples of the batch.
            length: to which fields without a rule are padded at the least.

        Raises:
            CollateError: the samples cannot form one batch; or an option names a field that the
                samples do not have.
        """
        rules: dict[FieldPath, Any] = {path_of(n): rule for n, rule in self.fields.items()}
        structure, fields = take_apart(samples, rules)
        optional = [path for path, rule in rules.items() if OPTIONAL in rule]
        self._check_names([*(one.path for one in fields), *optional])
        shared: dict[Any, Any] = {"length": length}
        values, layouts = [], {}
        with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
            for one in fields:
                try:
                    own = own_padding(structure, one.path, self._own_padding)
                    value, layout = self._write(one, rules.get(one.path), own, shared)
                except (RuntimeError, TypeError) as error:  # sparse tensors, or other devices
                    message = f"{show(one.path)}: torch cannot join it: {error}"
                    raise CollateError(message) from error
                values.append(value)
                has_all = one.present is None
                layouts[one.path] = layout if has_all else replace(layout, present=one.present)
        data = put_together(structure, iter(values))
        arrangement = Arrangement(
            num_samples=len(samples), layouts=layouts, measured=self._measured(layouts, rules)
        )
        plain, mapping, sequence = self._kinds
        kind = mapping if isinstance(data, dict) else sequence if isinstance(data, tuple) else plain
        return kind(data, arrangement)

    def _write(
        self, field: Field, rule: tuple[str, ...] | None, own: int | None, shared: dict[Any, Any]
    ) -> tuple[Any, Layout]:
        """The value of a field in the batch, and the places of the samples in it.

        Args:
            field: a field of the samples.
            rule: rule of the field, if it has one.
            own: its padding value by its name.
            shared: layouts of the fields before, and the least padded length.
        """
        kind = next((word for word in rule or () if word != OPTIONAL), None)
        if field.kind in ("text", "listed"):
            if kind not in (None, "listed"):
                field.fail(0, f"numbers, since the field is {kind}", "a string")
            values = _filled(field, None)
            return values, Layout(shapes=np.empty((len(values), 0), np.int64))
        if field.present is not None and kind != "stacked" and np.ndim(field.values[0]):
            # A sample without the field is an empty one, of length 0.
            field = field._replace(values=_filled(field, field.values[0][:0]))
        column = read_column(field)
        if kind == "stacked" or not column.shapes.shape[1]:
            return stack(column)
        if (kind or self._ragged) == "joined":
            row = self._row if rule is None else RowRule()
            return join(column, row, own or 0, shared)
        padding, value = self._padding(field.path, column.shapes.shape[1], own)
        length = 0 if rule else shared["length"]
        return pad(column, padding._replace(length=length), value, shared)

    def _padding(self, path: FieldPath, ndim: int, own: Any) -> tuple[PaddingRule, PaddingValue]:
        """How a field of d axes is padded; `own` is its padding value by its name, or `None`."""
        return PaddingRule(), own or 0

    def _check_names(self, paths: Sequence[FieldPath]) -> None:
        """Raise a `CollateError` if an option names a field that the samples do not have."""
        for option in self._per_field:
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


def _read_value(value: Any) -> Any:
    if not callable(value) and not isinstance(value, (int, float)):
        raise OptionError(
            f"padding_value must be a number, a function or a mapping of those, got {value!r}"
        )
    return value


def _read_side(side: Any) -> float:
    """The share of the padding on the left."""
    if side in ("right", "left"):
        return float(side == "left")
    if isinstance(side, bool) or not isinstance(side, (int, float)) or not 0 <= side <= 1:
        raise OptionError(
            'side must be "right", "left", or the share of padding on the left, from 0 to 1, '
            f"got {side!r}"
        )
    return float(side)


def _read_axes(axes: Any) -> tuple[int, ...]:
    named = axes if isinstance(axes, tuple) else (axes,)
    if not all(map(is_int, named)) or len(set(named)) < len(named):
        raise OptionError(f"length_axes must be an int or a tuple of different ints, got {axes!r}")
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class PadCollate(FieldCollate):
    """Collates ragged samples into a `PaddedBatch`, in which every field is padded to one shape.

    **Samples** are dicts, tuples (lists and named tuples too) or bare values, nested to any depth,
    all of the same structure. **Fields** are tensors, NumPy arrays, lists of numbers (nested lists
    for more axes), numbers, or strings. A field keeps its dtype; Python's ints become int64, floats
    the default dtype, bools bool, as in `torch.tensor`. If a sample has another dtype, another
    number of axes or a missing key, an error names the field and the position of the sample.

    **Each field has a rule.** By default, tensors, arrays and lists are padded, numbers are
    stacked, and strings are listed. `fields` gives other rules:

    - "padded": every axis in which samples differ is padded to the longest: `(n, L, …)`.
    - "joined": samples are concatenated along their first axis: `(Σ lengths, …)`.
    - "stacked": samples have one fixed shape: `(n, …)`.
    - "listed": a list of the samples' values, of any type.
    - "optional": samples may lack the key, or have None. Such a sample is empty in a padded or
      joined field, has no row in a stacked field (`batch.present(name)` says which samples have
      one), and is None in a list. If all samples of a batch lack the field, the batch lacks it,
      too. Combine it with another rule in a tuple: `("stacked", "optional")`.

    Fields with a rule in `fields` have their own lengths. All other ragged fields must be equally
    long in each sample, as ids and labels of a text are. The batch's `lengths`, `mask` and
    `num_tokens` are about these fields.

    `padding_value`, `side` and `length_axes` take one value for all fields, or a mapping from field
    to value. Name a field by its key or position, and in nested samples by a tuple of these. A
    field that is not in the mapping has the default.

    Inside a `DataLoader` worker the batch is written directly into shared memory.

    Args:
        fields: a mapping from field to rule.
        padding_value: a number, or a function of a sample's value, such as `torch.min` for tensors
            and lists or `np.min` for arrays. Unless a mapping names them, `labels` are padded with
            -100, which `torch.nn.functional.cross_entropy` ignores, and `attention_mask` with 0,
            also in named tuples; so are all fields within `labels`.
        side: the side of the padding: "right", "left", or the share of padding on the left, from 0
            to 1; 0.5 centres samples.
        length_axes: the axes, not counting the batch's, whose lengths the batch reports and whose
            padded lengths are rounded: 0 for sequences, `(0, 1)` for images of height, width,
            channels, -1 for channels by time, `()` for a field without a length. A field without
            such an axis has no length.
        size_multiple: padded lengths are rounded up to a multiple of it, in all fields. It must be
            that of the sampler or stream: give an int, or the sampler or stream itself, from which
            the int is read once, and with `max_shapes` the shapes: batches are padded to these, and
            missing rows are copies of the batch's shortest sample, masked by labels of -100.
        row_mask: states that the loss leaves out masked rows, by `batch.row_mask` or `batch.mask`.
            Otherwise samples must have integer `labels`, since a loss would count masked rows.
        mask: the name, such as "attention_mask", of a field that is added to a batch of dict
            samples: the batch's mask as int64 ones and zeros, as Hugging Face models take it.
            `PaddedBatch.mask` is the same mask as bools.

    Raises:
        OptionError: an option is invalid.
        CollateError: when called, the samples cannot form one batch, or lack a field that an option
            names.

    >>> collate = PadCollate(padding_value={"ids": 9}, side="left", mask="attention_mask")
    >>> batch = collate([{"ids": [1, 2, 3], "labels": [4, 5, 6]}, {"ids": [7], "labels": [8]}])
    >>> batch["ids"]
    tensor([[1, 2, 3],
            [9, 9, 7]])
    >>> batch["labels"]
    tensor([[   4,    5,    6],
            [-100, -100,    8]])
    >>> batch["attention_mask"]
    tensor([[1, 1, 1],
            [0, 0, 1]])
    >>> images = PadCollate(length_axes=(0, 1), size_multiple=4)
    >>> batch = images([torch.ones(5, 2, 3), torch.ones(3, 4, 3)])
    >>> batch.data.shape, batch.lengths.tolist()
    (torch.Size([2, 8, 4, 3]), [[5, 2], [3, 4]])
    """

    padding_value: PaddingValue | Mapping[Any, PaddingValue] = 0
    side: Side | Mapping[Any, Side] = "right"
    length_axes: Axes | Mapping[Any, Axes] = 0
    size_multiple: int | HasSizeMultiple = 1
    row_mask: bool = False
    mask: str | None = None
    _own_side: float = field(default=0.0, repr=False)  # of fields that `side` does not name
    _shapes: tuple[tuple[int, int], ...] = field(default=(), init=False, repr=False)

    _ragged: ClassVar[str] = "padded"
    _kinds: ClassVar = (PaddedBatch, PaddedMapping, PaddedSequence)
    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "fields": _read_rule,
        "padding_value": _read_value,
        "side": _read_side,
        "length_axes": _read_axes,
    }

    def __post_init__(self) -> None:
        """Check the options."""
        FieldCollate.__post_init__(self)
        # A copy of the numbers: a collate is sent to workers, and a sampler is large.
        object.__setattr__(self, "_shapes", getattr(self.size_multiple, "shapes", ()))
        object.__setattr__(self, "size_multiple", size_multiple_of(self.size_multiple))
        check_flags(row_mask=self.row_mask)
        if self.mask is not None and (not isinstance(self.mask, str) or not self.mask):
            raise OptionError(f"mask must be the name of a new field or None, got {self.mask!r}")

    @classmethod
    def for_tokenizer(cls, tokenizer: Any, **options: Any) -> PadCollate:
        """Make a collate that pads as a tokenizer of transformers does, labels too.

        Samples are dicts. Token ids are padded with the tokenizer's padding token,
        `token_type_ids` with its type of padding, `special_tokens_mask` with 1, `attention_mask`
        with 0 and `labels` or `label` with -100, on the tokenizer's side. An `attention_mask` is
        added to samples that have none, if the model takes one. `lengths` are those of the ids.

        Args:
            tokenizer: the tokenizer, which is read once and not kept. It needs `pad_token_id` and
                `padding_side`; its `model_input_names` and `pad_token_type_id` are used if it has
                them.
            options: options of `PadCollate`, such as `size_multiple`. They override the tokenizer.
                Fields that a mapping does not name are padded as the tokenizer says; a single
                `padding_value` is for fields that the tokenizer does not know.

        Raises:
            OptionError: the tokenizer has no padding token, or an option is invalid.
            CollateError: when called, the samples are not dicts of token ids.

        >>> from types import SimpleNamespace
        >>> tokenizer = SimpleNamespace(pad_token_id=9, padding_side="left")
        >>> collate = PadCollate.for_tokenizer(tokenizer)
        >>> dict(collate([{"input_ids": [1, 2]}, {"input_ids": [3]}]))
        {'input_ids': tensor([[1, 2],
                [9, 3]]), 'attention_mask': tensor([[1, 1],
                [0, 1]])}
        """
        token = getattr(tokenizer, "pad_token_id", None)
        if not is_int(token):
            raise OptionError(
                "for_tokenizer needs a tokenizer with a padding token, whose pad_token_id is an "
                f"int, got {token!r} from {type(tokenizer).__name__}; set one, as in "
                "tokenizer.pad_token = tokenizer.eos_token"
            )
        side = _read_side(getattr(tokenizer, "padding_side", None))
        ids, *others = getattr(tokenizer, "model_input_names", ("input_ids", ATTENTION_MASK))
        padding = OWN_PADDING | {
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "special_tokens_mask": 1,  # padding is a special token
            "label": IGNORED_LABEL,  # as the collators of transformers take it, too
            ids: token,
        }
        mask = ATTENTION_MASK if ATTENTION_MASK in others else None
        # A mapping of no fields: all are padded as the tokenizer says.
        defaults: dict[str, Any] = {"side": side, "padding_value": {}, "mask": mask}
        return cls(**defaults | options, _ids=ids, _own_side=side, _own_padding=padding)

    def __call__(self, samples: Sequence[Any]) -> PaddedBatch:
        """Collate n ≥ 1 samples, in time linear in the padded elements."""
        batch: PaddedBatch = self._filled_up(samples) if self._shapes else self._collate(samples)
        if self._ids is not None:
            check_ids(batch, self._ids, PaddedLayout, "for_tokenizer")
            if self.mask in batch:
                return batch
        return batch if self.mask is None else _add_mask(batch, self.mask)

    def _filled_up(self, samples: Sequence[Any]) -> PaddedBatch:
        """The batch in the shape that has room for it, with copies of its shortest sample.

        Raises:
            CollateError: the samples have no length or a longer one; or there are no labels, so
                that a loss might count these copies.
            OptionError: the samples are too many for any shape.
        """
        n, found = len(samples), self.row_mask
        rows, length = shape_of(self._shapes, n, 0)
        batch: PaddedBatch = self._collate(samples, length)
        if batch.padded_size != (length,):
            raise CollateError(
                f"{n} samples padded to {batch.padded_size} must have the planned shape ({rows}, "
                f"{length}): collate batches of this sampler or stream, with one ragged axis"
            )
        if rows > n:
            shortest = samples[int(batch.lengths.argmin())]
            batch = self._collate([*samples, *[shortest] * (rows - n)], length)
        known = batch._known
        fields = zip(known.layouts.items(), known.fields(batch.data), strict=True)
        for (path, layout), value in fields:
            is_label = own_padding(batch.data, path, self._own_padding) == IGNORED_LABEL
            if is_label and isinstance(value, Tensor) and value.dtype in SIGNED:
                found = True
                if rows > n:
                    value[layout.part(n, rows)[0]] = IGNORED_LABEL
        if not found:
            raise CollateError(
                f"labels of {IGNORED_LABEL} mask the rows that fill a batch up to its shape, but "
                f"no field of integers is named {LABELS!r}: add one; or leave those rows out of "
                "the loss by batch.row_mask or batch.mask, and state PadCollate(row_mask=True)"
            )
        return type(batch)(batch.data, replace(known, num_samples=n, masked_rows=rows - n))

    def _padding(self, path: FieldPath, ndim: int, own: Any) -> tuple[PaddingRule, PaddingValue]:
        """See `FieldCollate._padding`."""
        named = of_field(self.length_axes, path, (0,))
        axes = tuple(dict.fromkeys(axis % ndim for axis in named if -ndim <= axis < ndim))
        multiple: Any = self.size_multiple  # an int, once it was read
        rule = PaddingRule(of_field(self.side, path, self._own_side), multiple, axes)
        given: Any = self.padding_value
        if isinstance(given, dict):
            return rule, of_field(given, path, own or 0)
        return rule, given if own is None else own


def _add_mask(batch: PaddedBatch, name: str) -> PaddedBatch:
    """The batch with its mask as a further field."""
    data, known = batch.data, batch._known
    if not isinstance(data, dict):
        raise CollateError(
            "mask= adds a field to dict samples, which these are not: use batch.mask"
        )
    if name in data:
        raise CollateError(f"mask={name!r} would overwrite a field that the samples have")
    layout = known.layouts[known.measured]
    if not isinstance(layout, PaddedLayout) or not layout.length_axes:
        raise CollateError(f"mask={name!r} needs a field with a ragged axis")
    mask = layout.mask(torch.device("cpu"))
    field = new_tensor(tuple(mask.shape), torch.int64).copy_(mask)
    rule = layout.rule._replace(length_axes=tuple(range(mask.ndim - 1)))
    layouts = {**known.layouts, (name,): PaddedLayout.of(layout.lengths, rule)}
    return type(batch)(data | {name: field}, replace(known, layouts=layouts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCollate(FieldCollate):
    """Collates ragged samples into a `PackedBatch`: concatenated, without padding.

    Every field is concatenated along its first axis; its other axes must agree. Samples, fields and
    rules are those of `PadCollate`, except that "joined" is the default for tensors, arrays and
    lists.

    Args:
        fields: as in `PadCollate`, a mapping from field to "joined", "padded", "stacked", "listed"
            or "optional". Fields with a rule have their own lengths. All others must be equally
            long in each sample; `lengths`, `cu_seqlens` and `max_seqlen` are about these. A padded
            field is padded on the right with 0, labels with -100.
        layout: `"transformers"` makes a `TransformersBatch` of dict samples. It has `input_ids`,
            `labels` and other fields with one value per token in one row, `(1, total)`;
            `position_ids`, `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` and
            `seq_idx` of its segments; and `use_cache=False`. It has no attention mask; if samples
            have one, it must be all ones. Fields with a rule are not in the row. If samples have
            `position_ids`, of shape `(3, L)`, those of the row are `(4, 1, total)`, as models of
            text with images need them: first the position in each text, then these three.
        size_multiple: each sample is padded to a multiple of it. It must be that of the sampler or
            stream, and may be read from it, as in `PadCollate`. Padding is 0 (-100 in `labels`). It
            forms segments of its own, so no sample attends to it. `cu_seqlens` includes these
            segments, and `lengths` does not count padding.
        total_multiple: the total is padded to a multiple of it in the same way. It must be that of
            the cost, `PackedCost(total_multiple=…)`: pass an int, or the sampler, stream or cost,
            from which it is read once. If it is the budget's number of positions, all batches are
            equally long.
        segments: number of segments of every batch, so that `cu_seqlens` always has one entry more,
            for compiled models. Segments without a sample share the padding of the total, or are
            empty. It must be one more than `max_batch_size` of the sampler or stream, and needs
            `size_multiple=1`.
        position_ids_start: with `layout="transformers"`, the position of each sample's first token:
            0 for most models, `padding_idx + 1` for models like RoBERTa.
        causal_labels: with `layout="transformers"`, set the first label of each sample to -100,
            since the last token of the previous sample must not predict it, and use `input_ids` as
            the labels of samples without `labels`. False leaves labels as they are, for models that
            do not shift them.

    Raises:
        OptionError: an option is invalid.
        CollateError: when called, the samples cannot form one batch.

    >>> batch = PackCollate()([torch.ones(2, 4), torch.zeros(3, 4)])
    >>> batch.data.shape, batch.cu_seqlens
    (torch.Size([5, 4]), tensor([0, 2, 5], dtype=torch.int32))
    >>> collate = PackCollate(layout="transformers")
    >>> for name, value in collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]).items():
    ...     print(name, value.tolist() if isinstance(value, torch.Tensor) else value)
    input_ids [[5, 6, 7, 8, 9]]
    labels [[-100, 6, 7, -100, 9]]
    position_ids [[0, 1, 2, 0, 1]]
    cu_seq_lens_q [0, 3, 5]
    cu_seq_lens_k [0, 3, 5]
    max_length_q 3
    max_length_k 3
    seq_idx [[0, 0, 0, 1, 1]]
    use_cache False
    """

    layout: str | None = None
    size_multiple: int | HasSizeMultiple = 1
    total_multiple: Any = 1
    segments: int | None = None
    position_ids_start: int = 0
    causal_labels: bool = True

    _ragged: ClassVar[str] = "joined"
    _kinds: ClassVar = (PackedBatch, PackedMapping, PackedSequence)

    def __post_init__(self) -> None:
        """Check the options."""
        FieldCollate.__post_init__(self)
        if self.layout not in (None, "transformers"):
            raise OptionError(f'layout must be "transformers" or None, got {self.layout!r}')
        check_flags(causal_labels=self.causal_labels)
        # Copies of the numbers: a collate is sent to workers, and a sampler is large.
        object.__setattr__(self, "size_multiple", size_multiple_of(self.size_multiple))
        cost = getattr(self.total_multiple, "cost", self.total_multiple)
        rounded = getattr(cost, "total_multiple", 1 if isinstance(cost, CostModel) else cost)
        object.__setattr__(self, "total_multiple", at_least_one("total_multiple", rounded))
        row = RowRule(
            multiple=size_multiple_of(self.size_multiple),
            total_multiple=self.total_multiple,
            segments=optional("segments", self.segments),
            in_row=self.layout is not None,
            first_position=natural("position_ids_start", self.position_ids_start),
        )
        if row.multiple > 1 and row.segments is not None:
            raise OptionError("segments needs size_multiple=1: the total is padded, not samples")
        object.__setattr__(self, "_row", row)
        if self.layout is None and (self.position_ids_start, self.causal_labels) != (0, True):
            raise OptionError('position_ids_start and causal_labels need layout="transformers"')

    def _write(
        self, field: Field, rule: tuple[str, ...] | None, own: int | None, shared: dict[Any, Any]
    ) -> tuple[Any, Layout]:
        """See `FieldCollate._write`."""
        if self._row.in_row and field.path == (_POSITIONS,) and rule is None:
            return join_positions(read_column(field), self._row)
        return FieldCollate._write(self, field, rule, own, shared)

    def __call__(self, samples: Sequence[Any]) -> PackedBatch:
        """Collate n ≥ 1 samples, in time linear in their elements."""
        batch: PackedBatch = self._collate(samples)
        return batch if self.layout is None else _in_one_row(batch, self.causal_labels)


class TransformersBatch(PackedMapping):
    """n samples in one row, `(1, total, …)`: a mapping of arguments of a transformers model.

    Made by `PackCollate(layout="transformers")`, for `model(**batch)`. `cu_seqlens`, `max_seqlen`
    and `position_ids` are those of the row's segments, padding included. `lengths` and
    `num_tokens` count the samples' own positions.
    """

    def _structured(self, values: Iterable[Any]) -> dict[str, Any]:
        named = zip(self._known.layouts, values, strict=True)
        return {path[0]: value for path, value in named if value is not MISSING}

    def _part(self, start: int, stop: int) -> TransformersBatch:
        part = super()._part(start, stop)
        return _with_inputs(part.data, part._known)


def _in_one_row(packed: PackedBatch, causal_labels: bool) -> TransformersBatch:
    """A packed batch of dicts as the inputs of a model.

    Args:
        packed: its fields without a rule are in one row.
        causal_labels: see `PackCollate`.

    Raises:
        CollateError: the samples are not of fields that a model takes.
    """
    known = packed._known
    _check(packed)
    layouts = {path: own for path, own in known.layouts.items() if path != (ATTENTION_MASK,)}
    fields = dict(packed)
    if causal_labels:
        layouts.setdefault((LABELS,), layouts[(IDS,)])
        fields[LABELS] = _causal(fields, layouts[(LABELS,)])
    arrangement = replace(known, layouts=layouts, measured=(IDS,))
    return _with_inputs({path[0]: fields[path[0]] for path in layouts}, arrangement)


def _check(packed: PackedBatch) -> None:
    """Raise a `CollateError` for fields that no model takes."""
    check_ids(packed, IDS, JoinedLayout, 'layout="transformers"')
    for path, layout in packed._known.layouts.items():
        of_axes = isinstance(layout, JoinedLayout) and layout.rule.of_axes
        if len(path) > 1 or (path[0] in _MADE and not of_axes):
            raise CollateError(
                f'layout="transformers" makes {", ".join(_MADE)} itself, and its models take no '
                f"nested fields: leave {show(path)} out of the samples"
            )
    # A model takes its positions from both, unless it is given some, as in a row.
    has_both = _TYPES in packed and not {*_GRIDS}.isdisjoint(packed)
    if has_both and _POSITIONS not in packed:
        raise CollateError(
            f"samples have {_TYPES!r} and the grids of images, but no {_POSITIONS!r}: a model with "
            "three axes of positions would take its positions from the row, without images, and "
            "let samples attend to each other. Add the model's own of each sample, of shape "
            f"(3, L): get_rope_index(…)[0][:, 0]. For models of one axis leave {_TYPES!r} out"
        )
    mask = packed.data.get(ATTENTION_MASK)  # 0 where the row is padded
    if mask is not None and int(torch.count_nonzero(mask)) != packed.num_tokens:
        raise CollateError(
            f"field {ATTENTION_MASK!r} masks padding in the samples, and packed batches have no "
            "padding: tokenize without padding"
        )


def _causal(fields: dict[str, Tensor], layout: Any) -> Tensor:
    """The labels of next tokens; nothing before a sample predicts its first one."""
    labels = fields.get(LABELS)
    in_row = isinstance(layout, JoinedLayout) and layout.rule.in_row
    if not in_row or (labels is not None and labels.dtype not in SIGNED):
        raise CollateError(
            f"field {LABELS!r} must have one signed integer per position, {IGNORED_LABEL} to "
            "ignore it; causal_labels=False takes labels as they are"
        )
    ignored = np.ones(layout.shape, np.bool_)  # padding, and the first position of each sample
    for row, place in layout.places:
        ignored[row, place.start + 1 : place.stop] = False
    if labels is None:
        ids = fields[IDS]
        labels = new_tensor((*ids.shape,), ids.dtype, ids.device).copy_(ids)
    return labels.masked_fill_(on_device(ignored, labels.device), IGNORED_LABEL)


def _with_inputs(fields: dict[str, Any], arrangement: Arrangement) -> TransformersBatch:
    """The fields of a row, and the ends of its segments as a model takes them."""
    row = TransformersBatch(fields, arrangement)
    layout: Any = arrangement.layouts[(IDS,)]
    lengths = np.diff(layout.bounds)
    segments = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    positions = row.position_ids[None] + layout.rule.first_position
    if _POSITIONS in fields:
        positions = torch.cat([positions[None], fields[_POSITIONS][1:]])
    made = {
        _POSITIONS: positions,
        "cu_seq_lens_q": row.cu_seqlens,
        "cu_seq_lens_k": row.cu_seqlens,
        "max_length_q": row.max_seqlen,
        "max_length_k": row.max_seqlen,
        "seq_idx": on_device(segments[None], fields[IDS].device),
        # With a cache, models do not look for segments in position_ids, and samples see each other.
        "use_cache": False,
    }
    return TransformersBatch(fields | made, arrangement)
