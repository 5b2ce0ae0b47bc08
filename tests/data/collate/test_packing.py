from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

from tests.support.sample_strategies import Samples, at, batches_of_samples, expected_tensors
from tests.support.sample_strategies import same as bitwise
from torchbudget import PackCollate
from torchbudget.errors import CollateError


@given(batches_of_samples(same_trailing=True))
def test_fields_are_concatenated_and_numbers_stacked(drawn: Samples) -> None:
    batch = PackCollate(fields=drawn.rules("joined"))(drawn.samples)
    assert batch.num_samples == len(drawn.samples)
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        field = at(batch.data, path)
        if spec.form == "text":
            assert field == column
            continue
        tensors = expected_tensors(spec, column)
        assert bitwise(field, torch.cat(tensors) if spec.ndim else torch.stack(tensors))


def test_fields_of_equal_lengths_share_their_offsets() -> None:
    batch = PackCollate(length_field="a")(
        [{"a": [1, 2], "b": [0.5, 0.5], "c": [1]}, {"a": [3], "b": [1.5], "c": []}]
    )
    assert batch.measured_by("a").cu_seqlens is batch.measured_by("b").cu_seqlens
    assert batch.measured_by("c").cu_seqlens.tolist() == [0, 1, 1]
    assert batch.nbytes == 3 * 8 + 3 * 4 + 1 * 8 + 2 * 3 * 4
    assert PackCollate(length_field="c")(batch.samples()).lengths.tolist() == [1, 0]


def test_more_than_32_bits_count_is_refused() -> None:
    """Zero-width rows: 2³¹ positions without a byte."""
    row = torch.empty(2**30, 0)
    with pytest.raises(CollateError, match=r"more than the offsets, torch\.int32, can count"):
        PackCollate()([row, row])


@pytest.mark.parametrize(
    ("samples", "match"),
    [
        ([], "empty batch"),
        (
            [{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}],
            r"sample 2 of the batch, field 'x': expected equal axes \(3,\).*\(4,\)",
        ),
        ([{"x": [1]}, {"x": [1.5]}], "sample 1 of the batch, field 'x'"),
        ([torch.ones(1), torch.ones(1).to_sparse()], "sample 1 .*expected a dense tensor"),
    ],
)
def test_what_cannot_be_packed(samples: list[Any], match: str) -> None:
    with pytest.raises(CollateError, match=match):
        PackCollate()(samples)
