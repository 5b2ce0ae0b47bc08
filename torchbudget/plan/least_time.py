"""The cap on the time of a micro-batch under which given samples take the least time.

Where a window's samples are given, as those of one optimizer step, full micro-batches are seldom
the fastest: each is padded to its longest sample. Short ones pad less, but each takes the time that
a micro-batch takes at least. So micro-batches keep a cap on their time beside the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measured import MeasuredCost, WaysCost
from torchbudget.cost.protocol import IntArray
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.cut import Windows
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.groups import Labels
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import arranged_windows, best_strips, solve, work_of_runs

# Caps that are tried: each half of the one before, and then some between the best one's neighbours.
_FINER: Final = 2 ** (np.array([-6, -4, -3, -2, -1, 1, 2, 3, 4, 6]) / 8)
# Of the caps within this share of the fastest, the highest: collating, copies and logging, which
# the time does not contain, come with each micro-batch. 22 micro-batches became 17, 45 became 32.
_NEARLY: Final = 1.01
_SURVEY: Final = 512  # samples that decide the strips of several axes
# A smaller gain than this is checked: the windows are dealt with the cap and without it. With a cap
# that was estimated to be faster, dealt windows were up to 0.9 % slower than full ones.
_SURE: Final = 0.05

Sized: TypeAlias = tuple[npt.NDArray[Any], Labels]


def with_least_time(rules: BatchRules, windows: Sequence[Sized], ranks: Dealing) -> BatchRules:
    """Rules with the cap on time under which windows take the least time, and with its strips.

    The time of a window is that of its slowest rank; if ranks wait for each other every round, the
    sum over its rounds of the slowest one's. Rules without a time get that of a measured cost.

    Args:
        rules: of a micro-batch, without a cap on time.
        windows: sizes of some windows' samples, shape `(S,)` or `(S, d)`, and their labels.
        ranks: that share each window.

    Returns:
        The same rules where no cap is faster, or none can be: there is no time, single samples take
        no longer than together, or micro-batches are packed or have given shapes.
    """
    cost = rules.cost
    if rules.time is None and isinstance(cost, MeasuredCost):
        # Full steps would be made in the way of the least bytes: ways without a time are an error.
        needs_time = isinstance(cost, WaysCost) and ranks.even_sums
        rules = replace(rules, time=cost.time if cost.seconds or needs_time else None)
    if rules.time is None or rules.packing is not None or rules.max_shapes is not None:
        return rules
    sizes = np.concatenate([sizes for sizes, _ in windows])
    # A step of a million samples has few different lengths, whose costs take little memory.
    every = rules.padded(np.unique(sizes) if sizes.ndim == 1 else sizes)
    one, two = (rules.time.batch_bytes(n, every) for n in (1, 2))
    if (2 * one <= two).all():
        return rules
    timed, least_each = rules, int(one.min())
    cap, gain = _fastest(timed, windows, ranks, least_each)
    if every.ndim > 1 and cap is not None:  # how many strips are best depends on the cap
        some = every[:: max(len(every) // _SURVEY, 1)]
        timed = replace(rules, strips=best_strips(some, replace(rules, most_time=cap)))
        cap, gain = _fastest(timed, windows, ranks, least_each)
    if cap is None:
        return rules
    timed = replace(timed, most_time=cap)
    if gain < _SURE:
        with suppress(UnevenRanksError):  # of which the plan tells where it comes to the window
            full = _solved_time(rules, windows, ranks)
            if full <= _NEARLY * _solved_time(timed, windows, ranks):
                return rules
    return timed


def _fastest(
    rules: BatchRules, windows: Sequence[Sized], ranks: Dealing, least_each: int
) -> tuple[int | None, float]:
    """The cap under which windows take the least time, `None` if none is faster, and what it gains.

    Dealing evens out the ranks, so the time of a window is estimated as the mean of their sums, to
    which each micro-batch that fills the last round up adds the time of the shortest sample.
    """

    def arranged(rules: BatchRules) -> list[Windows]:
        return [arranged_windows(sizes[None], rules, labels, ranks) for sizes, labels in windows]

    def work_under(cap: int, windows: Sequence[Windows]) -> list[IntArray]:
        return [work_of_runs(window, window.cut(np.array([cap])))[0] for window in windows]

    def time_of(work: IntArray, window: Windows) -> float:
        if not ranks.even_sums:
            return float(np.sort(work)[:: -ranks.number].sum())
        more = -len(work) % ranks.together
        if len(work) + more > len(window.firsts):  # so many cannot be dealt
            return math.inf
        return float(max((work.sum() + more * least_each) / ranks.number, work.max()))

    def total(works: Sequence[IntArray]) -> float:
        times = zip(map(time_of, works, timed), whole_times, strict=True)
        # A window that cannot be dealt has no cap.
        return sum(whole if time == math.inf else time for time, whole in times)

    untimed = arranged(rules)
    full = work_under(rules.budget_bytes, untimed)
    whole_times = [*map(time_of, full, untimed)]
    top = int(max(work.max() for work in full))
    times = {top: sum(whole_times)}
    timed = arranged(replace(rules, most_time=top))
    cap, rounds = top // 2, 0
    while cap and rounds * least_each < min(times.values()):  # lower caps make more rounds
        works = work_under(cap, timed)
        times[cap], rounds = total(works), sum(map(len, works)) // ranks.number
        cap //= 2
    best = min(times, key=times.__getitem__)
    for finer in _FINER:
        cap = min(max(round(best * finer), 1), top)
        times[cap] = total(work_under(cap, timed))
    least = min(times.values())
    nearly = [cap for cap, time in times.items() if time <= _NEARLY * least]
    return (None if top in nearly else max(nearly)), 1 - least / times[top]


def _solved_time(rules: BatchRules, windows: Sequence[Sized], ranks: Dealing) -> int:
    """The time of windows as they are dealt, in the unit of `rules.time`."""
    total = 0
    for sizes, labels in windows:
        block = solve(rules, sizes[None], ranks, labels=labels)
        work = block.costs(rules, rules.work).reshape(-1, ranks.number)
        total += int(work.sum(axis=0).max() if ranks.even_sums else work.max(axis=1).sum())
    return total
