"""The shapes of a rank's micro-batches are those of what the sampler yields."""

import numpy as np
import pytest

import torchbudget as tb
from torchbudget.plan.batch_shapes import batch_shapes, batches_at

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("ranks", [1, 3])
def test_shapes_are_those_of_the_batches_that_come(axes, ranks) -> None:
    """Numbers of samples, padded sizes and sums, batch by batch, over epochs."""
    sizes = RNG.integers(1, 60, (700, axes) if axes > 1 else 700)
    cost = tb.PaddedCost(unit_bytes=1 if axes == 1 else [1, 2])
    for rank in range(ranks):
        sampler = tb.MemoryBudgetBatchSampler(
            sizes, cost, 900, size_multiple=4, window=200, num_replicas=ranks, rank=rank
        )
        found = batch_shapes(sampler.plan, epoch=0, rank=rank)
        assert len(found.ends) == 10
        number = 0
        for epoch in range(3):
            for batch in sampler:
                rows = sizes[batch].reshape(len(batch), -1)
                assert found.samples[number] == len(batch)
                assert found.padded[number].tolist() == (-(-rows.max(axis=0) // 4) * 4).tolist()
                assert found.sums[number].tolist() == rows.sum(axis=0).tolist()
                number += 1
            assert found.ends[epoch] == number


def test_batches_are_found_by_their_places() -> None:
    """In the order that was asked for; those past the end are left out."""
    sampler = tb.MemoryBudgetBatchSampler(
        RNG.integers(1, 60, 300), tb.PaddedCost(unit_bytes=1), 300
    )
    epoch = list(sampler)
    wanted = [5, 0, 5, len(epoch) - 1, len(epoch) + 3]
    sampler.set_epoch(0)
    found = batches_at(sampler.plan, wanted, epoch=0, rank=0)
    assert found == [epoch[number] for number in wanted[:-1]]
    assert batches_at(sampler.plan, [], epoch=0, rank=0) == []


def test_an_order_that_does_not_change_is_one_epoch() -> None:
    sizes = RNG.integers(1, 60, 300)
    sampler = tb.MemoryBudgetBatchSampler(sizes, tb.PaddedCost(unit_bytes=1), 300, shuffle=False)
    found = batch_shapes(sampler.plan, epoch=0, rank=0)
    assert found.ends == (len(sampler),)
    assert found.samples.tolist() == [len(batch) for batch in sampler]
