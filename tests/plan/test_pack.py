"""Packing: every item in one bin, no bin over its room, as few bins as best fit decreasing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MemoryBudgetBatchSampler, PackedCost
from torchbudget.errors import OptionError
from torchbudget.plan.pack import pack, spread


@st.composite
def packings(draw: st.DrawFn) -> tuple[Any, int]:
    """Items in descending order, and a room: many alike, all different, large, small, zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 200))
    room = draw(st.integers(1, 1000))
    match draw(st.sampled_from(["any", "alike", "large", "small", "oversize", "zeros"])):
        case "any":
            items = rng.integers(0, room + 1, n)
        case "alike":
            items = rng.choice(rng.integers(1, room + 1, 3), n)
        case "large":
            items = rng.integers(room // 2 + 1, room + 2, n)
        case "small":
            items = rng.integers(0, room // 8 + 1, n)
        case "oversize":
            items = rng.integers(0, 3 * room, n)
        case _:
            items = rng.integers(0, room + 1, n) * (rng.random(n) < 0.3)
    return np.sort(items)[::-1].astype(np.int64), room


def bins_of(items: Any, room: int) -> list[Any]:
    """The items of each bin, after checking that they are a partition."""
    sizes, counts = np.unique(items, return_counts=True)
    grouped, starts = pack(sizes[::-1], counts[::-1], room)
    assert starts[0] == 0
    assert (np.diff(starts) > 0).all()
    assert np.array_equal(np.sort(grouped), np.arange(len(items)))
    return [items[part] for part in np.split(grouped, starts[1:])]


@given(packings())
def test_as_many_bins_as_best_fit_decreasing(case: Any) -> None:
    """Moving alike items together changes neither the number of bins nor how full they are.

    Which of two equally full bins takes an item is left open, and with it what a bin holds.
    """
    items, room = case
    found = bins_of(items, room)
    expected: list[int] = []  # bytes in each bin: an item goes where it leaves the least room
    for item in items.tolist():
        have_room = [bin_ for bin_, held in enumerate(expected) if held + item <= room]
        if have_room:
            expected[max(have_room, key=expected.__getitem__)] += item
        else:
            expected.append(item)
    assert all(held.sum() <= room or len(held) == 1 for held in found)
    assert sorted(held.sum() for held in found) == sorted(expected)


@given(st.integers(1, 60), st.integers(1, 1000), st.integers(0, 2**32))
def test_at_most_11_9_of_the_best(bins: int, room: int, seed: int) -> None:
    """Where a perfect packing exists, it takes at most 11/9 of its bins and 6/9 of one more.

    The bound on best (as on first) fit decreasing, tight for the latter: Dósa, Li, Han and Tuza,
    "Tight absolute bound for First Fit Decreasing bin-packing", 2013.
    """
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(bins):
        pieces = np.sort(rng.integers(0, room + 1, rng.integers(0, 6)))
        items += np.diff(pieces, prepend=0, append=room).tolist()
    ordered = np.array(sorted(items, reverse=True))
    assert bins <= len(bins_of(ordered, room)) <= 11 / 9 * bins + 6 / 9


@given(st.integers(1, 4), st.integers(1, 80), st.integers(1, 30), st.integers(0, 2**32), st.data())
def test_no_bin_is_over_any_room(
    limits: int, n: int, bins: int, seed: int, data: st.DataObject
) -> None:
    """With several rooms: every bin within all of them, none empty, none opened without need.

    A bin is opened for an item that fits into no other one, and so no other one can take all of it.
    """
    rng = np.random.default_rng(seed)
    rooms = rng.choice([0, 1, 9, 1000, 2**61], limits).tolist()
    largest = [max(int(room * data.draw(st.sampled_from([0.1, 0.6, 1]))), 0) for room in rooms]
    parts = np.array([rng.integers(0, most + 1, n) for most in largest])
    work = rng.integers(0, 50, n) if data.draw(st.booleans()) else None
    found = spread(parts, rooms, bins, work)
    number = int(found.max()) + 1
    assert number == len(set(found.tolist()))
    assert number >= min(n, bins)
    sums = [[sum(row[found == one].tolist()) for row in parts] for one in range(number)]
    assert all(used <= room for one in sums for used, room in zip(one, rooms, strict=True))
    for later in range(bins, number):
        for earlier in range(later):
            both = np.array(sums[earlier], object) + np.array(sums[later], object)
            assert (both > np.array(rooms, object)).any()


@pytest.mark.parametrize(
    ("name", "most"), [("text and patches", 0.025), ("graphs", 0.015), ("rows", 0.015)]
)
def test_several_limits_leave_little_of_the_fuller_one(name: str, most: float) -> None:
    """Batches of windows of 4,096, above the number that the sums need at the least."""
    rng, n = np.random.default_rng(0), 16_384
    text = np.clip(rng.lognormal(5, 1, n), 16, 4096)
    patches = np.where(rng.random(n) < 0.5, 0, rng.integers(64, 2048, n))
    nodes = np.clip(rng.lognormal(3.3, 0.6, n), 3, 400)
    edges = np.minimum(nodes * np.where(rng.random(n) < 1 / 30, nodes / 3, 4), 30_000)
    one, other, rooms = {
        "text and patches": (text, patches, (16_384, 8192)),
        "graphs": (nodes, edges, (2048, 32_768)),
        "rows": (text, np.ones(n), (4096, 32)),
    }[name]
    sizes = np.stack([one, other], axis=1).astype(np.int64)
    costs = [PackedCost(unit_bytes=unit) for unit in ([1, 0], [0, 1])]
    limits = [(costs[1], rooms[1])]
    sampler = MemoryBudgetBatchSampler(sizes, costs[0], rooms[0], window=4096, limits=limits)
    report = sampler.report()
    assert report.over_budget == 0
    assert report.batches <= (1 + most) * max(sizes.sum(axis=0) / rooms)


def test_bytes_past_32_bits() -> None:
    """Items of terabytes add up without wrapping."""
    items = np.array([3, 3, 2, 2, 2]) * 2**60
    assert len(bins_of(items, 6 * 2**60)) == 2


def test_lognormal_items_leave_next_to_nothing() -> None:
    """On real lengths best fit decreasing is within one in a thousand of the least there can be."""
    rng = np.random.default_rng(0)
    items = -np.sort(-np.clip(rng.lognormal(5, 1, 50_000), 16, 4096).astype(np.int64))
    found = bins_of(items, 16_384)
    assert len(found) <= 1.001 * -(-items.sum() // 16_384)


@given(
    st.lists(st.integers(1, 50), min_size=3, max_size=60),
    st.integers(50, 200),
    st.integers(0, 99),
    st.none() | st.integers(1, 6),
    st.none() | st.integers(103, 500),
)
def test_drop_last_leaves_out_the_emptiest_batch(
    sizes: list[int], budget: int, seed: int, most: int | None, amount: int | None
) -> None:
    """If another sample would have fitted it; with one rank and window, and nothing else."""
    options: dict[str, Any] = {"window": len(sizes), "seed": seed, "num_replicas": 1, "rank": 0}
    cost = PackedCost(unit_bytes=1)
    options["max_batch_size"] = most
    if amount is not None:
        options["limits"] = [(PackedCost(sample_bytes=3, unit_bytes=2), amount)]
    whole = list(MemoryBudgetBatchSampler(sizes, cost, budget, **options))
    free = []
    for batch in whole:
        n, total = len(batch) + 1, sum(sizes[index] for index in batch)
        least = total + min(sizes)
        over = least > budget or n > (most or n) or 3 * n + 2 * least > (amount or 10**9)
        free.append(0 if over else budget - total)
    emptiest = [set(batch) for batch, left in zip(whole, free, strict=True) if left == max(free)]
    allowed = emptiest if max(free) > 0 else [set()]
    try:
        kept = list(MemoryBudgetBatchSampler(sizes, cost, budget, drop_last=True, **options))
    except OptionError:
        assert any(len(one) == len(sizes) for one in allowed)  # nothing would be left
        return
    assert set(range(len(sizes))) - {index for batch in kept for index in batch} in allowed
