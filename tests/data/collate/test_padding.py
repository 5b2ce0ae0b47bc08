"""Options of padding: values, sides, multiples, axes and the mask."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_leaves

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
            fields={"text": "padded", "fixed": "padded"},
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


class TestPaddingValue:
    def test_labels_and_attention_mask_have_their_own(self) -> None:
        samples = [{"ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]},
                   {"ids": [3], "labels": [3], "attention_mask": [1]}]  # fmt: skip
        batch = PadCollate(padding_value=7)(samples)
        assert [batch[k][1].tolist() for k in batch] == [[3, 7], [3, -100], [1, 0]]
        batch = PadCollate(padding_value={"labels": -1, "ids": 5})(samples)
        assert [batch[k][1].tolist() for k in batch] == [[3, 5], [3, -1], [1, 0]]

    def test_labels_of_named_tuples_and_fields_within_labels(self) -> None:
        class Text(NamedTuple):
            ids: list[int]
            labels: Any

        rows = [[1, 2], [3]]
        named = PadCollate()([Text(row, row) for row in rows])
        assert [field[1].tolist() for field in named] == [[3, 0], [3, -100]]
        for form in (lambda row: {"tags": row}, lambda row: (row,)):
            batch = PadCollate()([{"ids": row, "labels": form(row)} for row in rows])
            (field,) = tree_leaves(batch["labels"])
            assert field[1].tolist() == [3, -100]
            named = PadCollate()([Text(row, form(row)) for row in rows])
            (field,) = tree_leaves(named[1])
            assert field[1].tolist() == [3, -100]

    def test_nested_fields_are_named_by_tuples(self) -> None:
        samples = [({"u": [1]}, [1]), ({"u": [1, 2]}, [1, 2])]
        batch = PadCollate(padding_value={(0, "u"): 8, 1: 9})(samples)
        assert batch[0]["u"][0].tolist() == [1, 8]
        assert batch[1][0].tolist() == [1, 9]

    @pytest.mark.parametrize(
        ("form", "function"),
        [(torch.tensor, torch.min), (np.array, np.min), (list, torch.min), (list, min)],
    )
    def test_a_function_of_the_sample(
        self, form: Callable[[Any], Any], function: Callable[[Any], Any]
    ) -> None:
        collate = PadCollate(padding_value=function)
        batch = collate([form([3, 2]), form([5, 6, 7]), form([4])])
        assert batch.data.tolist() == [[3, 2, 2], [5, 6, 7], [4, 4, 4]]

    def test_a_function_that_fails_is_named(self) -> None:
        with pytest.raises(CollateError, match=r"sample 1 of the batch, field 'x'.*shape \(0,\)"):
            PadCollate(padding_value={"x": np.min})([{"x": np.ones(2)}, {"x": np.ones(0)}])

    @pytest.mark.parametrize(
        ("dtype", "value"),
        [(torch.uint8, -100), (torch.uint8, 256), (torch.int64, 0.5), (torch.int32, float("nan")),
         (torch.bool, 2), (torch.float32, 1j), (torch.int64, float("inf")),
         (torch.float16, -1e9)],
    )  # fmt: skip
    def test_a_value_that_the_dtype_cannot_hold(self, dtype: torch.dtype, value: complex) -> None:
        with pytest.raises(CollateError, match="the sample: the padding value"):
            PadCollate(padding_value=value)([torch.ones(1, dtype=dtype)])

    @pytest.mark.parametrize("value", [float("nan"), float("-inf"), -100, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_any_real_number_pads_floats(self, value: float, dtype: torch.dtype) -> None:
        samples = [torch.ones(1, dtype=dtype), torch.ones(2, dtype=dtype)]
        batch = PadCollate(padding_value=value)(samples)
        assert batch.data[0, 1].item() == pytest.approx(float(value), nan_ok=True)

    def test_bfloat16_and_float8_keep_their_bits(self) -> None:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            samples = [torch.tensor([0.5, -2.0]).to(dtype), torch.tensor([4.0]).to(dtype)]
            batch = PadCollate(padding_value=-1)(samples)
            assert batch.data.dtype == dtype
            assert batch.data.float().tolist() == [[0.5, -2], [4, -1]]


def test_functools_partial_is_a_padding_function() -> None:
    pickled = pickle.dumps(PadCollate(padding_value=functools.partial(max, -1)))
    collate = pickle.loads(pickled)  # noqa: S301  (our own bytes)
    assert collate([torch.tensor([5]), torch.tensor([1, 2])]).data.tolist() == [[5, 5], [1, 2]]


@pytest.mark.parametrize("lengths", [(2, 1), (2, 2), (9_000, 1)])
def test_what_requires_grad_gives_its_values(lengths: tuple[int, int]) -> None:
    samples = [torch.ones(length, requires_grad=True) for length in lengths]
    batch = PadCollate()(samples)
    assert not batch.data.requires_grad
    assert batch.data.sum(dim=1).tolist() == list(lengths)


@pytest.mark.parametrize("length", [100, 50_000])
@pytest.mark.parametrize("form", [torch.as_tensor, np.asarray, np.ndarray.tolist])
def test_long_and_short_samples_take_different_ways_to_the_same_batch(
    length: int, form: Callable[[Any], Any]
) -> None:
    arrays = [np.arange(length), np.arange(length // 3), np.arange(0)]
    batch = PadCollate(side="left", padding_value=-1)([form(a) for a in arrays])
    for i, array in enumerate(arrays):
        assert batch.data[i, : length - len(array)].eq(-1).all()
        assert np.array_equal(batch.data[i, length - len(array) :].numpy(), array)


def test_the_batch_does_not_share_memory_with_a_sample() -> None:
    sample = torch.ones(3)
    PadCollate()([sample]).data.zero_()
    assert sample.sum() == 3


def test_a_size_multiple_rounds_even_where_all_are_equal() -> None:
    assert PadCollate(size_multiple=8)([[1, 2, 3]]).data.shape == (1, 8)


ragged = [{"x": [1, 2], "y": 1}, {"x": [3], "y": 2}]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"padding_value": {"lables": 1}}, "padding_value names field 'lables'.*'x', 'y'"),
        ({"side": {0: "left"}}, "side names field 0"),
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


def test_pack_padded_sequence_takes_the_lengths() -> None:
    batch = PadCollate()([torch.ones(3, 2), torch.ones(1, 2)])
    packed = pack_padded_sequence(batch.data, batch.lengths, batch_first=True)
    assert packed.data.shape == (4, 2)
    batch.lengths.zero_()  # a copy
    assert batch.lengths.tolist() == [3, 1]
