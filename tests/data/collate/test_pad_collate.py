from __future__ import annotations

import functools
import pickle
from collections import UserDict, defaultdict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from tests.support.sample_strategies import (
    Pair,
    Samples,
    at,
    batches_of_samples,
    expected_tensors,
    pad_naively,
)
from tests.support.sample_strategies import same as bitwise
from torchbudget import PadCollate
from torchbudget.errors import CollateError, OptionError

sides = st.sampled_from(["right", "left", 0.5, 0.25, 1 / 3])


def left_share(side: str | float) -> float:
    return side if isinstance(side, float) else {"right": 0.0, "left": 1.0}[side]


@given(batches_of_samples(), sides, st.integers(1, 4), st.sampled_from([0, 1]))
def test_a_padded_field_is_what_the_naive_loop_makes(
    drawn: Samples, side: str | float, multiple: int, value: int
) -> None:
    batch = PadCollate(padding_value=value, side=side, size_multiple=multiple)(drawn.samples)
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        field = at(batch.data, path)
        if spec.form == "text":
            assert field == column
            continue
        multiples = (multiple, 1, 1)[: spec.ndim]
        tensors = expected_tensors(spec, column)
        assert bitwise(field, pad_naively(tensors, value, left_share(side), multiples))


@given(batches_of_samples(), sides, st.integers(1, 4))
def test_unpadding_gives_the_samples_back(drawn: Samples, side: str | float, multiple: int) -> None:
    batch = PadCollate(side=side, size_multiple=multiple)(drawn.samples)
    samples = batch.samples()
    assert len(samples) == len(drawn.samples) == batch.num_samples
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        came = [at(sample, path) for sample in samples]
        if spec.form == "text":
            assert came == column
        else:
            assert all(map(bitwise, came, expected_tensors(spec, column)))


@given(
    batches_of_samples(texts=False),
    sides,
    st.integers(1, 4),
    st.sampled_from([0, (0, 1), (1, 2), -1, (0, -1), ()]),
)
def test_the_mask_marks_what_lengths_and_samples_say(
    drawn: Samples, side: str | float, multiple: int, axes: int | tuple[int, ...]
) -> None:
    named = axes if isinstance(axes, tuple) else (axes,)
    if axes == (0, -1) and any(spec.ndim == 1 for spec in drawn.specs):
        with pytest.raises(OptionError, match="twice"):
            PadCollate(length_axes=axes)(drawn.samples)
        return
    collate = PadCollate(side=side, size_multiple=multiple, length_axes=axes)
    batch = collate(drawn.samples)
    present = [[a % s.ndim for a in named if -s.ndim <= a < s.ndim] for s in drawn.specs]
    field = next((i for i, axes_ in enumerate(present) if axes_), 0)
    spec, own = drawn.specs[field], present[field]
    shapes = [t.shape for t in expected_tensors(spec, drawn.columns[field])]
    lengths = torch.tensor([[shape[a] for a in own] for shape in shapes], dtype=torch.int64)
    lengths = lengths.reshape(len(shapes), len(own))
    expected = lengths[:, 0] if len(own) == 1 else lengths
    assert bitwise(batch.lengths, expected)
    assert batch.num_tokens == lengths.prod(dim=1).sum()
    ones = [torch.ones(row, dtype=torch.bool) for row in lengths.tolist()]
    mask = pad_naively(ones, False, left_share(side), (multiple,) * len(own))
    assert bitwise(batch.mask, mask)
    assert batch.padded_size == tuple(mask.shape[1:])


@given(batches_of_samples(texts=False))
def test_the_samples_of_a_batch_collate_to_the_batch(drawn: Samples) -> None:
    batch = PadCollate()(drawn.samples)
    again = PadCollate()(batch.samples())
    for path in drawn.paths:
        assert bitwise(at(again.data, path), at(batch.data, path))


