"""The collate that pads any ragged axis of any field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeAlias

import torch

from torchbudget.checks import HasSizeMultiple, size_multiple_of
from torchbudget.data.collate.batch import make_batch
from torchbudget.data.collate.columns import new_tensor, read_column
from torchbudget.data.collate.options import CollateOptions, of_field, read_axes, read_dtype
from torchbudget.data.collate.padded_batch import (
    PADDED_KINDS,
    PaddedBatch,
    PaddedLayout,
    PaddingRule,
    PaddingValue,
    Placement,
    pad,
)
from torchbudget.data.collate.structure import Field, FieldPath, show
from torchbudget.data.collate.tokenizer_rules import (
    ATTENTION_MASK,
    OWN_PADDING,
    TokenizerRules,
    own_padding,
    read_tokenizer,
)
from torchbudget.errors import CollateError, OptionError

Side: TypeAlias = str | float
Multiple: TypeAlias = int | tuple[int, ...] | HasSizeMultiple


def _read_value(value: Any) -> Any:
    if not callable(value) and not isinstance(value, (int, float, complex)):
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


def _read_multiple(multiple: Any) -> int | tuple[int, ...]:
    if isinstance(multiple, tuple):
        return tuple(map(size_multiple_of, multiple))
    return size_multiple_of(multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class PadCollate(CollateOptions):
    """Collates ragged samples into a `PaddedBatch`: every field padded to one shape.

    **Samples** are dicts, tuples (lists and named tuples too) or bare values, nested to any depth,
    all of the same structure. **Fields** are tensors, NumPy arrays, lists of numbers (nested lists
    for more axes), numbers, or strings. A field keeps its dtype; Python's ints become int64,
    floats the default dtype, bools bool, as in `torch.tensor`. Every axis in which samples differ
    is padded to the longest; numbers are stacked; strings become a list. Nothing is guessed: a
    sample with another dtype, another number of axes or a missing key raises an error that names
    the field and the sample's position.

    Each option is one value for all fields, or a mapping from field to value. A field is named by
    its key or position, and by a tuple of those if samples are nested. A field that is not in the
    mapping has the default.

    Inside a `DataLoader` worker the batch is written directly into shared memory.

    Args:
        padding_value: a number, or a function of a sample's own value: `torch.min` for tensors and
            lists, `np.min` for arrays. The fields `labels` and `attention_mask` pad with -100,
            which `torch.nn.functional.cross_entropy` ignores, and 0, unless a mapping names them;
            so do those of named tuples, and all fields within `labels`.
        side: the side of the padding: "right", "left", or the share of it on the left, from 0 to 1;
            0.5 centres samples.
        length_axes: the axes, not counting the batch's, whose lengths the batch reports and whose
            padded lengths are rounded: 0 for sequences, `(0, 1)` for images of height, width,
            channels, -1 for channels by time, `()` for a field of one fixed shape. A field
            without such an axis has no length.
        size_multiple: padded lengths are rounded up to a multiple of it. It must be that of the
            sampler or stream: give an int for all of `length_axes`, a tuple of one per axis, or
            the sampler or stream itself, from which the int is read once.
        length_field: the field, by name or position, whose lengths are the batch's `lengths`,
            `mask` and `num_tokens`. Default: in a stream, the field that its `size` names; else
            any that has one of the `length_axes`, which must then be equally long in each sample,
            as a text's ids and labels are.
        dtype: of fields that are lists, for batches in which all of a field's lists are empty and
            so have none of their own. Lists of another dtype raise an error.
        mask: the name, such as "attention_mask", of a field that is added to a batch of dict
            samples: the length field's mask as int64 ones and zeros, as Hugging Face models take
            it. `PaddedBatch.mask` is the same as bool.

    Raises:
        OptionError: an option is invalid.
        CollateError: when called with samples that cannot form one batch, or without a field that
            an option names.

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
    size_multiple: Multiple | Mapping[Any, Multiple] = 1
    mask: str | None = None
    _tokenizer: TokenizerRules | None = field(default=None, repr=False)  # see _sized_field
    _rules: dict[tuple[FieldPath, FieldPath, int], PaddingRule] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "padding_value": _read_value,
        "side": _read_side,
        "length_axes": read_axes,
        "size_multiple": _read_multiple,
        "dtype": read_dtype,
    }

    def __post_init__(self) -> None:
        """Check the options."""
        CollateOptions.__post_init__(self)
        if self.mask is not None and (not isinstance(self.mask, str) or not self.mask):
            raise OptionError(f"mask must be the name of a new field or None, got {self.mask!r}")

    @classmethod
    def for_tokenizer(cls, tokenizer: Any, **options: Any) -> PadCollate:
        """A collate that pads as a tokenizer of transformers does, labels too.

        Token ids are padded with the tokenizer's padding token, `token_type_ids` with its type of
        padding, `special_tokens_mask` with 1, `attention_mask` with 0 and `labels` or `label` with
        -100, on the tokenizer's side. Dict samples get an `attention_mask` where they have none,
        the model takes one, and the ids are a field of theirs that is not nested. `lengths` are
        those of the ids. Of pairs the first field is the ids and the second the labels; in larger
        tuples `padding_value` names the others, unless they are named tuples of these names. Where
        no mask is added, it is the batch's `mask`.

        Args:
            tokenizer: read once; it is not kept. Its `pad_token_id` and `padding_side` are needed,
                its `model_input_names` and `pad_token_type_id` are used where it has them.
            options: those of `PadCollate`, such as `size_multiple`; what they say comes first, and
                fields that a mapping does not name are padded as the tokenizer says. One
                `padding_value` for all fields takes the place of the padding token, and of 0 in
                fields that the tokenizer does not know.

        Raises:
            OptionError: the tokenizer has no padding token, or an option is invalid.
            CollateError: when called with samples that have no token ids, or with tuples of more
                than two fields of which nothing says how they are padded.

        >>> from types import SimpleNamespace
        >>> tokenizer = SimpleNamespace(pad_token_id=9, padding_side="left")
        >>> collate = PadCollate.for_tokenizer(tokenizer)
        >>> dict(collate([{"input_ids": [1, 2]}, {"input_ids": [3]}]))
        {'input_ids': tensor([[1, 2],
                [9, 3]]), 'attention_mask': tensor([[1, 1],
                [0, 1]])}
        """
        rules = read_tokenizer(tokenizer)
        # A mapping of no fields: all are the tokenizer's.
        own = {"_tokenizer": rules, "_sized_field": rules.ids}
        return cls(**{"side": rules.side, "padding_value": {}} | options | own)

    def __call__(self, samples: Sequence[Any]) -> PaddedBatch:
        """Collate n ≥ 1 samples, in time linear in the padded elements."""
        placements: dict[Any, Placement] = {}

        def write(entry: Field) -> tuple[torch.Tensor, PaddedLayout]:
            column = read_column(entry, of_field(self.dtype, entry.path, None))
            rule = self._rule(entry.path, entry.names, column.shapes.shape[1])
            if self._tokenizer is not None and rule.length_axes:
                self._check_position(entry, samples[0], self._tokenizer)
            return pad(column, rule, placements)

        batch = make_batch(PADDED_KINDS, samples, self, write)
        if self.mask is not None:
            batch = self._add_mask(batch, self.mask, batch._known.length_field)
        return batch if self._tokenizer is None else self._as_tokenized(batch, self._tokenizer)

    def _rule(self, path: FieldPath, names: FieldPath, ndim: int) -> PaddingRule:
        """How the options apply to a field, computed once."""
        if (path, names, ndim) not in self._rules:
            axes: list[int] = []
            multiples = [1] * ndim
            named = of_field(self.length_axes, path, (0,))
            multiple = of_field(self.size_multiple, path, 1)
            each = multiple if isinstance(multiple, tuple) else (multiple,) * len(named)
            if len(each) != len(named):
                raise OptionError(
                    f"size_multiple {multiple!r} must have one entry per length axis, {named!r}"
                )
            for axis, rounded_to in zip(named, each, strict=True):
                if -ndim <= axis < ndim:
                    axes.append(axis % ndim)
                    multiples[axis % ndim] = rounded_to
            if len(set(axes)) < len(axes):
                raise OptionError(f"length_axes {named!r} name one axis of {show(path)} twice")
            self._rules[path, names, ndim] = PaddingRule(
                value=self._value(path, names),
                left_share=of_field(self.side, path, self._default_side),
                multiples=tuple(multiples),
                length_axes=tuple(axes),
            )
        return self._rules[path, names, ndim]

    @property
    def _default_side(self) -> float:
        return _read_side("right" if self._tokenizer is None else self._tokenizer.side)

    def _value(self, path: FieldPath, names: FieldPath) -> Any:
        given, rules = self.padding_value, self._tokenizer
        is_ids = rules is not None and rules.is_ids(path, names)
        token = rules.pad_id if rules is not None and is_ids else 0
        named, default = (given, token) if isinstance(given, dict) else ({}, given)
        padding = OWN_PADDING if rules is None else rules.padding
        own = own_padding(
            names[-1:] if is_ids else names, padding
        )  # ids are ids within labels, too
        return of_field(named, path, padding.get(path, default) if own is None else own)

    def _check_position(self, entry: Field, sample: Any, rules: TokenizerRules) -> None:
        """Raise a `CollateError` where a tuple's field is padded and nothing says with what."""
        is_named = isinstance(self.padding_value, dict) and (
            of_field(self.padding_value, entry.path, None) is not None
        )
        if isinstance(sample, (tuple, list)) and len(sample) > 2 and not is_named:
            rules.check_position(entry.names)

    def _as_tokenized(self, batch: PaddedBatch, rules: TokenizerRules) -> PaddedBatch:
        paths = batch._known.paths
        rules.check_fields(paths)
        rules.check_ids(dict(zip(paths, batch._fields, strict=True)))
        if not rules.adds_mask or (rules.ids,) not in paths or ATTENTION_MASK in batch.data:
            return batch
        if batch[rules.ids].ndim > 2:
            raise CollateError(
                f"field {rules.ids!r} has several axes: give samples their own {ATTENTION_MASK!r}"
            )
        return self._add_mask(batch, ATTENTION_MASK, paths.index((rules.ids,)))

    def _add_mask(self, batch: PaddedBatch, name: str, index: int) -> PaddedBatch:
        """The batch with a field more, the mask of the field of this index."""
        data, known = batch.data, batch._known
        layout: Any = known.layouts[index]
        if not isinstance(data, dict):
            raise CollateError(
                "mask= adds a field to dict samples, which these are not: use batch.mask"
            )
        if name in data:
            raise CollateError(f"mask={name!r} would overwrite a field that the samples have")
        if layout is None or not layout.length_axes:
            raise CollateError(f"mask={name!r} needs a field with a ragged axis")
        mask = layout.mask(torch.device("cpu"))
        field = new_tensor(mask.shape, torch.int64).copy_(mask)
        arrangement = replace(
            known, paths=(*known.paths, (name,)), layouts=(*known.layouts, layout.of_mask())
        )
        return type(batch)(data | {name: field}, arrangement)
