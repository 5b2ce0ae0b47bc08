"""Windows are put in order, cut and packed: the longest runs that fit, and few of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import oracles
from tests.support.strategies import problems, rules, several_axes_sizes
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.errors import OptionError
from torchbudget.plan.cut import SortedWindows, TiledWindows, arrange, ascending
from torchbudget.plan.rules import BatchRules


def cut_many(sizes: Any, rule: BatchRules, budgets: Any) -> list[list[int]]:
    """Samples in each run of windows that are sorted, or arranged, already."""
    windows, length = sizes.shape[:2]
    if sizes.ndim == 2:
        cuts = SortedWindows(sizes, rule).cut(budgets)
    else:
        as_they_come = np.tile(np.arange(length), (windows, 1))
        cuts = TiledWindows(sizes, as_they_come, rule).cut(budgets)
    return [np.diff(starts, append=length).tolist() for starts in cuts]


def cut_one(sizes: Any, rule: BatchRules, budget: int | None = None) -> list[int]:
    return cut_many(sizes[None], rule, np.array([rule.budget_bytes if budget is None else budget]))[
        0
    ]


def descending(sizes: Any) -> Any:
    return np.sort(sizes)[::-1] if sizes.ndim == 1 else sizes


# ---------------------------------------------------------------------- the cut


@given(problems(most=100, packed=False), rules(), st.sampled_from([1, 1, 4, 64]), st.floats(0, 1))
def test_the_cut_is_the_greedy_one(
    problem: Any, options: Any, size_multiple: int, lowered: float
) -> None:
    """Run by run the oracle's, under the whole budget and under a lowered one.

    At most `max_batch_size`; multiples where a run reaches one; sizes rounded up first. Windows of
    several axes are cut in two ways, by their number.
    """
    sizes, cost, budget = problem
    ordered = descending(sizes).astype(np.int64)
    rounded = -(-ordered // size_multiple) * size_multiple
    budget = max(budget, int(cost.batch_bytes(1, rounded.max(axis=0))))
    rule = BatchRules(cost=cost, budget_bytes=budget, size_multiple=size_multiple, **options)
    most, multiple = options.get("max_batch_size"), options.get("batch_size_multiple", 1)
    budgets = np.array([budget, int(lowered * budget)])
    expected = [
        oracles.greedy_cut(rounded, cost, allowed, most=most, multiple=multiple)
        for allowed in budgets.tolist()
    ]
    assert all(sum(runs) == len(sizes) for runs in expected)
    for threshold in (0, 10**9):
        with patch("torchbudget.plan.cut.LOCKSTEP", threshold):
            assert cut_many(np.stack([ordered] * 2), rule, budgets) == expected


# ---------------------------------------------------------------------- sorting


@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([np.uint8, np.uint16, np.int32, np.int64, np.uint64]),
    st.integers(0, 63),
    st.integers(0, 2**32),
)
def test_ascending_is_a_stable_argsort(
    rows: int, length: int, dtype: Any, bits: int, seed: int
) -> None:
    """For keys of any width, and many ties, it is NumPy's stable argsort."""
    bits = min(bits, np.iinfo(dtype).bits - (np.iinfo(dtype).kind == "i"))
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 2**bits, (rows, length), dtype=np.uint64).astype(dtype)
    keys = keys[:, rng.integers(0, length, length)]  # ties
    before = keys.copy()
    found = ascending(keys)
    assert found.dtype == np.int64
    assert np.array_equal(found, np.argsort(keys, axis=1, kind="stable"))
    assert np.array_equal(keys, before)


@pytest.mark.parametrize("length", [1, 2, 3, 256, 257, 4096])
def test_ascending_at_the_edge_of_each_width(length: int) -> None:
    """The largest key that 32 bits, then 64, hold beside a position, and the one after it."""
    bits = max(length - 1, 1).bit_length()
    rng = np.random.default_rng(length)
    for edge in (2 ** (32 - bits), 2 ** (63 - bits), 2**62, 2**63 - 1):
        for largest in (edge - 1, edge):
            keys = rng.integers(0, min(3, largest), (3, length)) + (largest - 3)
            keys[:, rng.integers(0, length)] = largest
            keys[0, -1] = 0
            expected = np.argsort(keys, axis=1, kind="stable")
            assert np.array_equal(ascending(keys), expected), (length, largest)


