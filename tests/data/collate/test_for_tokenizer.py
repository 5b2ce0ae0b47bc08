"""`PadCollate.for_tokenizer` pads as the collators of transformers do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.batches import same as bitwise
from torchbudget import PadCollate
from torchbudget.errors import CollateError, OptionError


def duck(**changes: Any) -> Any:
    """Has what is read of a tokenizer, and nothing else."""
    attributes = {
        "pad_token_id": 7,
        "padding_side": "left",
        "pad_token_type_id": 3,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    return SimpleNamespace(**{**attributes, **changes})


class TestDicts:
    def test_the_mask_of_the_ids_is_added_where_the_model_takes_one(self) -> None:
        """Of their lengths, whatever the padding token is."""
        texts = [{"input_ids": [7, 7], "labels": [1]}, {"input_ids": [7], "labels": [1, 2]}]
        batch = PadCollate.for_tokenizer(duck())(texts)
        assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
        assert batch.lengths.tolist() == [2, 1]
        own = PadCollate.for_tokenizer(duck())([{"input_ids": [1, 2], "attention_mask": [0, 1]}])
        assert own["attention_mask"].tolist() == [[0, 1]]
        plain = PadCollate.for_tokenizer(duck(model_input_names=["input_ids"]))
        assert set(plain(texts)) == {"input_ids", "labels"}

    @pytest.mark.parametrize("value", [5, 0, {"labels": -1}])
    def test_options_come_first(self, value: Any) -> None:
        """One padding value for all is that of fields which the tokenizer does not know."""
        own = {"token_type_ids": 3, "special_tokens_mask": 1, "attention_mask": 0, "labels": -100}
        names = ["input_ids", *own, "weights"]
        samples = [{name: [1] * n for name in names} for n in (1, 2)]
        batch = PadCollate.for_tokenizer(duck(), padding_value=value)(samples)
        expected = {"input_ids": 7, **own, "weights": 0}
        expected |= value if isinstance(value, dict) else {"weights": value}
        assert {name: int(field[0, 0]) for name, field in batch.items()} == expected
        for side in ("right", {"input_ids": "right"}):
            right = PadCollate.for_tokenizer(duck(), side=side)(samples)
            assert right["input_ids"][0].tolist() == [1, 7]
            last = [1, -100] if side == "right" else [-100, 1]  # as the tokenizer says
            assert right["labels"][0].tolist() == last
        within = PadCollate.for_tokenizer(duck())([{**one, "labels": one} for one in samples])
        padding = {name: int(field[0, 0]) for name, field in within["labels"].items()}
        assert padding == {"input_ids": 7, **own, "weights": -100}  # ids are ids


@pytest.mark.parametrize(
    ("sample", "match"),
    [
        ({"text": "a", "label": 1}, "field 'input_ids' .* got samples of field 'text', field 'lab"),
        (([1, 2], [3, 4]), "takes dict samples .* got samples of field 0, field 1"),
        ([1, 2], "got samples of the sample"),
        ({"text": {"input_ids": [1]}}, r"got samples of field \('text', 'input_ids'\)"),
        # As return_tensors="pt" makes of each text: every length would be 1.
        ({"input_ids": torch.ones(1, 2)}, r"got samples of field 'input_ids' of shape \[1, 1, 2\]"),
    ],
)
def test_samples_that_are_no_dicts_of_ids(sample: Any, match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate.for_tokenizer(duck())([sample])


@pytest.mark.parametrize(
    ("tokenizer", "match"),
    [
        *((duck(pad_token_id=pad), r"tokenizer\.pad_token = tok") for pad in (None, "7", True)),
        (object(), "got None from object"),
        (duck(padding_side="top"), "side must be"),
    ],
)
def test_what_is_no_tokenizer(tokenizer: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        PadCollate.for_tokenizer(tokenizer)


@pytest.mark.peer
@pytest.mark.parametrize("side", ["right", "left"])
def test_bit_for_bit_what_the_collators_of_transformers_make(side: str) -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        DataCollatorForSeq2Seq,
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
    )

    vocabulary = {word: i for i, word in enumerate(("[UNK]", "a", "b", "c", "[PAD]"))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",  # noqa: S106
        unk_token="[UNK]",  # noqa: S106
        padding_side=side,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    texts = [dict(tokenizer(text)) for text in ("a b c", "b", "a a a a a zz")]
    unmasked = [{k: v for k, v in text.items() if k != "attention_mask"} for text in texts]
    labelled = [
        [one | {n: [1] * len(one["input_ids"])} for one in texts] for n in ("label", "labels")
    ]
    targets = [
        one | {"labels": two["input_ids"]} for one, two in zip(texts, texts[::-1], strict=True)
    ]
    for multiple in (None, 4):
        options = {"pad_to_multiple_of": multiple}
        cases = [
            (DataCollatorWithPadding(tokenizer, **options), [texts, unmasked]),
            (DataCollatorForTokenClassification(tokenizer, **options), labelled),
            (DataCollatorForSeq2Seq(tokenizer, **options), [targets]),
        ]
        ours = PadCollate.for_tokenizer(tokenizer, size_multiple=multiple or 1)
        for theirs, chosen in cases:
            for samples in chosen:
                expected, batch = theirs([dict(one) for one in samples]), ours(samples)
                assert set(batch) == set(expected)
                assert all(bitwise(batch[name], expected[name]) for name in batch)