class TestFields:
    def test_python_numbers_become_what_torch_makes_of_them(self) -> None:
        samples = [{"i": 1, "f": 0.5, "b": True, "c": 1j, "s": "x"}] * 2
        batch = PadCollate()(samples)
        assert [batch[k].dtype for k in "ifbc"] == [
            torch.int64, torch.float32, torch.bool, torch.complex64,
        ]  # fmt: skip
        assert batch["s"] == ["x", "x"]

    def test_the_default_dtype_is_that_of_floats(self) -> None:
        torch.set_default_dtype(torch.float64)
        try:
            batch = PadCollate()([{"n": 0.1, "l": [0.1]}])
        finally:
            torch.set_default_dtype(torch.float32)
        assert batch["n"].item() == batch["l"].item() == 0.1

    def test_a_list_of_ints_and_floats_holds_floats(self) -> None:
        batch = PadCollate()([[1, 0.5], [0.25]])
        assert bitwise(batch.data, torch.tensor([[1, 0.5], [0.25, 0]]))

    def test_numbers_of_numpy_may_stand_in_lists(self) -> None:
        batch = PadCollate()([[np.int32(1)], [np.int32(2), np.int32(3)]])
        assert bitwise(batch.data, torch.tensor([[1, 0], [2, 3]]))

    def test_numpy_scalars_keep_their_dtype(self) -> None:
        batch = PadCollate()([np.float64(1), np.float64(2)])
        assert bitwise(batch.data, torch.tensor([1, 2], dtype=torch.float64))

    def test_empty_lists_have_the_dtype_and_axes_of_the_others(self) -> None:
        batch = PadCollate()([{"a": [], "b": [[1, 2], [3, 4]]}, {"a": [True], "b": []}])
        assert bitwise(batch["a"], torch.tensor([[False], [True]]))
        assert bitwise(batch["b"], torch.tensor([[[1, 2], [3, 4]], [[0, 0], [0, 0]]]))
        assert bitwise(PadCollate()([[], []]).data, torch.empty(2, 0))

    def test_a_list_of_something_else_is_a_structure(self) -> None:
        batch = PadCollate()([[torch.ones(2), 1], [torch.ones(1), 2]])
        x, y = batch
        assert x.shape == (2, 2)
        assert y.tolist() == [1, 2]

    def test_named_tuples_stay_named(self) -> None:
        batch = PadCollate()([Pair(1, [2]), Pair(3, [4])])
        assert isinstance(batch.data, Pair)
        assert batch.data.second.tolist() == [[2], [4]]

    def test_any_mapping_is_a_sample(self) -> None:
        assert PadCollate()([UserDict(x=[1, 2]), UserDict(x=[3])])["x"].shape == (2, 2)
        assert PadCollate()([defaultdict(list, x=[1])])["x"].shape == (1, 1)

    def test_arrays_of_any_byte_order_and_stride(self) -> None:
        samples = [np.arange(6, dtype=">i4")[::-2], np.arange(4, dtype=">i4")]
        expected = torch.tensor([[5, 3, 1, 0], [0, 1, 2, 3]], dtype=torch.int32)
        assert bitwise(PadCollate()(samples).data, expected)
        assert bitwise(PadCollate(size_multiple=4)(samples[:1]).data, expected[:1])

    def test_read_only_arrays_are_read(self) -> None:
        array = np.arange(3)
        array.flags.writeable = False
        assert PadCollate()([array, array[:2]]).data.tolist() == [[0, 1, 2], [0, 1, 0]]

    @pytest.mark.parametrize("lengths", [(2, 1), (2, 2), (9_000, 1)])
    def test_what_requires_grad_gives_its_values(self, lengths: tuple[int, int]) -> None:
        samples = [torch.ones(length, requires_grad=True) for length in lengths]
        batch = PadCollate()(samples)
        assert not batch.data.requires_grad
        assert batch.data.sum(dim=1).tolist() == list(lengths)

    @pytest.mark.parametrize("length", [100, 50_000])
    @pytest.mark.parametrize("form", [torch.as_tensor, np.asarray, np.ndarray.tolist])
    def test_long_and_short_samples_take_different_ways_to_the_same_batch(
        self, length: int, form: Callable[[Any], Any]
    ) -> None:
        arrays = [np.arange(length), np.arange(length // 3), np.arange(0)]
        batch = PadCollate(side="left", padding_value=-1)([form(a) for a in arrays])
        for i, array in enumerate(arrays):
            assert batch.data[i, : length - len(array)].eq(-1).all()
            assert np.array_equal(batch.data[i, length - len(array) :].numpy(), array)

    def test_the_batch_does_not_share_memory_with_a_sample(self) -> None:
        sample = torch.ones(3)
        PadCollate()([sample]).data.zero_()
        assert sample.sum() == 3


class TestPaddingValue:
    def test_labels_and_attention_mask_have_their_own(self) -> None:
        samples = [{"ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]},
                   {"ids": [3], "labels": [3], "attention_mask": [1]}]  # fmt: skip
        batch = PadCollate(padding_value=7)(samples)
        assert [batch[k][1].tolist() for k in batch] == [[3, 7], [3, -100], [1, 0]]
        batch = PadCollate(padding_value={"labels": -1, "ids": 5})(samples)
        assert [batch[k][1].tolist() for k in batch] == [[3, 5], [3, -1], [1, 0]]

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
         (torch.bool, 2), (torch.float32, 1j), (torch.int64, float("inf"))],
    )  # fmt: skip
    def test_a_value_that_the_dtype_cannot_hold(self, dtype: torch.dtype, value: complex) -> None:
        with pytest.raises(CollateError, match="the sample: the padding value"):
            PadCollate(padding_value=value)([torch.ones(1, dtype=dtype)])

    @pytest.mark.parametrize("value", [float("nan"), float("-inf"), -100, True])
    def test_any_real_number_pads_floats(self, value: float) -> None:
        batch = PadCollate(padding_value=value)([[1.0], [1.0, 2.0]])
        assert batch.data[0, 1].item() == pytest.approx(float(value), nan_ok=True)

    def test_bfloat16_and_float8_keep_their_bits(self) -> None:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            samples = [torch.tensor([0.5, -2.0]).to(dtype), torch.tensor([4.0]).to(dtype)]
            batch = PadCollate(padding_value=-1)(samples)
            assert batch.data.dtype == dtype
            assert batch.data.float().tolist() == [[0.5, -2], [4, -1]]


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
            length_axes={"image": (1, 2)}, size_multiple={"image": (4, 8), "text": 2}
        )
        batch = collate(samples)
        assert batch["image"].shape == (1, 3, 8, 8)
        assert batch["text"].shape == (1, 4)
        assert batch["fixed"].shape == (1, 5)
        assert batch.lengths.tolist() == [[5, 6]]
        assert batch.measured_by("text").padded_size == (4,)

    def test_a_size_multiple_rounds_even_where_all_are_equal(self) -> None:
        assert PadCollate(size_multiple=8)([[1, 2, 3]]).data.shape == (1, 8)

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

    def test_the_length_field_is_the_first_ragged_one_or_the_named(self) -> None:
        samples = [{"id": 1, "a": [1, 2], "b": [1]}]
        assert PadCollate()(samples).lengths.tolist() == [2]
        assert PadCollate(length_field="b")(samples).lengths.tolist() == [1]


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
    ("third", "match"),
    [
        ({"x": [1.5], "y": 1}, "sample 2 of the batch, field 'x': expected dtype torch.int64 as"),
        ({"x": [1.5], "y": 1}, "as in sample 0, got dtype torch.float32"),
        ({"x": [True], "y": 1}, "sample 2 .*field 'x'.*got dtype torch.bool"),
        ({"x": [[1]], "y": 1}, "sample 2 .*field 'x': expected 1 axes .*got 2 axes"),
        ({"x": [1], "y": 1.0}, "sample 2 .*field 'y': expected an int .*got a float"),
        ({"x": [1], "y": [1]}, "sample 2 .*field 'y': expected an int .*got a list"),
        ({"x": [1], "y": 2**63}, "sample 2 .*field 'y': expected an int of 64 bits"),
        ({"x": [2**63], "y": 1}, "sample 2 .*field 'x': expected a list of bools, 64-bit ints"),
        ({"x": [1, None], "y": 1}, "sample 2 .*field 'x': expected a list of"),
        ({"x": [1, "a"], "y": 1}, "sample 2 .*field 'x': expected a list of"),
        ({"x": [1, [2]], "y": 1}, "sample 2 .*field 'x': expected a rectangular list"),
        ({"x": torch.ones(1), "y": 1}, "sample 2 .*field 'x': expected a list .*got a tensor"),
        ({"x": [1]}, "sample 2 .*missing: \\['y'\\], unexpected: \\[\\]"),
        ({"x": [1], "z": 1}, "sample 2 .*missing: \\['y'\\], unexpected: \\['z'\\]"),
        (defaultdict(int, x=[1], z=2), "sample 2 .*missing: \\['y'\\], unexpected: \\['z'\\]"),
        (([1], 1), "sample 2 of the batch, the sample: expected a mapping .*got a tuple"),
        ({"x": None, "y": 1}, "sample 2 .*field 'x'.*got an object of another type"),
    ],
)  # fmt: skip
def test_a_sample_that_differs_is_named_with_its_field(third: Any, match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate()([*ragged, third, *ragged])


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ([], "empty batch"),
        ([{}, {}], "at least one field"),
        ([(), ()], "at least one field"),
        ([(1,), (1, 2)], "sample 1 .*expected 1 fields .*got 2 fields"),
        ([{"a": {"b": None}}], "sample 0 .*field \\('a', 'b'\\).*got NoneType; convert it"),
        ([{"a": {"b": 1}}, {"a": {"c": 1}}], "sample 1 .*field 'a'.*missing: \\['b'\\]"),
        ([np.array(["a"])], "an array of numbers"),
        ([np.array([object()])], "an array of numbers"),
        ([np.ones(1), np.ones(1, np.float32)], "sample 1 .*dtype float64.*got dtype float32"),
        ([torch.ones(1), torch.ones(1, 1)], "sample 1 .*expected 1 axes"),
        ([torch.ones(1), torch.ones(1).to_sparse()], "sample 1 .*expected a dense tensor"),
        ([torch.ones(9999), torch.ones(1).to_sparse()], "sample 1 .*expected a dense tensor"),
        ([torch.ones(1), torch.ones(1, device="meta")], "sample 1 .*a tensor on cpu.*on meta"),
        ([torch.ones(9999), torch.ones(1, device="meta")], "sample 1 .*a tensor on cpu.*on meta"),
        ([torch.tensor(1), torch.tensor(1, device="meta")], "sample 1 .*a tensor on cpu.*on meta"),
    ],
)
def test_what_forms_no_batch(samples: list[Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate()(samples)


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


def test_functools_partial_is_a_padding_function() -> None:
    pickled = pickle.dumps(PadCollate(padding_value=functools.partial(max, -1)))
    collate = pickle.loads(pickled)  # noqa: S301  (our own bytes)
    assert collate([torch.tensor([5]), torch.tensor([1, 2])]).data.tolist() == [[5, 5], [1, 2]]