@given(several_axes_sizes(most=150), st.integers(1, 40), st.integers(1, 3))
def test_an_arrangement_is_a_permutation(sizes: Any, strips: int, windows: int) -> None:
    """Every sample of every window once; windows arranged together are arranged as if alone."""
    stacked = np.stack([np.roll(sizes, shift, axis=0) for shift in range(windows)])
    order = arrange(stacked, strips)
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(len(sizes)), (windows, 1)))
    for window in range(windows):
        assert np.array_equal(order[window], arrange(stacked[window : window + 1], strips)[0])


def test_strips_by_hand() -> None:
    """Two strips by the first axis, the second one backwards: neighbours across are alike."""
    sizes = np.array([[9, 1], [9, 3], [9, 2], [1, 1], [1, 3], [1, 2]])
    assert arrange(sizes[None], 2)[0].tolist() == [1, 2, 0, 3, 5, 4]
    assert arrange(sizes[None], 1)[0].tolist() == [1, 4, 2, 5, 0, 3]


def _micro_batches(sizes: Any, cost: Any, budget: int, strips: int) -> int:
    order = arrange(sizes[None], strips)[0]
    return len(cut_one(sizes[order], BatchRules(cost=cost, budget_bytes=budget)))


@pytest.mark.parametrize("kind", ["independent", "correlated", "images"])
def test_strips_need_fewer_micro_batches_than_one_axis(kind: str) -> None:
    """On independent, correlated and image-like sizes, strips beat sorting by either axis alone."""
    rng = np.random.default_rng(5)
    first = np.clip(rng.lognormal(4, 0.8, 4096), 4, 1000)
    match kind:
        case "independent":
            sizes = np.stack([first, rng.permutation(first)], axis=1).astype(np.int64)
            cost = PaddedCost(unit_bytes=(1, 1))
        case "correlated":
            sizes = np.stack([first, first * rng.uniform(0.5, 2, 4096)], axis=1).astype(np.int64)
            cost = PaddedCost(unit_bytes=(1, 1))
        case _:
            ratio = rng.choice([0.5, 0.75, 1, 4 / 3, 2], 4096)
            sizes = np.stack([first * ratio**0.5, first / ratio**0.5], axis=1).astype(np.int64)
            cost = PaddedCost(unit_bytes=(0, 0), pair_bytes=((0, 1), (0, 0)))
    budget = 2 * int(cost.batch_bytes(1, sizes.max(axis=0)))
    alone = cost.item_bytes(sizes)
    ideal = alone.sum() / budget
    strips = round(1.6 * ideal**0.5)
    found = _micro_batches(sizes, cost, budget, max(strips, 1))
    by_one_axis = min(
        len(cut_one(sizes[np.argsort(-sizes[:, axis])], BatchRules(cost=cost, budget_bytes=budget)))
        for axis in (0, 1)
    )
    by_cost = len(cut_one(sizes[np.argsort(-alone)], BatchRules(cost=cost, budget_bytes=budget)))
    assert found < 0.9 * by_one_axis
    assert found < 0.9 * by_cost


# ---------------------------------------------------------------------- packed


@pytest.mark.parametrize(
    ("name", "most"),
    [("text", 0.01), ("text and patches", 0.025), ("graphs", 0.015), ("rows", 0.015)],
)
def test_limits_leave_little_of_the_fuller_one(name: str, most: float) -> None:
    """Batches of windows of 4,096, above the number that the sums need at the least."""
    rng, n = np.random.default_rng(0), 16_384
    text = np.clip(rng.lognormal(5, 1, n), 16, 4096)
    patches = np.where(rng.random(n) < 0.5, 0, rng.integers(64, 2048, n))
    nodes = np.clip(rng.lognormal(3.3, 0.6, n), 3, 400)
    edges = np.minimum(nodes * np.where(rng.random(n) < 1 / 30, nodes / 3, 4), 30_000)
    one, other, rooms = {
        "text": (text, np.ones(n), (16_384, n)),
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
    emptiest = [batch for batch, left in zip(whole, free, strict=True) if left == max(free)]
    allowed = [sorted(sizes[index] for index in one) for one in emptiest if max(free) > 0] or [[]]
    try:
        kept = list(MemoryBudgetBatchSampler(sizes, cost, budget, drop_last=True, **options))
    except OptionError:
        assert any(len(one) == len(sizes) for one in allowed)  # nothing would be left
        return
    dropped = set(range(len(sizes))) - {index for batch in kept for index in batch}
    assert sorted(sizes[index] for index in dropped) in allowed
