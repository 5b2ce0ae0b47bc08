"""Bytes of the batches that exist at once, against sums that are made one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchbudget as tb
from torchbudget.data.loading.batch_bytes import (
    BatchBytes,
    batch_bytes,
    pinned_block,
    whole_pages,
)
from torchbudget.data.loading.in_flight import Observed, Planned, TriedBatch
from torchbudget.plan.batch_shapes import BatchShapes

shapes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 900)), min_size=4, max_size=30)


def made(n: int, length: int) -> TriedBatch:
    """Of ids in int64, a label for each sample, and a mask of all pairs."""
    storages = (8 * n * length, 4 * n, n * length * length)
    return TriedBatch(BatchBytes(storages=storages, plain=500), 100 * n * length, 0.01, n)


def planned(pairs: list[tuple[int, int]], ends: tuple[int, ...]) -> Planned:
    n, lengths = np.array(pairs).T
    known = BatchShapes(n, lengths[:, None], (n * lengths)[:, None], ends)
    return Planned(known, known, [made(*pair) for pair in pairs])


def windows(pairs: list[tuple[int, int]], ends: tuple[int, ...], count: int):
    """All runs of so many batches in an epoch, before which one of the epoch before is alive."""
    starts = [0, *(end - 1 for end in ends[:-1])]
    for start, end in zip(starts, ends, strict=True):
        for first in range(start, max(start + 1, end - count + 1)):
            yield [made(*pair).bytes for pair in pairs[first : min(first + count, end)]]


@given(shapes, st.integers(1, 12), st.integers(1, 3))
def test_the_window_is_that_of_the_own_sequence(pairs, count, parts) -> None:
    """The peak is the largest sum of consecutive batches, to the fit's rounding; never below."""
    ends = tuple(len(pairs) * part // parts for part in range(1, parts + 1))
    flight = planned(pairs, ends)
    expected = max(
        sum(sum(whole_pages(np.array(one.storages))) + one.plain for one in window)
        for window in windows(pairs, ends, count)
    )
    shared = max(
        sum(sum(whole_pages(np.array(one.storages))) for one in window)
        for window in windows(pairs, ends, count)
    )
    assert expected <= flight.peak(count) <= 1.02 * expected + 4096 * 3 * count
    assert shared <= flight.peak_shared(count) <= 1.02 * shared + 4096 * 3 * count
    assert flight.tensors == 3
    assert flight.building >= max(100 * n * length for n, length in pairs)


@given(st.lists(st.integers(1, 2**33), min_size=1, max_size=8))
def test_pinned_blocks_are_the_next_power_of_two(sizes) -> None:
    """Never less than what is asked for, and less than twice as much."""
    blocks = pinned_block(np.array(sizes)).tolist()
    for size, block in zip(sizes, blocks, strict=True):
        assert size <= block < 2 * size
        assert block & (block - 1) == 0


def test_pinned_blocks_are_kept_by_their_size() -> None:
    """Blocks of one size are used again, those of another lie beside them."""
    flight = Observed([TriedBatch(BatchBytes(storages=(1000, 3000), plain=7), 11, 0.1, 2)])
    assert flight.peak_pinned(5) == 5 * (1024 + 4096)
    assert flight.peak(5) == 5 * (4096 + 4096 + 7)
    assert flight.building == 11
    # Ten short batches, then ten long ones: the blocks of both are kept.
    pairs = [(4, 16)] * 10 + [(4, 512)] * 10
    kept = planned(pairs, (20,)).peak_pinned(3)
    each = [sum(pinned_block(np.array(made(*pair).bytes.storages)) * 3) for pair in set(pairs)]
    assert sum(each) * 0.99 <= kept <= sum(each) * 2


@pytest.mark.parametrize("collate", [tb.PadCollate(), tb.PackCollate()])
def test_a_batch_weighs_what_its_storages_do(collate) -> None:
    """Of any structure; tensors of one storage count once, texts by their pickle."""
    batch = collate([{"ids": torch.arange(n), "text": "word" * n} for n in (3, 9, 4)])
    weight = batch_bytes(batch)
    assert sum(weight.storages) >= 8 * 16
    assert weight.plain > 4 * 16
    base = torch.zeros(100)
    nested = [base[:10], (base[20:], {"y": np.zeros(1000)}), torch.eye(5).to_sparse()]
    weight = batch_bytes(nested)
    assert weight.storages[0] == 400
    assert len(weight.storages) == 3
    assert weight.plain > 8000
    assert weight.total == sum(weight.storages) + weight.plain
