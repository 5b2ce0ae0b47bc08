from __future__ import annotations

from collections import UserDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sample_strategies import (
    Pair,
)
from torchbudget import PadCollate
from torchbudget.errors import CollateError

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
        ({"x": [2**63, -1], "y": 1}, "sample 2 .*field 'x': .*64-bit ints .*got one of larger"),
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
        ([[2**63, -1], [-1, 2**64]], "sample 0 .*64-bit ints or floats, got one of larger ints"),
        ([[[2**63], [-1]]], "sample 0 .*64-bit ints or floats, got one of larger ints"),
        ([np.array(["a"])], "an array of numbers"),
        ([np.array([object()])], "an array of numbers"),
        ([np.ma.masked_less(np.arange(4), 2)], "sample 0 .*got MaskedArray; convert it"),
        ([np.ones(1), np.ones(1, np.float32)], "sample 1 .*dtype float64.*got dtype float32"),
        ([torch.ones(1), torch.ones(1, 1)], "sample 1 .*expected 1 axes"),
        ([torch.ones(1), torch.ones(1).to_sparse()], "sample 1 .*expected a dense tensor"),
        ([torch.ones(9999), torch.ones(1).to_sparse()], "sample 1 .*expected a dense tensor"),
        ([torch.ones(2).to_sparse(), torch.ones(1).to_sparse()], "sample 0 .*expected a dense"),
        ([torch.ones(1), torch.ones(1, device="meta")], "sample 1 .*a tensor on cpu.*on meta"),
        ([torch.ones(9999), torch.ones(1, device="meta")], "sample 1 .*a tensor on cpu.*on meta"),
        ([torch.tensor(1), torch.tensor(1, device="meta")], "sample 1 .*a tensor on cpu.*on meta"),
    ],
)
def test_what_forms_no_batch(samples: list[Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PadCollate()(samples)


def test_a_list_of_something_else_is_a_structure() -> None:
    batch = PadCollate()([[torch.ones(2), 1], [torch.ones(1), 2]])
    x, y = batch
    assert x.shape == (2, 2)
    assert y.tolist() == [1, 2]


def test_named_tuples_stay_named() -> None:
    batch = PadCollate()([Pair(1, [2]), Pair(3, [4])])
    assert isinstance(batch.data, Pair)
    assert batch.data.second.tolist() == [[2], [4]]


def test_any_mapping_is_a_sample() -> None:
    assert PadCollate()([UserDict(x=[1, 2]), UserDict(x=[3])])["x"].shape == (2, 2)
    assert PadCollate()([defaultdict(list, x=[1])])["x"].shape == (1, 1)
