"""The collate that pads any ragged axis of any field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch

from torchbudget.checks import HasSizeMultiple, is_int, size_multiple_of
from torchbudget.data.collate.batch import PaddedBatch, PaddedMapping, PaddedSequence
from torchbudget.data.collate.columns import Field, new_tensor
from torchbudget.data.collate.fields import FieldCollate, check_ids, of_field
from torchbudget.data.collate.layouts import (
    ATTENTION_MASK,
    IGNORED_LABEL,
    OWN_PADDING,
    PaddedLayout,
    PaddingRule,
    PaddingValue,
    own_padding,
)
from torchbudget.errors import CollateError, OptionError

Axes: TypeAlias = int | tuple[int, ...]
Side: TypeAlias = str | float


class TokenizerRules(NamedTuple):
    """How a tokenizer pads: the side, and the padding value of fields by their names."""

    side: str
    padding: dict[str, Any]


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
    `mask` and `num_tokens`.

    `padding_value`, `side` and `length_axes` are one value for all fields, or a mapping from field
    to value. A field is named by its key or position, and by a tuple of those if samples are
    nested. A field that is not in the mapping has the default.

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
        size_multiple: padded lengths are rounded up to a multiple of it, in all fields. It must be
            that of the sampler or stream: give an int, or the sampler or stream itself, from which
            the int is read once.
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
    size_multiple: int | HasSizeMultiple = 1
    mask: str | None = None
    _tokenizer: TokenizerRules | None = field(default=None, repr=False)

    _ragged: ClassVar[str] = "padded"
    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "padding_value": _read_value,
        "side": _read_side,
        "length_axes": _read_axes,
    }

    def __post_init__(self) -> None:
        """Check the options."""
        FieldCollate.__post_init__(self)
        # A copy of the number: a collate is sent to workers, and a sampler is large.
        object.__setattr__(self, "size_multiple", size_multiple_of(self.size_multiple))
        if self.mask is not None and (not isinstance(self.mask, str) or not self.mask):
            raise OptionError(f"mask must be the name of a new field or None, got {self.mask!r}")

    @classmethod
    def for_tokenizer(cls, tokenizer: Any, **options: Any) -> PadCollate:
        """A collate that pads as a tokenizer of transformers does, labels too.

        Samples are dicts. Token ids are padded with the tokenizer's padding token,
        `token_type_ids` with its type of padding, `special_tokens_mask` with 1, `attention_mask`
        with 0 and `labels` or `label` with -100, on the tokenizer's side. An `attention_mask` is
        added to samples that have none, if the model takes one. `lengths` are those of the ids.

        Args:
            tokenizer: read once; it is not kept. Its `pad_token_id` and `padding_side` are needed,
                its `model_input_names` and `pad_token_type_id` are used where it has them.
            options: those of `PadCollate`, such as `size_multiple`; what they say comes first, and
                fields that a mapping does not name are padded as the tokenizer says. One
                `padding_value` for all fields takes the place of the padding token, and of 0 in
                fields that the tokenizer does not know.

        Raises:
            OptionError: the tokenizer has no padding token, or an option is invalid.
            CollateError: when called with samples that are no dicts of token ids.

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
            ids: token,
        }
        defaults: dict[str, Any] = {"side": side, "padding_value": {}}  # {}: as the tokenizer says
        if ATTENTION_MASK in others:
            defaults["mask"] = ATTENTION_MASK
        return cls(**defaults | options, _ids=ids, _tokenizer=TokenizerRules(side, padding))

    def __call__(self, samples: Sequence[Any]) -> PaddedBatch:
        """Collate n ≥ 1 samples, in time linear in the padded elements."""
        batch = self._collate(samples, (PaddedBatch, PaddedMapping, PaddedSequence))
        if self._ids is not None:
            check_ids(batch, self._ids, PaddedLayout, "for_tokenizer")
            if self.mask in batch:
                return batch
        return batch if self.mask is None else _add_mask(batch, self.mask)

    def _padding(self, field: Field, ndim: int) -> tuple[PaddingRule, PaddingValue]:
        """See `FieldCollate._padding`."""
        named = of_field(self.length_axes, field.path, (0,))
        axes = tuple(dict.fromkeys(axis % ndim for axis in named if -ndim <= axis < ndim))
        multiple = size_multiple_of(self.size_multiple)
        multiples = tuple(multiple if axis in axes else 1 for axis in range(ndim))
        side = 0.0 if self._tokenizer is None else _read_side(self._tokenizer.side)
        rule = PaddingRule(of_field(self.side, field.path, side), multiples, axes)
        return rule, self._value(field)

    def _value(self, field: Field) -> Any:
        given = self.padding_value
        is_mapping = isinstance(given, dict)
        if is_mapping and (named := of_field(given, field.path, None)) is not None:
            return named
        own = own_padding(field.names, self._tokenizer.padding if self._tokenizer else OWN_PADDING)
        return own if own is not None else 0 if is_mapping else given


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
    layouts = {**known.layouts, (name,): layout.of_mask()}
    return type(batch)(data | {name: field}, replace(known, layouts=layouts))
