"""Dealing a window's micro-batches to ranks: equal in number, and as equal as can be in cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import UnevenRanksError

# Halvings of the interval in which the lowered budget is searched: to 0.05 % of it.
_HALVINGS: Final = 11
# Exchanges between the costliest and the cheapest rank; on measured data the eighth gains nothing.
_EXCHANGES: Final = 12
# Exchanges look at all pairs of micro-batches of two ranks. With more than this many on each rank
# sums are even without them.
_EXCHANGE_ROUNDS: Final = 64

Starts: TypeAlias = Callable[[IntArray], IntArray]


def lowest_budget(
    starts: Starts, *, low: IntArray, high: int, length: int, ranks: int
) -> tuple[IntArray, IntArray]:
    """Lower each window's budget as far as its number of micro-batches allows.

    The budget rounds a window to some number of micro-batches; the ranks round that up to a
    multiple of theirs. Under the lowest budget that still gives no more than that multiple, the
    micro-batches are as alike as can be, the last one too.

    Args:
        starts: cuts the windows under a budget each, `(windows,)` to `(micro-batches, windows)`
            offsets, filled with `length`.
        low: bytes that no micro-batch of each window is below, shape `(windows,)`.
        high: the budget.
        length: samples in each of them.
        ranks: how many ranks.

    Returns:
        The lowered budgets and the numbers of micro-batches to reach, each of shape `(windows,)`.

    Raises:
        UnevenRanksError: a window has fewer samples than micro-batches to reach.
    """

    def count(budget: IntArray) -> IntArray:
        number: IntArray = np.count_nonzero(starts(budget) < length, axis=0)
        return number

    feasible = np.full(len(low), high)
    least = count(feasible)
    target = -(-least // ranks) * ranks
    if (target > length).any():
        raise UnevenRanksError(
            f"{length} samples that need {int(least.max())} micro-batches cannot be dealt evenly "
            f"to {ranks} ranks without repeating or dropping one; raise the budget, use another "
            "number of ranks, or drop_last=True"
        )
    infeasible = low - 1
    for _ in range(_HALVINGS):
        middle = (infeasible + feasible) // 2
        enough = count(middle) <= target
        feasible = np.where(enough, middle, feasible)
        infeasible = np.where(enough, infeasible, middle)
    return feasible, target


def split_to(
    starts: list[int], length: int, costs: list[int], target: int, *, multiple: int = 1
) -> list[int]:
    """Split the costliest runs in two until there are `target` of them.

    Args:
        starts: where each run starts, ascending from 0.
        length: where the last one ends; at least `target`.
        costs: bytes of each run.
        target: how many runs to reach.
        multiple: the first half of a run is a multiple of it wherever the run is longer.

    Returns:
        Where the runs start now. A half counts as half its run's cost.
    """
    stops = [*starts[1:], length]
    runs = [[cost, start, stop] for cost, start, stop in zip(costs, starts, stops, strict=True)]
    while len(runs) < target:
        cost, start, stop = run = max(
            (run for run in runs if run[2] - run[1] > 1), key=lambda run: run[0]
        )
        half = -(-(stop - start) // 2)
        rounded = -(-half // multiple) * multiple
        middle = start + (rounded if rounded < stop - start else half)
        run[:] = [cost // 2, start, middle]
        runs.append([cost // 2, middle, stop])
    return sorted(start for _, start, _ in runs)


def deal(costs: IntArray, ranks: int, *, even_sums: bool) -> IntArray:
    """Give every rank the same number of micro-batches at about the same cost.

    The micro-batches, from the costliest down, form rounds of one per rank, so that what the ranks
    do at the same time is alike. Rounds are dealt from the one of the widest spread down, the
    costliest micro-batch to the rank with the least so far: the balanced largest-first differencing
    of Michiels, Korst, Aarts and van Leeuwen ("Performance ratios for the Karmarkar–Karp
    differencing method", 2003), by sums instead of differences. With `even_sums` the costliest and
    the cheapest rank then exchange micro-batches while that brings them together.

    Args:
        costs: shape `(windows, rounds·ranks)`, −1 where a window has fewer (whole rounds of −1).
        ranks: how many ranks.
        even_sums: what counts is each rank's sum over the window, since the ranks wait for each
            other once per window; otherwise each round, since they wait once per round.

    Returns:
        Positions along the second axis of `costs`, shape `(windows, rounds, ranks)`, the costliest
        round first and rounds of −1 last.
    """
    windows, number = costs.shape
    rounds = number // ranks
    order = np.argsort(-costs, axis=1, kind="stable").reshape(windows, rounds, ranks)
    sums = np.zeros((windows, ranks), np.int64)
    weighed = np.take_along_axis(costs, order.reshape(windows, -1), axis=1)
    weighed = weighed.reshape(windows, rounds, ranks)
    widest_first = np.argsort(weighed[..., -1] - weighed[..., 0], axis=1, kind="stable")
    row = np.arange(windows)
    for nth in range(rounds):
        at = widest_first[:, nth]
        place = np.argsort(np.argsort(sums, axis=1, kind="stable"), axis=1)
        order[row, at] = np.take_along_axis(order[row, at], place, axis=1)
        weighed[row, at] = np.take_along_axis(weighed[row, at], place, axis=1)
        sums += np.maximum(weighed[row, at], 0)
    if even_sums and ranks > 1:
        # Each window by itself: what is dealt must not depend on what it is planned together with.
        few = np.count_nonzero(weighed[..., 0] >= 0, axis=1) <= _EXCHANGE_ROUNDS
        if few.any():
            some, chosen = weighed[few, :_EXCHANGE_ROUNDS], order[few, :_EXCHANGE_ROUNDS]
            _exchange(some, chosen)
            weighed[few, :_EXCHANGE_ROUNDS], order[few, :_EXCHANGE_ROUNDS] = some, chosen
        # Rounds again: the g-th costliest of every rank.
        again = np.argsort(-weighed, axis=1, kind="stable")
        order = np.take_along_axis(order, again, axis=1)
    return order


def _exchange(weighed: IntArray, order: IntArray) -> None:
    """Exchange micro-batches between the costliest and the cheapest rank of each window, in place.

    Among all pairs the one is exchanged whose difference is nearest to half of the two ranks' gap.
    """
    windows, rounds, _ = weighed.shape
    row = np.arange(windows)
    for _ in range(_EXCHANGES):
        sums = np.maximum(weighed, 0).sum(axis=1)
        most, least = sums.argmax(axis=1), sums.argmin(axis=1)
        gap = sums[row, most] - sums[row, least]
        mine, theirs = weighed[row, :, most], weighed[row, :, least]
        gain = mine[:, :, None] - theirs[:, None, :]
        real = (mine[:, :, None] >= 0) & (theirs[:, None, :] >= 0)
        helps = real & (gain > 0) & (gain < gap[:, None, None])
        miss = np.where(helps, np.abs(2 * gain - gap[:, None, None]), np.iinfo(np.int64).max)
        best = miss.reshape(windows, -1).argmin(axis=1)
        take, give = np.divmod(best, rounds)
        better = np.flatnonzero(helps.reshape(windows, -1)[row, best])
        if not better.size:
            return
        one = (better, take[better], most[better])
        other = (better, give[better], least[better])
        for array in (weighed, order):
            array[one], array[other] = array[other], array[one]
