"""Packing: every item in one bin, no bin over its room, as few bins as best fit decreasing."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MemoryBudgetBatchSampler, PackedCost
from torchbudget.errors import OptionError
from torchbudget.plan.pack import pack


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


def bins_of(items: Any, room: int, most: int | None = None) -> list[Any]:
    """The items of each bin, after checking that they are a partition."""
    sizes, counts = np.unique(items, return_counts=True)
    grouped, starts = pack(sizes[::-1], counts[::-1], room, most)
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


@given(packings(), st.integers(1, 20))
def test_no_bin_holds_more_than_most(case: Any, most: int) -> None:
    """With `most`, every bin of more is cut into as few pieces as can be."""
    items, room = case
    free = bins_of(items, room)
    held = bins_of(items, room, most)
    assert max(map(len, held)) <= most
    assert len(held) == sum(-(-len(one) // most) for one in free)
    for one in held:
        assert one.sum() <= room or len(one) == 1


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
)
def test_drop_last_leaves_out_the_emptiest_batch(
    sizes: list[int], budget: int, seed: int, most: int | None
) -> None:
    """If another sample would have fitted it; with one rank and window, and nothing else."""
    options: dict[str, Any] = {"window": len(sizes), "seed": seed, "num_replicas": 1, "rank": 0}
    cost = PackedCost(unit_bytes=1)
    options["max_batch_size"] = most
    whole = list(MemoryBudgetBatchSampler(sizes, cost, budget, **options))
    free = [
        0 if len(batch) == most else budget - sum(sizes[index] for index in batch)
        for batch in whole
    ]
    emptiest = [set(batch) for batch, left in zip(whole, free, strict=True) if left == max(free)]
    allowed = emptiest if max(free) >= min(sizes) else [set()]
    try:
        kept = list(MemoryBudgetBatchSampler(sizes, cost, budget, drop_last=True, **options))
    except OptionError:
        assert any(len(one) == len(sizes) for one in allowed)  # nothing would be left
        return
    assert set(range(len(sizes))) - {index for batch in kept for index in batch} in allowed
