"""The collate that pads any ragged axis of any field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from torchbudget.checks import HasSizeMultiple, is_int, size_multiple_of
from torchbudget.data.collate.batch import PaddedBatch, PaddedMapping, PaddedSequence
from torchbudget.data.collate.columns import Column, FieldPath, new_tensor, show
from torchbudget.data.collate.fields import FieldCollate, of_field
from torchbudget.data.collate.layouts import (
    ATTENTION_MASK,
    IGNORED_LABEL,
    OWN_PADDING,
    Layout,
    PaddedLayout,
    PaddingRule,
    PaddingValue,
    RowRule,
    join,
    own_padding,
    pad,
)
from torchbudget.errors import CollateError, OptionError

Axes: TypeAlias = int | tuple[int, ...]
Side: TypeAlias = str | float
Multiple: TypeAlias = int | tuple[int, ...] | HasSizeMultiple


class TokenizerRules(NamedTuple):
    """How the samples of a tokenizer are padded.

    Attributes:
        ids: the name of the field of token ids, which the mask is of.
        adds_mask: whether the model takes an attention mask.
        side: the side of the padding.
        padding: the padding value of a field, by its name or its path.
    """

    ids: str
    adds_mask: bool
    side: str
    padding: dict[Any, Any]


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


def _read_multiple(multiple: Any) -> int | tuple[int, ...]:
    if isinstance(multiple, tuple):
        return tuple(map(size_multiple_of, multiple))
    return size_multiple_of(multiple)


def _read_axes(axes: Any) -> tuple[int, ...]:
    named = axes if isinstance(axes, tuple) else (axes,)
    if not all(map(is_int, named)) or len(set(named)) < len(named):
        raise OptionError(f"length_axes must be an int or a tuple of different ints, got {axes!r}")
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class PadCollate(FieldCollate):
    """Collates ragged samples into a `PaddedBatch`: every field padded to one shape.

    **Samples** are dicts, tuples (lists and named tuples too) or bare values, nested to any depth,
    all of the same structure. **Fields** are tensors, NumPy arrays, lists of numbers (nested lists
    for more axes), numbers, or strings. A field keeps its dtype; Python's ints become int64,
    floats the default dtype, bools bool, as in `torch.tensor`. Nothing is guessed: a sample with
    another dtype, another number of axes or a missing key raises an error that names the field and
    the sample's position.

    **Each field has a rule.** Fields with axes are padded, numbers stacked, strings listed.
    `fields` gives other rules:

    - "padded": every axis in which samples differ is padded to the longest: `(n, L, …)`.
    - "joined": samples one after the other along their first axis: `(Σ lengths, …)`.
    - "stacked": samples of one fixed shape, `(n, …)`.
    - "listed": a list of the samples' values, whatever they are.
    - "optional": samples may lack the key, or have None. Such a sample is an empty one in a padded
      or joined field, has no row in a stacked one (`batch.present(name)` says which have), and is
      None in a list. A batch of samples that all lack the field is without it. Together with
      another rule in a tuple: `("stacked", "optional")`.

    Fields with a rule of their own have their own lengths. All other ragged fields must be equally
    long in each sample, as a text's ids and labels are: their lengths are the batch's `lengths`,
    `mask` and `num_tokens`. In a stream, those are the lengths of the field that `size` names.

    Each option is one value for all fields, or a mapping from field to value. A field is named by
    its key or position, and by a tuple of those if samples are nested. A field that is not in the
    mapping has the default.

    Inside a `DataLoader` worker the batch is written directly into shared memory.

    Args:
        fields: a mapping from field to rule.
        padding_value: a number, or a function of a sample's own value: `torch.min` for tensors and
            lists, `np.min` for arrays. The fields `labels` and `attention_mask` pad with -100,
            which `torch.nn.functional.cross_entropy` ignores, and 0, unless a mapping names them;
            so do those of named tuples, and all fields within `labels`.
        side: the side of the padding: "right", "left", or the share of it on the left, from 0 to 1;
            0.5 centres samples.
        length_axes: the axes, not counting the batch's, whose lengths the batch reports and whose
            padded lengths are rounded: 0 for sequences, `(0, 1)` for images of height, width,
            channels, -1 for channels by time, `()` for a field without a length. A field without
            such an axis has no length.
        size_multiple: padded lengths are rounded up to a multiple of it. It must be that of the
            sampler or stream: give an int for all of `length_axes`, a tuple of one per axis, or
            the sampler or stream itself, from which the int is read once.
        mask: the name, such as "attention_mask", of a field that is added to a batch of dict
            samples: the batch's mask as int64 ones and zeros, as Hugging Face models take it.
            `PaddedBatch.mask` is the same as bool.

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
    length_axes: Axes | Mapping[Any, Axes] = 0
    size_multiple: Multiple | Mapping[Any, Multiple] = 1
    mask: str | None = None
    _tokenizer: TokenizerRules | None = field(default=None, repr=False)  # see _sized_field
    _paddings: dict[Any, PaddingRule] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    _ragged: ClassVar[str] = "padded"
    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "padding_value": _read_value,
        "side": _read_side,
        "length_axes": _read_axes,
        "size_multiple": _read_multiple,
    }

    def __post_init__(self) -> None:
        """Check the options."""
        FieldCollate.__post_init__(self)
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
        token = getattr(tokenizer, "pad_token_id", None)
        if not is_int(token):
            raise OptionError(
                "for_tokenizer needs a tokenizer with a padding token, whose pad_token_id is an "
                f"int, got {token!r} from {type(tokenizer).__name__}; set one, as in "
                "tokenizer.pad_token = tokenizer.eos_token"
            )
        side = getattr(tokenizer, "padding_side", None)
        if side not in ("left", "right"):
            raise OptionError(
                f'padding_side of the tokenizer must be "left" or "right", got {side!r}'
            )
        ids, *others = getattr(tokenizer, "model_input_names", ("input_ids", ATTENTION_MASK))
        given = options.get("padding_value", {})
        if not isinstance(given, Mapping):
            token = given
        padding = OWN_PADDING | {
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "special_tokens_mask": 1,  # padding is a special token
            "label": IGNORED_LABEL,  # as the collators of transformers take it, too
            (1,): IGNORED_LABEL,  # the second of a pair
            **dict.fromkeys([ids, (), (0,)], token),
        }
        rules = TokenizerRules(ids, ATTENTION_MASK in others, side, padding)
        # A mapping of no fields: all are the tokenizer's.
        own = {"_tokenizer": rules, "_sized_field": ids}
        return cls(**{"side": side, "padding_value": {}} | options | own)

    def __call__(self, samples: Sequence[Any]) -> PaddedBatch:
        """Collate n ≥ 1 samples, in time linear in the padded elements."""
        batch = self._collate(samples, (PaddedBatch, PaddedMapping, PaddedSequence))
        if self.mask is not None:
            batch = _add_mask(batch, self.mask, batch._known.measured)
        return batch if self._tokenizer is None else self._as_tokenized(batch, self._tokenizer)

    def _write_ragged(
        self, column: Column, kind: str | None, *, is_own: bool, shared: dict[Any, Any]
    ) -> tuple[torch.Tensor, Layout]:
        """See `FieldCollate._write_ragged`."""
        path, names, *_ = column.field
        if kind == "joined":
            return join(column, RowRule(), 0, shared)
        key = (path, names, column.shapes.shape[1])
        if key not in self._paddings:
            self._paddings[key] = self._padding(*key)
        return pad(column, self._paddings[key], shared)

    def _padding(self, path: FieldPath, names: FieldPath, ndim: int) -> PaddingRule:
        """How the options apply to a field."""
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
        right = 0.0 if self._tokenizer is None else _read_side(self._tokenizer.side)
        return PaddingRule(
            value=self._value(path, names),
            left_share=of_field(self.side, path, right),
            multiples=tuple(multiples),
            length_axes=tuple(axes),
        )

    def _value(self, path: FieldPath, names: FieldPath) -> Any:
        given = self.padding_value
        padding = OWN_PADDING if self._tokenizer is None else self._tokenizer.padding
        named = of_field(given, path, None) if isinstance(given, dict) else None
        own = own_padding(names, padding) if named is None else named
        return padding.get(path, 0 if isinstance(given, dict) else given) if own is None else own

    def _as_tokenized(self, batch: PaddedBatch, rules: TokenizerRules) -> PaddedBatch:
        """The batch with an attention mask, after a check of its fields.

        Raises:
            CollateError: see `for_tokenizer`.
        """
        data, paths = batch.data, batch._known.layouts
        ids = [path for path in paths if path in ((), (0,)) or path[-1] == rules.ids]
        if not ids:
            raise CollateError(
                f"the tokenizer pads samples with a field {rules.ids!r}, pairs of ids and labels, "
                f"or ids alone; got samples of the fields {[path[0] for path in paths]}"
            )
        for (path, layout), value in zip(paths.items(), batch._fields, strict=True):
            if path in ids and value.ndim > 2:
                raise CollateError(
                    f"{show(path)} of each sample has several axes, of shape "
                    f"{tuple(value.shape[1:])}, as return_tensors='pt' gives: tokenize without it, "
                    "or take the first of each field"
                )
            # Of three, the second is most often the mask, which -100 would turn on at padding.
            unnamed = isinstance(data, tuple) and len(data) > 2 and not hasattr(data, "_fields")
            given = self.padding_value if isinstance(self.padding_value, dict) else {}
            is_named = path == (0,) or of_field(given, path, None) is not None
            if unnamed and len(path) == 1 and not is_named and isinstance(layout, PaddedLayout):
                raise CollateError(
                    "the tokenizer pads pairs, of ids and labels; in larger tuples nothing says "
                    f"whether {show(path)} is a mask, labels or something else: give its padding, "
                    "as in padding_value={1: 0, 2: -100}, or make dicts in the dataset"
                )
        if not rules.adds_mask or (rules.ids,) not in ids or ATTENTION_MASK in data:
            return batch
        return _add_mask(batch, ATTENTION_MASK, (rules.ids,))


def _add_mask(batch: PaddedBatch, name: str, path: FieldPath) -> PaddedBatch:
    """The batch with the mask of the field of this path as a further field."""
    data, known = batch.data, batch._known
    layout = known.layouts[path]
    if not isinstance(data, dict):
        raise CollateError(
            "mask= adds a field to dict samples, which these are not: use batch.mask"
        )
    if name in data:
        raise CollateError(f"mask={name!r} would overwrite a field that the samples have")
    if not isinstance(layout, PaddedLayout) or not layout.length_axes:
        raise CollateError(f"mask={name!r} needs a field with a ragged axis")
    mask = layout.mask(torch.device("cpu"))
    field = new_tensor(tuple(mask.shape), torch.int64).copy_(mask)
    layouts = {**known.layouts, (name,): layout.of_mask()}
    return type(batch)(data | {name: field}, replace(known, layouts=layouts))
