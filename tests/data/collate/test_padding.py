from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch.utils._pytree import tree_leaves

from tests.support.sample_strategies import (
    Samples,
    at,
    batches_of_samples,
    expected_tensors,
    left_share,
    pad_naively,
    sides,
)
from tests.support.sample_strategies import same as bitwise
from torchbudget import PadCollate
from torchbudget.errors import CollateError


@given(batches_of_samples(), sides, st.integers(1, 4), st.sampled_from([0, 1]))
def test_a_padded_field_is_what_the_naive_loop_makes(
    drawn: Samples, side: str | float, multiple: int, value: int
) -> None:
    collate = PadCollate(
        padding_value=value, side=side, size_multiple=multiple, fields=drawn.rules("padded")
    )
    batch = collate(drawn.samples)
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        field = at(batch.data, path)
        if spec.form == "text":
            assert field == column
            continue
        multiples = (multiple, 1, 1)[: spec.ndim]
        tensors = expected_tensors(spec, column)
        assert bitwise(field, pad_naively(tensors, value, left_share(side), multiples))


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
