"""`PadCollate.for_tokenizer` pads as the collators of transformers do."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.sample_strategies import same as bitwise
from torchbudget import PadCollate
from torchbudget.errors import CollateError, OptionError

ids = st.lists(st.integers(10, 99), min_size=1, max_size=6)


def duck(**changes: Any) -> Any:
    """Has what is read of a tokenizer, and nothing else."""
    attributes = {
        "pad_token_id": 7,
        "padding_side": "left",
        "pad_token_type_id": 3,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    return SimpleNamespace(**{**attributes, **changes})


def padded(rows: list[list[int]], value: int, side: str, multiple: int = 1) -> Tensor:
    longest = -(-max(map(len, rows)) // multiple) * multiple
    pads = [[value] * (longest - len(row)) for row in rows]
    pairs = zip(rows, pads, strict=True)
    return torch.tensor([row + pad if side == "right" else pad + row for row, pad in pairs])


class TestDicts:
    @given(
        st.lists(st.tuples(ids, ids), min_size=1, max_size=5),
        st.sampled_from(["left", "right"]),
        st.sampled_from([None, "left", "right"]),
        st.integers(1, 4),
    )
    def test_each_field_has_its_padding(
        self, texts: list[tuple[list[int], list[int]]], side: str, other: Any, multiple: int
    ) -> None:
        """Of sources and labels of any lengths, and the mask is that of the sources.

        What a mapping does not name is padded as the tokenizer says.
        """
        options = {} if other is None else {"side": {"labels": other}}
        collate = PadCollate.for_tokenizer(
            duck(padding_side=side), size_multiple=multiple, **options
        )
        sources, labels = map(list, zip(*texts, strict=True))
        ones = [[1] * len(source) for source in sources]
        batch = collate(
            [
                {"input_ids": s, "token_type_ids": o, "special_tokens_mask": o, "labels": t}
                for s, o, t in zip(sources, ones, labels, strict=True)
            ]
        )
        assert bitwise(batch["input_ids"], padded(sources, 7, side, multiple))
        assert bitwise(batch["token_type_ids"], padded(ones, 3, side, multiple))
        assert bitwise(batch["special_tokens_mask"], padded(ones, 1, side, multiple))
        assert bitwise(batch["attention_mask"], padded(ones, 0, side, multiple))
        assert bitwise(batch["labels"], padded(labels, -100, other or side, multiple))
        assert bitwise(batch["attention_mask"].bool(), batch.mask)
        assert batch.lengths.tolist() == list(map(len, sources))

    def test_the_mask_of_the_ids_is_added_where_the_model_takes_one(self) -> None:
        """Of their lengths, whatever the padding token and sizes are; nested ids get none."""
        collate = PadCollate.for_tokenizer(duck())
        texts = [{"input_ids": [7, 7], "labels": [1]}, {"input_ids": [7], "labels": [1, 2]}]
        for made, lengths in ((collate, [2, 1]), (collate.of_sized_field("labels"), [1, 2])):
            batch = made(texts)
            assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
            assert batch.lengths.tolist() == lengths
        own = collate([{"input_ids": [1, 2], "attention_mask": [0, 1]}])
        assert own["attention_mask"].tolist() == [[0, 1]]
        plain = PadCollate.for_tokenizer(duck(model_input_names=["input_ids"]))
        assert set(plain(texts)) == {"input_ids", "labels"}
        nested = collate([{"text": {"input_ids": [1]}}, {"text": {"input_ids": [1, 2]}}])
        assert nested["text"]["input_ids"].tolist() == [[7, 1], [1, 2]]
        assert set(nested) == {"text"}
        assert nested.mask.tolist() == [[False, True], [True, True]]

    @pytest.mark.parametrize("value", [5, 0, {"labels": -1}])
    def test_options_come_first(self, value: Any) -> None:
        """One padding value for all takes the place of the token, not of conventions."""
        own = {"token_type_ids": 3, "special_tokens_mask": 1, "attention_mask": 0, "labels": -100}
        names = ["input_ids", *own, "weights"]
        samples = [{name: [1] * n for name in names} for n in (1, 2)]
        batch = PadCollate.for_tokenizer(duck(), padding_value=value)(samples)
        given = {"input_ids": 7, "weights": 0} if isinstance(value, dict) else {}
        expected = {**dict.fromkeys(names, value), **own, **given}
        expected |= value if isinstance(value, dict) else {}
        assert {name: int(field[0, 0]) for name, field in batch.items()} == expected
        right = PadCollate.for_tokenizer(duck(), side="right")(samples)
        assert right["input_ids"][0].tolist() == [1, 7]

    def test_ids_within_labels_are_ids(self) -> None:
        texts = [{"input_ids": [1] * n, "attention_mask": [1] * n, "tags": [1] * n} for n in (1, 2)]
        batch = PadCollate.for_tokenizer(duck())([text | {"labels": text} for text in texts])
        padding = {name: int(field[0, 0]) for name, field in batch["labels"].items()}
        assert padding == {"input_ids": 7, "attention_mask": 0, "tags": -100}
        assert int(batch["tags"][0, 0]) == 0


class Text(NamedTuple):
    attention_mask: list[int]
    labels: list[int]
    input_ids: list[int]


@pytest.mark.parametrize(
    ("options", "samples", "expected"),
    [
        ({}, [([1, 2], [3, 4]), ([5], [6])], [[7, 5], [-100, 6]]),
        ({"padding_value": 8}, [([1, 2], [3, 4]), ([5], [6])], [[8, 5], [-100, 6]]),
        ({}, [([1, 2], 0), ([5], 1)], [[7, 5], 1]),
        ({}, [([1, 2], 0, 3), ([5], 1, 4)], [[7, 5], 1, 4]),
        (
            {"padding_value": {1: 0, (2,): -100}},
            [([1, 2], [1, 1], [3, 4]), ([5], [1], [6])],
            [[7, 5], [0, 1], [-100, 6]],
        ),
        ({}, [Text([1, 1], [3, 4], [1, 2]), Text([1], [6], [5])], [[0, 1], [-100, 6], [7, 5]]),
    ],
)
def test_tuples(options: dict[str, Any], samples: list[Any], expected: list[Any]) -> None:
    """Pairs are ids and labels; in larger ones the others are named."""
    batch = PadCollate.for_tokenizer(duck(), **options)(samples)
    assert [field[1].tolist() for field in batch] == expected


def test_other_samples() -> None:
    collate = PadCollate.for_tokenizer(duck())
    assert collate([[1, 2], [5]]).data.tolist() == [[1, 2], [7, 5]]
    inputs, y = collate([({"input_ids": [1, 2]}, [3, 4])] * 2)
    assert inputs["input_ids"].shape == y.shape


@pytest.mark.parametrize(
    ("options", "samples", "match"),
    [
        ({}, [([1, 2], [1, 1], [3, 4])], "larger tuples nothing says whether field 1 "),
        ({"padding_value": 5}, [([1, 2], [1, 1], [3, 4])], "nothing says whether field 1 "),
        ({"padding_value": {1: 0}}, [([1, 2], [1, 1], [3, 4])], "whether field 2 is"),
        ({}, [{"text": "a", "label": 1}], r"a field 'input_ids'.*\['text', 'label'\]"),
        # As return_tensors="pt" makes of each text: every length would be 1.
        ({}, [{"input_ids": torch.ones(1, 2)}], "'input_ids' of each sample is a batch of one"),
        ({}, [{"input_ids": [[1, 2], [3, 4]]}], "several axes"),
    ],
)
def test_samples_of_which_nothing_says_how(options: Any, samples: Any, match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate.for_tokenizer(duck(), **options)(samples)


@pytest.mark.parametrize(
    ("tokenizer", "match"),
    [
        *((duck(pad_token_id=pad), r"tokenizer\.pad_token = tok") for pad in (None, "7", True)),
        (object(), "got None from object"),
        (duck(padding_side="top"), "padding_side"),
    ],
)
def test_what_is_no_tokenizer(tokenizer: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        PadCollate.for_tokenizer(tokenizer)


def test_the_collate_is_a_value_and_does_not_keep_the_tokenizer() -> None:
    tokenizer = duck()
    collate = PadCollate.for_tokenizer(tokenizer)
    tokenizer.pad_token_id = 8
    assert collate == PadCollate.for_tokenizer(duck())
    assert collate != PadCollate.for_tokenizer(tokenizer)
    assert pickle.loads(pickle.dumps(collate)) == collate  # noqa: S301  (our own bytes)
    assert replace(collate, size_multiple=4) == PadCollate.for_tokenizer(duck(), size_multiple=4)


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
