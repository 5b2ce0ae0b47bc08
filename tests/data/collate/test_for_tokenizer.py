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
        st.integers(1, 4),
    )
    def test_each_field_has_its_padding(
        self, texts: list[tuple[list[int], list[int]]], side: str, multiple: int
    ) -> None:
        """Of sources and labels of any lengths, and the mask is that of the sources."""
        collate = PadCollate.for_tokenizer(duck(padding_side=side), size_multiple=multiple)
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
        assert bitwise(batch["labels"], padded(labels, -100, side, multiple))
        assert bitwise(batch["attention_mask"].bool(), batch.mask)
        assert batch.lengths.tolist() == list(map(len, sources))

    def test_the_mask_of_the_ids_is_added_where_the_model_takes_one(self) -> None:
        """Of their lengths, whatever the padding token; a mask of the samples is kept."""
        ids = [{"input_ids": [7, 7]}, {"input_ids": [7]}]
        batch = PadCollate.for_tokenizer(duck())(ids)
        assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
        own = PadCollate.for_tokenizer(duck())([{"input_ids": [1, 2], "attention_mask": [0, 1]}])
        assert own["attention_mask"].tolist() == [[0, 1]]
        assert set(PadCollate.for_tokenizer(duck(model_input_names=["input_ids"]))(ids)) == {
            "input_ids"
        }

    def test_the_mask_is_that_of_the_ids_whatever_sizes_are_of(self) -> None:
        collate = PadCollate.for_tokenizer(duck()).of_sized_field("labels")
        batch = collate(
            [{"input_ids": [1], "labels": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}]
        )
        assert batch["attention_mask"].tolist() == [[0, 1], [1, 1]]
        assert batch.lengths.tolist() == [2, 1]
        assert PadCollate.for_tokenizer(duck()).of_sized_field(None)(
            [{"input_ids": [1], "labels": [1, 2]}]
        ).lengths.tolist() == [1]

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_fields_that_a_mapping_does_not_name_are_the_tokenizers(self, side: str) -> None:
        other = {"left": "right", "right": "left"}[side]
        collate = PadCollate.for_tokenizer(duck(padding_side=side), side={"labels": other})
        batch = collate([{"input_ids": [1], "labels": [1]}, {"input_ids": [1] * 2, "labels": [1]}])
        assert bitwise(batch["input_ids"], padded([[1], [1] * 2], 7, side))
        assert bitwise(batch["attention_mask"], padded([[1], [1] * 2], 0, side))
        batch = collate([{"input_ids": [1], "labels": [1]}, {"input_ids": [1], "labels": [1] * 2}])
        assert bitwise(batch["labels"], padded([[1], [1] * 2], -100, other))

    @pytest.mark.parametrize("value", [5, 0])
    def test_one_padding_value_takes_the_place_of_the_token(self, value: int) -> None:
        """Not of what pads by convention: labels, masks and types."""
        own = {"token_type_ids": 3, "special_tokens_mask": 1, "attention_mask": 0, "labels": -100}
        names = ["input_ids", *own, "weights"]
        samples = [{name: [1] * n for name in names} for n in (1, 2)]
        batch = PadCollate.for_tokenizer(duck(), padding_value=value)(samples)
        expected = {"input_ids": value, **own, "weights": value}
        assert {name: int(field[0, 0]) for name, field in batch.items()} == expected
        ids, labels = PadCollate.for_tokenizer(duck(), padding_value=value)(
            [([1], [1]), ([1, 1], [1, 1])]
        )
        assert (ids[0].tolist(), labels[0].tolist()) == ([value, 1], [-100, 1])

    def test_ids_within_labels_are_ids(self) -> None:
        texts = [{"input_ids": [1] * n, "attention_mask": [1] * n, "tags": [1] * n} for n in (1, 2)]
        samples = [text | {"labels": text} for text in texts]
        batch = PadCollate.for_tokenizer(duck())(samples)
        padding = {name: int(field[0, 0]) for name, field in batch["labels"].items()}
        assert padding == {"input_ids": 7, "attention_mask": 0, "tags": -100}
        assert int(batch["tags"][0, 0]) == 0

    def test_nested_ids_get_no_mask_but_that_of_the_batch(self) -> None:
        batch = PadCollate.for_tokenizer(duck())(
            [{"text": {"input_ids": [1]}}, {"text": {"input_ids": [1, 2]}}]
        )
        assert batch["text"]["input_ids"].tolist() == [[7, 1], [1, 2]]
        assert set(batch) == {"text"}
        assert set(batch["text"]) == {"input_ids"}
        assert batch.mask.tolist() == [[False, True], [True, True]]


