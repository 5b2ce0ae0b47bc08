"""Batches of few shapes: rows that fill one up are masked, and change no result."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.support.samplers import LENGTHS, TOKENS
from torchbudget import (
    BudgetedIterableDataset,
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PackCollate,
    PackedCost,
    PadCollate,
    best_shapes,
    evaluate,
    joint_backward,
    predict,
)
from torchbudget.errors import CollateError, OptionError

RNG = np.random.default_rng(0)
SAMPLES: Any = [
    {
        "ids": torch.from_numpy(RNG.integers(1, 50, n)),
        "labels": torch.from_numpy(RNG.integers(0, 2, n)),
        "weight": 1.0 + n % 3,
        "text": "x" * n,
    }
    for n in LENGTHS.tolist()
]


def sampler_of(**options: Any) -> MemoryBudgetBatchSampler:
    return MemoryBudgetBatchSampler(LENGTHS, TOKENS, 1000, **{"max_shapes": 6} | options)


@given(st.integers(1, 8), st.sampled_from([1, 8]), st.sampled_from(["right", "left"]))
def test_a_batch_of_a_shape_is_the_plain_one_and_masked_rows(
    number: int, multiple: int, side: str
) -> None:
    """The samples as without shapes; then copies of the shortest, with labels that count for none.

    What a batch says of itself counts samples alone, and its parts have no other rows.
    """
    sampler = sampler_of(max_shapes=number, size_multiple=multiple)
    collate = PadCollate(size_multiple=sampler, side=side, mask="own")
    shapes, masked, report = set(), 0, sampler.report()
    for indices in sampler:
        chosen = [SAMPLES[i] for i in indices]
        n, longest = len(chosen), int(LENGTHS[indices].max())
        batch, plain = collate(chosen), PadCollate(side=side)(chosen)
        rows, length = sampler.shape_of(n, longest)
        assert batch["ids"].shape == batch["labels"].shape == batch["own"].shape == (rows, length)
        assert batch["weight"].shape == batch.row_mask.shape == (rows,)
        assert (batch.num_samples, batch.masked_rows) == (n, rows - n)
        assert batch.row_mask.tolist() == [True] * n + [False] * (rows - n)
        assert batch.lengths.tolist() == plain.lengths.tolist()
        assert batch.num_tokens == plain.num_tokens == int(batch.mask.sum())
        shortest = int(LENGTHS[indices].min())
        for row in range(n, rows):
            own = batch["own"][row] == 1
            assert own.sum() == shortest
            assert batch["ids"][row][own].tolist() in [one["ids"].tolist() for one in chosen]
            assert set(batch["labels"][row].tolist()) == {-100}
        for parts in (batch.split(1), batch.split(n)):
            assert sum(part.num_samples for part in parts) == n == sum(map(len_of, parts))
            assert not any(part.masked_rows for part in parts)
        assert [one["ids"].tolist() for one in batch.samples()] == [
            one["ids"].tolist() for one in chosen
        ]
        shapes.add((rows, length))
        masked += rows - n
    assert shapes <= set(sampler.shapes)
    assert masked == report.masked_rows


def len_of(batch: Any) -> int:
    return len(batch["ids"])


def test_masked_rows_need_labels_or_a_loss_that_leaves_them_out() -> None:
    """Without integer labels a collate raises at the first batch, unless told of `row_mask`."""
    sampler = sampler_of()
    floats = [{"x": torch.ones(n), "labels": torch.ones(n)} for n in LENGTHS.tolist()]
    chosen = [floats[i] for i in next(iter(sampler))]
    with pytest.raises(CollateError, match=r"is named 'labels'.*PadCollate\(row_mask=True\)"):
        PadCollate(size_multiple=sampler)(chosen)
    batch = PadCollate(size_multiple=sampler, row_mask=True)(chosen)
    assert not batch["labels"][batch.num_samples :].eq(-100).any()
    some = [dict(one, labels=1 if n else None) for n, one in enumerate(SAMPLES[:3])]
    batch = PadCollate(size_multiple=sampler, fields={"labels": "optional"})(some)
    assert batch["labels"].tolist()[:2] == [1, 1]
    assert set(batch["labels"].tolist()[2:]) <= {-100}
    assert batch.masked_rows
    longest = SAMPLES[int(LENGTHS.argmax())]
    with pytest.raises(CollateError, match="must have the planned shape"):
        PadCollate(size_multiple=sampler)([longest] * sampler.shapes[-1][0])
    with pytest.raises(OptionError, match="fit none of the shapes"):
        PadCollate(size_multiple=sampler)(SAMPLES)
    with pytest.raises(CollateError, match="padded to \\(\\)"):
        PadCollate(size_multiple=sampler)([{"labels": 1}])


class Tagger(nn.Module):
    """Two logits a token, which depend on the tokens before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 3, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(ids).cumsum(1))
        return logits


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(
        model(batch["ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )


def sums_of(model: nn.Module, batch: Any) -> torch.Tensor:
    sums: torch.Tensor = (model(batch["ids"]).sum(-1) * batch["own"]).sum(1)
    return sums


def test_masked_rows_change_no_result() -> None:
    """Gradient, evaluation, predictions and a joint loss are as without shapes."""
    results = []
    for options in ({}, {"max_shapes": None}):
        sampler, model = sampler_of(samples_per_step=100, **options), Tagger()
        collate = PadCollate(size_multiple=sampler, mask="own")
        loader = DataLoader(SAMPLES, batch_sampler=sampler, collate_fn=collate)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator = GradAccumulator(optimizer, module=model, steps=sampler)
        masked = 0
        for batch in sampler.tracked(loader):
            masked += batch.masked_rows
            with accumulator.micro_batch(weight=batch.num_tokens):
                accumulator.backward(loss_of(model, batch))
        loss = evaluate(model, loader, loss_of, weight=lambda batch: batch.num_tokens)
        outputs = predict(partial(sums_of, model), loader)
        results.append((torch.cat([p.flatten() for p in model.parameters()]), loss, outputs))
        assert (masked > 0) == (options == {})
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-15)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-12)
    assert results[0][2].allclose(results[1][2], rtol=1e-12)
    collates = [PadCollate(size_multiple=one, mask="own") for one in (sampler_of(), 1)]
    forward, criterion = partial(sums_of, Tagger()), partial(torch.logsumexp, dim=0)
    losses = [joint_backward(forward, [one(SAMPLES[:3])], criterion) for one in collates]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


def test_a_model_is_compiled_once_for_each_shape() -> None:
    """Of a sampler, and of a stream with the same shapes."""
    shapes = best_shapes(LENGTHS, TOKENS, 1000, 6)
    stream = BudgetedIterableDataset(
        [SAMPLES], TOKENS, 1000, size="ids", max_shapes=shapes, window=150
    )
    sampler = sampler_of(window=150)
    assert list(sampler.shapes) == shapes
    loader = DataLoader(
        SAMPLES, batch_sampler=sampler, collate_fn=PadCollate(size_multiple=sampler)
    )
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(Tagger(), backend=counter, dynamic=False)
    came = set()
    for batch in (*loader, *stream):
        compiled(batch["ids"])
        came.add(tuple(batch["ids"].shape))
    assert came == set(shapes)
    assert counter.frame_count == len(shapes) == 6


def test_rows_of_a_given_number_of_segments() -> None:
    """Every row has one length, and every `cu_seqlens`; each sample is a segment of its own."""
    cost = PackedCost(unit_bytes=1, total_multiple=512)
    sampler = MemoryBudgetBatchSampler(LENGTHS, cost, 512, max_batch_size=12)
    collate = PackCollate(total_multiple=sampler, segments=13)
    for indices in sampler:
        batch = collate([SAMPLES[i] for i in indices])
        bounds = batch.cu_seqlens.tolist()
        assert (len(batch["ids"]), len(bounds), bounds[-1]) == (512, 14, 512)
        assert np.diff(bounds)[: len(indices)].tolist() == LENGTHS[indices].tolist()
        assert batch.position_ids.tolist() == [
            k for n in np.diff(bounds).tolist() for k in range(n)
        ]
        assert all(len(part.cu_seqlens) == 14 for part in batch.split(min(2, len(indices))))
    with pytest.raises(CollateError, match="and one more as segments="):
        PackCollate(total_multiple=512, segments=2)(SAMPLES[:2])
    with pytest.raises(OptionError, match="segments needs size_multiple=1"):
        PackCollate(size_multiple=8, segments=4)
