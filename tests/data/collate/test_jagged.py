from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.support.sample_strategies import Samples, at, batches_of_samples, expected_tensors
from tests.support.sample_strategies import same as bitwise
from torchbudget.data.collate.jagged import JaggedBatch
from torchbudget.data.collate.pack import JaggedCollate
from torchbudget.errors import CollateError


@given(batches_of_samples(same_trailing=True))
def test_nested_tensors_hold_the_samples(drawn: Samples) -> None:
    batch = JaggedCollate()(drawn.samples)
    for path, spec, column in zip(drawn.paths, drawn.specs, drawn.columns, strict=True):
        field = at(batch.data, path)
        if spec.form == "text":
            assert field == column
            continue
        tensors = expected_tensors(spec, column)
        assert field.is_nested == bool(spec.ndim)
        assert all(map(bitwise, field.unbind(), tensors))
        assert all(map(bitwise, [at(s, path) for s in batch.samples()], tensors))


ragged = [{"ids": [1, 2, 3], "w": [0.5, 1.0, 1.5], "y": 1}, {"ids": [4], "w": [2.0], "y": 0}]


def test_fields_of_equal_lengths_can_be_combined() -> None:
    batch = JaggedCollate()(ragged)
    product = batch["ids"] * batch["w"]
    assert product.values().tolist() == [0.5, 2, 4.5, 8]


def test_they_can_be_combined_after_every_journey() -> None:
    batch = JaggedCollate()(ragged)
    _ = batch.data  # views that are made already must not travel
    journeys: list[JaggedBatch] = [
        batch.to("cpu"),
        batch.to("meta"),
        batch.split(1)[0],
        pickle.loads(pickle.dumps(batch)),  # noqa: S301  (our own bytes)
    ]
    for arrived in journeys:
        assert (arrived["ids"] * arrived["w"]).shape[0] == 2


def test_offsets_and_lengths() -> None:
    batch = JaggedCollate()(ragged)
    assert bitwise(batch.offsets, torch.tensor([0, 3, 4]))
    assert bitwise(batch.lengths, torch.tensor([3, 1]))
    assert (batch.max_seqlen, batch.num_tokens, batch.num_samples) == (3, 4, 2)
    assert batch.nbytes == 4 * 8 + 4 * 4 + 2 * 8 + 3 * 8


def test_gradients_flow_through_the_views() -> None:
    batch = JaggedCollate()([torch.ones(2, 3), torch.ones(1, 3)])
    layer = torch.nn.Linear(3, 1)
    layer(batch.data).values().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[3, 3, 3]]


def test_split_gives_jagged_batches() -> None:
    first, second = JaggedCollate()(ragged).split(2)
    assert [t.tolist() for t in second["ids"].unbind()] == [[4]]
    assert first.offsets.tolist() == [0, 3]


def test_other_axes_must_agree() -> None:
    with pytest.raises(CollateError, match="sample 1 of the batch, the sample: expected equal"):
        JaggedCollate()([torch.ones(1, 2), torch.ones(1, 3)])


def test_a_batch_of_empty_samples() -> None:
    batch = JaggedCollate()([torch.ones(0), torch.ones(0)])
    assert [t.tolist() for t in batch.data.unbind()] == [[], []]


def test_a_collate_is_a_value() -> None:
    collate: Any = JaggedCollate(length_field="x")
    assert pickle.loads(pickle.dumps(collate)) == collate  # noqa: S301  (our own bytes)