class TestTuples:
    def test_pairs_are_ids_and_labels(self) -> None:
        batch = PadCollate.for_tokenizer(duck())([([1, 2], [3, 4]), ([5], [6])])
        x, y = batch
        assert x.tolist() == [[1, 2], [7, 5]]
        assert y.tolist() == [[3, 4], [-100, 6]]
        assert batch.mask.tolist() == [[True, True], [False, True]]
        x, y = PadCollate.for_tokenizer(duck())([([1, 2], 0), ([5], 1)])  # labels of whole samples
        assert (x.tolist(), y.tolist()) == ([[1, 2], [7, 5]], [0, 1])
        inputs, y = PadCollate.for_tokenizer(duck())([({"input_ids": [1, 2]}, [3, 4])] * 2)
        assert inputs["input_ids"].shape == y.shape
        assert PadCollate.for_tokenizer(duck())([[1, 2], [5]]).data.tolist() == [[1, 2], [7, 5]]

    def test_of_more_than_pairs_nothing_says_which_is_which(self) -> None:
        """Of ids, mask and labels the second would get -100, which masks nothing."""
        samples = [([1, 2], [1, 1], [3, 4]), ([5], [1], [6])]
        for collate in (PadCollate.for_tokenizer(duck(), **o) for o in ({}, {"padding_value": 5})):
            with pytest.raises(CollateError, match=r"larger tuples nothing says whether field 1 "):
                collate(samples)
        with pytest.raises(CollateError, match="nothing says whether field 2 is"):
            PadCollate.for_tokenizer(duck(), padding_value={1: 0})(samples)
        batch = PadCollate.for_tokenizer(duck(), padding_value={1: 0, (2,): -100})(samples)
        assert [field[1].tolist() for field in batch] == [[7, 5], [0, 1], [-100, 6]]
        x, y, number = PadCollate.for_tokenizer(duck())([([1, 2], 0, 3), ([5], 1, 4)])
        assert x.tolist() == [[1, 2], [7, 5]]
        assert (y.tolist(), number.tolist()) == ([0, 1], [3, 4])

    def test_the_fields_of_named_tuples_have_names(self) -> None:
        class Text(NamedTuple):
            attention_mask: list[int]
            labels: list[int]
            input_ids: list[int]

        batch = PadCollate.for_tokenizer(duck())(
            [Text([1, 1], [3, 4], [1, 2]), Text([1], [6], [5])]
        )
        assert [field[1].tolist() for field in batch] == [[0, 1], [-100, 6], [7, 5]]


class TestRefused:
    @pytest.mark.parametrize("pad_id", [None, "7", True])
    def test_without_a_padding_token(self, pad_id: Any) -> None:
        with pytest.raises(OptionError, match=r"tokenizer\.pad_token = tokenizer\.eos_token"):
            PadCollate.for_tokenizer(duck(pad_token_id=pad_id))

    def test_what_is_no_tokenizer(self) -> None:
        with pytest.raises(OptionError, match="got None from object"):
            PadCollate.for_tokenizer(object())
        with pytest.raises(OptionError, match="padding_side"):
            PadCollate.for_tokenizer(duck(padding_side="top"))

    def test_samples_without_ids(self) -> None:
        with pytest.raises(CollateError, match=r"a field 'input_ids'.*\['text', 'label'\]"):
            PadCollate.for_tokenizer(duck())([{"text": "a", "label": 1}])

    def test_ids_that_are_a_batch_of_one_text(self) -> None:
        """As `return_tensors="pt"` makes of each text: every length would be 1."""
        samples = [
            {name: torch.ones(1, n) for name in ("input_ids", "attention_mask")} for n in (2, 3)
        ]
        with pytest.raises(CollateError, match="'input_ids' of each sample is a batch of one text"):
            PadCollate.for_tokenizer(duck())(samples)

    def test_a_mask_of_several_axes(self) -> None:
        with pytest.raises(CollateError, match="several axes"):
            PadCollate.for_tokenizer(duck())([{"input_ids": [[1, 2], [3, 4]]}])


