"""What a tokenizer says of padding: its values, its side, and the mask that its model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchbudget.checks import is_int
from torchbudget.data.collate.structure import FieldPath, show
from torchbudget.errors import CollateError, OptionError

ATTENTION_MASK = "attention_mask"
# torch.nn.functional.cross_entropy ignores it.
IGNORED_LABEL = -100
# By convention; attention ignores what is masked with 0.
OWN_PADDING: dict[Any, int] = {"labels": IGNORED_LABEL, ATTENTION_MASK: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerRules:
    """How the samples of a tokenizer are padded.

    Attributes:
        ids: the name of the field of token ids, which the mask is of.
        pad_id: the padding token.
        adds_mask: whether the model takes an attention mask.
        side: the side of the padding.
        padding: the padding value of a field of another kind, by its name, or its path in pairs.
    """

    ids: str
    pad_id: int
    adds_mask: bool
    side: str
    padding: dict[Any, int]

    def is_ids(self, path: FieldPath, names: FieldPath) -> bool:
        """Whether a field is of token ids: by its name, the first of a pair, or ids alone."""
        return path in ((), (0,)) or names[-1] == self.ids

    def check_position(self, names: FieldPath) -> None:
        """Raise a `CollateError` for a field of samples that are larger than pairs, if unnamed.

        Of three, the second is most often the mask, which -100 would turn on where padding is.
        """
        if len(names) == 1 and names[0] not in (0, self.ids) and names[0] not in self.padding:
            raise CollateError(
                "the tokenizer pads pairs, of ids and labels; in larger tuples nothing says "
                f"whether {show(names)} is a mask, labels or something else: give its padding, as "
                "in padding_value={1: 0, 2: -100}, or make dicts in the dataset"
            )

    def check_fields(self, paths: Sequence[FieldPath]) -> None:
        """Raise a `CollateError` where the samples have no token ids."""
        if not any(self.is_ids(path, path) for path in paths):
            raise CollateError(
                f"the tokenizer pads samples with a field {self.ids!r}, pairs of ids and labels, "
                f"or ids alone; got samples of the fields {[path[0] for path in paths]}"
            )

    def check_ids(self, fields: Mapping[FieldPath, Any]) -> None:
        """Raise a `CollateError` where each sample's ids are a batch of one text."""
        for path, field in fields.items():
            if self.is_ids(path, path) and field.ndim > 2 and field.shape[1] == 1:
                raise CollateError(
                    f"{show(path)} of each sample is a batch of one text, of shape "
                    f"{(1, *field.shape[2:])}, as return_tensors='pt' gives: tokenize without it, "
                    "or take the first of each field"
                )


def own_padding(names: FieldPath, padding: Mapping[Any, int]) -> int | None:
    """The padding value of a field by its name, else by what it is within; `None` if unknown.

    >>> own_padding(("labels", "tags"), OWN_PADDING), own_padding(("tags",), OWN_PADDING)
    (-100, None)
    """
    return next((padding[name] for name in reversed(names) if name in padding), None)


def read_tokenizer(tokenizer: Any) -> TokenizerRules:
    """The rules of a tokenizer of transformers, or of any object with its attributes.

    Args:
        tokenizer: its `pad_token_id` and `padding_side` are read, and where it has them its
            `model_input_names` and `pad_token_type_id`.

    Raises:
        OptionError: it has no padding token, or one of these is invalid.
    """
    pad_id = getattr(tokenizer, "pad_token_id", None)
    if not is_int(pad_id):
        raise OptionError(
            "for_tokenizer needs a tokenizer with a padding token, whose pad_token_id is an int, "
            f"got {pad_id!r} from {type(tokenizer).__name__}; set one, as in "
            "tokenizer.pad_token = tokenizer.eos_token"
        )
    side = getattr(tokenizer, "padding_side", None)
    if side not in ("left", "right"):
        raise OptionError(f'padding_side of the tokenizer must be "left" or "right", got {side!r}')
    ids, *others = getattr(tokenizer, "model_input_names", ("input_ids", ATTENTION_MASK))
    padding = OWN_PADDING | {
        "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
        "special_tokens_mask": 1,  # padding is a special token
        "label": IGNORED_LABEL,  # as the collators of transformers take it, too
        (1,): IGNORED_LABEL,  # the second of a pair
    }
    return TokenizerRules(
        ids=ids, pad_id=pad_id, adds_mask=ATTENTION_MASK in others, side=side, padding=padding
    )
