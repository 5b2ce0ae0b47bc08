"""Dealing a window's micro-batches to ranks: equal in number, and as equal as can be in cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.cut import SortedWindows, Windows

# Precision of a lowered budget, as a share of the budget: 1 / 2**11.
_PRECISION: Final = 2**11
_HALVINGS: Final = 12
# Runs of the tail, one for each rank and distinct size, that are computed at once. All of them
# would take gigabytes for 4,096 ranks and lengths up to 100,000.
_RUNS_AT_ONCE: Final = 2**18
# Number of budgets that are tried for the micro-batches of the longest samples, from the lowest one
# with few enough micro-batches to the whole budget. The most even result is used. With one budget
# alone the costliest rank was up to 0.3 % higher above the mean, and batches had up to 3 % more
# elements; five budgets gained nothing (log-normal and uniform sizes, 2 to 8 ranks, costs with and
# without attention).
_HEADS: Final = 3
# Ranks are even enough if the costliest one is within this factor of the mean.
_EVEN: Final = 1.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealing:
    """Rules of dealing: the number of ranks that share a window, and what is made even.

    Attributes:
        number: number of ranks that share each window.
        even_sums: ranks wait for each other once a window (one optimizer step), so that the sums
            over a window must be even; otherwise they wait once a round.
        multiple: the number of micro-batches on each rank is a multiple of it.
        repeats: a window repeats samples up to a multiple of `number`, which can be split evenly,
            for forward passes whose outputs can be discarded.
    """

    number: int = 1
    even_sums: bool = False
    multiple: int = 1
    repeats: bool = False

    @property
    def together(self) -> int:
        """The number of micro-batches in a window is a multiple of it."""
        return self.number * self.multiple


def least_rounds(micro_batches: IntArray, length: int, ranks: Dealing) -> IntArray:
    """The number of micro-batches that each rank gets of each window.

    Args:
        micro_batches: micro-batches of each window under the whole budget, shape `(windows,)`.
        length: samples in each window, or units that stay in one micro-batch.
        ranks: ranks that share the windows.

    Returns:
        Shape `(windows,)`.

    Raises:
        UnevenRanksError: a window has fewer samples than micro-batches on all ranks.
    """
    rounds = -(-micro_batches // ranks.together) * ranks.multiple
    most = int(rounds.max()) * ranks.number
    if most > length:
        multiples = f" in multiples of {ranks.multiple}" if ranks.multiple > 1 else ""
        raise UnevenRanksError(
            f"{length} samples that need {int(micro_batches.max())} micro-batches cannot be split "
            f"evenly over {ranks.number} ranks{multiples} without repeating or dropping one; use "
            f"at least {most} samples, another number of ranks or a larger budget; a sampler or "
            "stream can drop the rest (drop_last=True)"
        )
    return rounds


def lowest_budgets(windows: Windows, *, target: IntArray, low: IntArray, high: int) -> IntArray:
    """Lower the budgets of padded windows as far as their numbers of micro-batches allow.

    Under the whole budget a window has some number of micro-batches, which the ranks round up to a
    multiple of their number. Under the lowest budget that gives no more than that multiple, the
    micro-batches are as alike as can be, the last one too.

    Args:
        windows: windows to cut.
        target: numbers of micro-batches, at least as under the whole budget, `(windows,)`.
        low: lower bound on the bytes of a micro-batch in each window, `(windows,)`.
        high: the budget.

    Returns:
        The budgets, shape `(windows,)`.
    """
    precision = max(high // _PRECISION, 1)
    feasible = np.full(len(low), high)
    infeasible = low - 1
    middle = (infeasible + feasible) // 2
    # A finished window stays as it is, so that it does not depend on other windows.
    while (wide := feasible - infeasible > precision).any():
        enough = np.array([*map(len, windows.cut(middle))]) <= target
        feasible = np.where(wide & enough, middle, feasible)
        infeasible = np.where(wide & ~enough, middle, infeasible)
        middle = (infeasible + feasible) // 2
    return feasible


def split_to(starts: IntArray, length: int, costs: IntArray, target: int) -> IntArray:
    """Split the costliest runs in two until there are `target` of them.

    Args:
        starts: start of each run, ascending from 0, shape `(runs,)`.
        length: end of the last run; at least `target`.
        costs: bytes of each run, shape `(runs,)`.
        target: number of runs to reach.

    Returns:
        The starts of the runs now, shape `(target,)`. A half counts as half the cost of its run.
        O(runs·splits).
    """
    while len(starts) < target:
        lengths = np.diff(starts, append=length)
        at = int(np.where(lengths > 1, costs, -1).argmax())
        starts = np.insert(starts, at + 1, starts[at] + -(-lengths[at] // 2))
        half = costs[at] // 2
        costs = np.insert(costs, at, half)
        costs[at + 1] = half
    return starts


def deal_rounds(costs: IntArray, weights: IntArray, ranks: int) -> IntArray:
    """Deal rounds of micro-batches that cost about the same, so that sums of weights are even.

    The micro-batches, from the costliest down, form rounds of one per rank, so that ranks do alike
    work at the same time. Rounds are dealt from the widest spread of weights down, the heaviest
    micro-batch to the rank with the least so far: the balanced largest-first differencing
    of Michiels, Korst, Aarts and van Leeuwen ("Performance ratios for the Karmarkar–Karp
    differencing method", 2003), by sums instead of differences.

    Args:
        costs: shape `(windows, rounds·ranks)`, filled up with whole rounds of −1.
        weights: amounts that are made even over ranks, non-negative, of the same shape.
        ranks: number of ranks.

    Returns:
        Positions along the second axis of `costs`, shape `(windows, rounds, ranks)`, the costliest
        round first and rounds of −1 last.
    """
    windows, number = costs.shape
    shape = windows, number // ranks, ranks
    order = np.argsort(-costs, axis=1, kind="stable").reshape(shape)
    weighed = np.take_along_axis(weights, order.reshape(windows, -1), axis=1).reshape(shape)
    heaviest_first = np.argsort(-weighed, axis=2, kind="stable")
    order = np.take_along_axis(order, heaviest_first, axis=2)
    weighed = np.take_along_axis(weighed, heaviest_first, axis=2)
    widest_first = np.argsort(weighed[..., -1] - weighed[..., 0], axis=1, kind="stable")
    row = np.arange(windows)
    each = row[:, None]
    sums = np.zeros((windows, ranks), np.int64)
    for at in widest_first.T:
        # The rank with the least so far gets the round's first micro-batch, and so on.
        least = np.argsort(sums, axis=1, kind="stable")
        taken = order[row, at]
        order[each, at[:, None], least] = taken
        sums[each, least] += np.maximum(weighed[row, at], 0)
    return order


def level(
    windows: SortedWindows, row: int, work: IntArray, dealt: IntArray, budget: int
) -> tuple[IntArray, IntArray] | None:
    """Fill every rank up to one level with a run of the window's shortest samples.

    Micro-batches of long samples are coarse: if a step has few of them on each rank, no dealing
    makes the ranks even. So all but the last `ranks` runs are dealt, and the samples after them are
    cut anew into one run for each rank, which fills the rank up to a common level. The lowest level
    at which all samples have a place is found by bisection. With 8 ranks of two micro-batches each,
    the costliest rank was 0.5 % above the mean instead of 2.0 % (log-normal sizes, σ = 1.2), and
    2.4 % instead of 17.8 % if the cost has attention.

    Args:
        windows: windows that were cut.
        row: number of the window.
        work: work of each of its micro-batches, by `BatchRules.work`, shape `(micro-batches,)`.
        dealt: their numbers by round and rank, shape `(rounds, ranks)`.
        budget: the lowered cap under which the window was cut.

    Returns:
        Other starts of the micro-batches, and their numbers by round and rank; `None` if that is no
        better.
    """
    most, ranks = int(work[dealt].sum(axis=0).max()), dealt.shape[1]
    head = len(work) - ranks
    if not head:
        return None  # one micro-batch each: they are as alike as can be already
    found = None
    whole = windows.rules.lowered.amount
    for tried in np.linspace(budget, whole, _HEADS).astype(np.int64).tolist():
        if most * ranks <= work.sum() * _EVEN:
            break
        starts = np.array(windows.starts(row, tried)[: head + 1])
        if len(starts) > head and windows.length - starts[head] >= ranks:
            better = _filled_up(windows, row, starts, ranks, most)
            if better is not None:
                most, *found = better
    return None if found is None else (found[0], found[1])


def _filled_up(
    windows: SortedWindows, row: int, starts: IntArray, ranks: int, most: int
) -> tuple[int, IntArray, IntArray] | None:
    """Deal a head of micro-batches, and fill the ranks up by the tail: see `level`.

    Args:
        windows: windows that were cut.
        row: number of the window.
        starts: starts of the head's micro-batches, and of the tail.
        ranks: number of ranks.
        most: what the costliest rank's sum must be below.

    Returns:
        The costliest rank's sum, the starts and their numbers by round and rank.
    """
    sizes, rules, cut = windows.sizes[row], windows.rules, int(starts[-1])
    reach = None if windows.reach is None else windows.reach[row, cut:]
    work = rules.costs(rules.work, np.diff(starts), rules.padded(sizes[starts[:-1]]))
    dealt = deal_rounds(work[None], work[None], ranks)[0]
    sums = work[dealt].sum(axis=0)
    # The longest samples of the tail go to the rank with the most room.
    order = np.argsort(sums, kind="stable")
    tail = sizes[cut:]
    new = np.append(True, tail[1:] != tail[:-1])
    which = np.cumsum(new, dtype=np.int32)  # from 1 on
    values, capacities = rules.padded(tail[new]), rules.capacity(tail[new], rules.lowered.amount)
    together = max(_RUNS_AT_ONCE // len(values), 1)

    def bounds_under(top: int) -> list[int]:
        """The starts of the ranks' runs in the tail under a level, and the end of the last one."""
        bounds = [0]
        for first in range(0, ranks, together):
            room = top - sums[order[first : first + together]]
            fits = np.minimum(rules.work.capacity(values, room[:, None]), capacities)
            longest = rules.rounded(np.maximum(fits, 1))
            for rank, runs in enumerate(longest, first):
                at = bounds[-1]
                left = len(tail) - at - (ranks - 1 - rank)  # each later rank gets a sample, too
                run = runs[which[at] - 1]
                if reach is not None:
                    run = rules.rounded(np.minimum(run, reach[at]))
                bounds.append(at + min(int(run), left))
        return bounds

    low, high, best = int(sums.max()), most, None
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        bounds = bounds_under(middle)
        if bounds[-1] < len(tail):
            low = middle
        else:
            high, best = middle, bounds
    if best is None:
        return None
    starts = np.append(starts[:-1], cut + np.array(best[:-1]))
    work = rules.costs(rules.work, np.diff(starts, append=len(sizes)), rules.padded(sizes[starts]))
    last = np.empty(ranks, np.int64)
    last[order] = len(starts) - ranks + np.arange(ranks)
    rounds = np.vstack([dealt, last])
    costliest = int(work[rounds].sum(axis=0).max())
    # Round g again has the g-th costliest micro-batch of every rank.
    again = np.argsort(-work[rounds], axis=0, kind="stable")
    found = costliest, starts, np.take_along_axis(rounds, again, axis=0)
    return found if costliest < most else None