def test_a_collate_with_other_options_is_of_the_same_tokenizer() -> None:
    collate = replace(PadCollate.for_tokenizer(duck()), size_multiple=4)
    expected = PadCollate.for_tokenizer(duck(), size_multiple=4)
    assert collate == expected
    for name, field in collate([{"input_ids": [1, 2]}, {"input_ids": [3]}]).items():
        assert (
            field.tolist() == expected([{"input_ids": [1, 2]}, {"input_ids": [3]}])[name].tolist()
        )


def test_the_collate_is_a_value_and_does_not_keep_the_tokenizer() -> None:
    tokenizer = duck()
    collate = PadCollate.for_tokenizer(tokenizer)
    tokenizer.pad_token_id = 8
    assert collate == PadCollate.for_tokenizer(duck())
    assert collate != PadCollate.for_tokenizer(tokenizer)
    assert pickle.loads(pickle.dumps(collate)) == collate  # noqa: S301  (our own bytes)


@pytest.mark.peer
@pytest.mark.parametrize("side", ["right", "left"])
class TestTransformers:
    """Bit for bit what the collators of transformers make, for a tokenizer of its own."""

    def tokenizer(self, side: str) -> Any:
        pytest.importorskip("transformers")
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {word: i for i, word in enumerate(("[UNK]", "a", "b", "c", "[PAD]"))}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        made = PreTrainedTokenizerFast(
            tokenizer_object=words,
            pad_token="[PAD]",  # noqa: S106
            unk_token="[UNK]",  # noqa: S106
            padding_side=side,
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        )
        made.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
        return made

    def test_of_tokenized_texts(self, side: str) -> None:
        """Whether the samples have a mask or not."""
        tokenizer = self.tokenizer(side)
        from transformers import DataCollatorWithPadding

        samples = [dict(tokenizer(text)) for text in ("a b c", "b", "a a a a a zz")]
        without = [{k: v for k, v in s.items() if k != "attention_mask"} for s in samples]
        for multiple in (None, 4):
            theirs = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
            ours = PadCollate.for_tokenizer(tokenizer, size_multiple=multiple or 1)
            for chosen in (samples, without):
                expected, batch = theirs([dict(s) for s in chosen]), ours(chosen)
                assert set(batch) == set(expected)
                assert all(bitwise(batch[name], expected[name]) for name in batch)

    def test_of_a_label_for_each_token(self, side: str) -> None:
        """Under either of the names that it may have."""
        tokenizer = self.tokenizer(side)
        from transformers import DataCollatorForTokenClassification

        for name in ("label", "labels"):
            samples = [dict(tokenizer(text)) for text in ("a b c", "b")]
            samples = [one | {name: [1] * len(one["input_ids"])} for one in samples]
            expected = DataCollatorForTokenClassification(tokenizer)([dict(s) for s in samples])
            batch = PadCollate.for_tokenizer(tokenizer)(samples)
            assert all(bitwise(batch[field], expected[field]) for field in batch)

    def test_of_sources_and_targets(self, side: str) -> None:
        tokenizer = self.tokenizer(side)
        from transformers import DataCollatorForSeq2Seq

        pairs = [("a b c", "b"), ("b", "a c"), ("a a", "c c c c")]
        samples = [tokenizer(s) | {"labels": tokenizer(t)["input_ids"]} for s, t in pairs]
        expected = DataCollatorForSeq2Seq(tokenizer)([dict(sample) for sample in samples])
        batch = PadCollate.for_tokenizer(tokenizer)(samples)
        assert set(batch) == set(expected)
        assert all(bitwise(batch[name], expected[name]) for name in batch)
