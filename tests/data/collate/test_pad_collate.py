from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sample_strategies import same as bitwise
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedCost,
)
from torchbudget.errors import CollateError, OptionError


class TestOptionsPerField:
    def test_sides(self) -> None:
        samples = [{"a": [1], "b": [1]}, {"a": [1, 2], "b": [1, 2]}]
        batch = PadCollate(side={"b": "left"})(samples)
        assert batch["a"][0].tolist() == [1, 0]
        assert batch["b"][0].tolist() == [0, 1]
        assert bitwise(batch.measured_by("b").mask, torch.tensor([[False, True], [True, True]]))

    def test_multiples_and_axes(self) -> None:
        samples = [{"image": np.ones((3, 5, 6)), "text": [1, 2, 3], "fixed": [1] * 5}]
        collate = PadCollate(
            length_axes={"image": (1, 2)},
            size_multiple={"image": (4, 8), "text": 2},
            length_field="image",
        )
        batch = collate(samples)
        assert batch["image"].shape == (1, 3, 8, 8)
        assert batch["text"].shape == (1, 4)
        assert batch["fixed"].shape == (1, 5)
        assert batch.lengths.tolist() == [[5, 6]]
        assert batch.measured_by("text").padded_size == (4,)

    def test_a_size_multiple_is_read_from_what_has_one(self) -> None:
        """From a sampler or a stream, whose number the collate keeps, and nothing else of it."""

        class Sampler:
            size_multiple = 8
            sizes = np.zeros(100_000)

        for source in (Sampler(), {"x": Sampler()}):
            collate = PadCollate(size_multiple=source)
            assert collate([{"x": [1, 2, 3]}])["x"].shape == (1, 8)
            assert len(pickle.dumps(collate)) < 1000
        assert PadCollate(size_multiple=Sampler()) == PadCollate(size_multiple=8)

    def test_a_size_multiple_is_that_of_a_sampler_or_a_stream(self) -> None:
        sizes, tokens = [3, 9], PaddedCost(unit_bytes=1)
        samples = [[0] * size for size in sizes]
        sampler = MemoryBudgetBatchSampler(sizes, tokens, 64, size_multiple=8)
        stream = BudgetedIterableDataset(iter, tokens, 64, size_multiple=8)
        for source in (sampler, stream):
            assert PadCollate(size_multiple=source)(samples).data.shape == (2, 16)


class TestMask:
    def test_it_is_a_field_of_ones_and_zeros(self) -> None:
        collate = PadCollate(mask="attention_mask", side="left", size_multiple=4)
        batch = collate([{"ids": [1, 2, 3]}, {"ids": [4]}])
        expected = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])
        assert bitwise(batch["attention_mask"], expected)
        assert list(batch) == ["ids", "attention_mask"]
        assert bitwise(batch.split(2)[1]["attention_mask"], torch.tensor([[0, 0, 0, 1]]))
        assert batch.samples()[1]["attention_mask"].tolist() == [1]

    @pytest.mark.parametrize(
        ("samples", "match"),
        [([[1]], "dict samples"), ([{"m": [1]}], "overwrite"), ([{"a": 1}], "ragged axis")],
    )
    def test_where_it_has_no_place(self, samples: list[Any], match: str) -> None:
        with pytest.raises(CollateError, match=match):
            PadCollate(mask="m")(samples)


ragged = [{"x": [1, 2], "y": 1}, {"x": [3], "y": 2}]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"padding_value": {"lables": 1}}, "padding_value names field 'lables'.*'x', 'y'"),
        ({"side": {0: "left"}}, "side names field 0"),
        ({"length_field": "z"}, "length_field names field 'z'"),
        ({"length_field": "y"}, "has no ragged axis"),
    ],
)
def test_an_option_that_names_no_field(options: dict[str, Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate(**options)(ragged)


@pytest.mark.parametrize(
    "options",
    [
        {"padding_value": "0"}, {"padding_value": {"x": None}}, {"side": "top"}, {"side": 1.5},
        {"side": True}, {"side": float("nan")}, {"size_multiple": 0}, {"size_multiple": (2, 0)},
        {"size_multiple": True}, {"size_multiple": {"x": 1.5}}, {"length_axes": 0.5},
        {"length_axes": (0, 0)}, {"mask": ""}, {"mask": True},
    ],
)  # fmt: skip
def test_wrong_options_fail_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        PadCollate(**options)


def test_a_tuple_of_multiples_has_one_per_length_axis() -> None:
    with pytest.raises(OptionError, match="one entry per length axis"):
        PadCollate(size_multiple=(2, 2))([[1]])


def test_a_collate_is_a_value() -> None:
    options: dict[str, Any] = {"padding_value": {"x": 3}, "side": "left", "mask": "m"}
    collate = PadCollate(**options)
    options["padding_value"]["x"] = 4
    assert collate.padding_value == {"x": 3}
    collate(ragged)
    again = pickle.loads(pickle.dumps(collate))  # noqa: S301  (our own bytes)
    assert again == collate
    assert bitwise(again(ragged)["x"], collate(ragged)["x"])
    with pytest.raises(AttributeError):
        collate.side = "right"  # type: ignore[misc]


@pytest.mark.peer
def test_it_pads_as_the_collator_of_transformers_does() -> None:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerFast

    unk, pad = "[UNK]", "[PAD]"
    words = Tokenizer(models.WordLevel({pad: 0, unk: 1}, unk_token=unk))
    for side in ("right", "left"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token=pad, unk_token=unk, padding_side=side
        )
        tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
        peer = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8)
        rng = np.random.default_rng(0)
        samples = [
            {k: rng.integers(1, 9, n).tolist() for k in ("input_ids", "attention_mask", "labels")}
            for n in (3, 17, 1)
        ]
        expected = peer(samples)
        batch = PadCollate(side=side, size_multiple=8)(samples)
        assert all(bitwise(batch[key], expected[key]) for key in batch)
