"""How the outputs of a batch become outputs of its samples."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.samplers import LENGTHS, TOKENS
from tests.train.test_predict import Encoder, loader_of, texts_of
from torchbudget import MemoryBudgetBatchSampler, PackCollate, predict
from torchbudget.errors import OptionError


class Pair(NamedTuple):
    length: Tensor
    rows: list[Any]


STRUCTURES: dict[str, Any] = {
    "tuple": lambda x: (x, x + 1),
    "list": lambda x: [x, x + 1],
    "dict": lambda x: {"a": x, "b": {"c": x + 1}},
    "ordered": lambda x: OrderedDict(b=x, a=x + 1),
    "named": lambda x: Pair(x[..., 0], [x, None]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_split_into_structures(name: str) -> None:
    """Each sample's output is of the same kind as the batch's."""
    make = STRUCTURES[name]
    sizes = [3, 1, 4, 1, 5, 9]
    totals = predict(lambda batch: make(batch.data.sum(1, keepdim=True)), loader_of(sizes, 12))
    for found, text in zip(totals, texts_of(sizes), strict=True):
        expected = make(text.sum(0, keepdim=True))
        assert type(found) is type(expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.peer
def test_model_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs", reason="in the test group")
    kind = outputs.BaseModelOutput
    found = predict(lambda batch: kind(last_hidden_state=batch.data), loader_of([3, 1]))
    assert [type(one) for one in found] == [kind, kind]
    assert found[0].last_hidden_state.equal(texts_of([3, 1])[0])


def test_rows_keep_their_padding_unless_they_are_split() -> None:
    sizes = [3, 1, 4]
    padded = predict(lambda batch: batch.data, loader_of(sizes))
    assert [len(one) for one in padded] == [4, 4, 4]
    cut = predict(
        lambda batch: batch.data,
        loader_of(sizes),
        split_outputs=lambda rows, batch: [r[:n] for r, n in zip(rows, batch.lengths, strict=True)],
    )
    assert all(map(torch.equal, cut, texts_of(sizes)))


def test_packed_outputs_are_split_by_lengths() -> None:
    sizes = [3, 1, 4, 2]
    sampler = MemoryBudgetBatchSampler(sizes, TOKENS, 8, shuffle=False)
    loader = DataLoader(texts_of(sizes), batch_sampler=sampler, collate_fn=PackCollate())
    with pytest.raises(OptionError, match=r"must be tensors of shape \(2, …\), got a tensor of sh"):
        predict(lambda batch: batch.data, loader)
    found = predict(
        lambda batch: batch.data,
        loader,
        split_outputs=lambda values, batch: values.split(batch.lengths.tolist()),
    )
    assert all(map(torch.equal, found, texts_of(sizes)))


def test_an_output_keeps_its_own_bytes_only() -> None:
    """No row keeps its batch, nor is it what the model gives to the next one."""
    buffer = torch.zeros(300, 1000)
    kept: list[Any] = []

    def model(batch: Any) -> Tensor:
        kept.append(weakref.ref(batch))
        buffer[: batch.num_samples] = batch.lengths.reshape(-1, 1)
        return buffer[: batch.num_samples]

    found = predict(model, loader_of())
    assert all(one.untyped_storage().nbytes() == 4000 for one in found)
    assert [int(one[0]) for one in found] == LENGTHS.tolist()
    gc.collect()
    assert len(kept) > 3
    assert not any(one() for one in kept)


@pytest.mark.parametrize(
    ("outputs", "match"),
    [
        (lambda _: torch.tensor(1.0), r"shape \(3, …\), got a tensor of shape \(\); pass split_ou"),
        (lambda b: (b.data, b.data.sum()), r"got a tensor of shape \(\)"),
        (lambda b: b.data[:2], r"got a tensor of shape \(2, 5\)"),
        (lambda b: {"rows": b.data, "name": "x"}, "got a str"),
        (lambda _: None, "returned no tensor, but None"),
        (lambda _: [], r"returned no tensor, but \[\]"),
    ],
)
def test_outputs_that_are_no_rows(outputs: Any, match: str) -> None:
    where = r"batch 0, of 3 samples with indices \[2, 1, 0\]: "
    with pytest.raises(OptionError, match=where + ".*" + match):
        predict(outputs, loader_of([3, 4, 5]))


@pytest.mark.parametrize("number", [0, 2, 4])
def test_another_number_of_outputs(number: int) -> None:
    with pytest.raises(OptionError, match=rf"batch 0, of 3 .* must return 3 outputs, got {number}"):
        predict(Encoder(), loader_of([3, 4, 5]), split_outputs=lambda *_: [None] * number)
