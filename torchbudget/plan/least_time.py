"""The cap on the time of a micro-batch under which given samples take the least time.

Where a window's samples are given, as those of one optimizer step, full micro-batches are seldom
the fastest: each is padded to its longest sample. Short ones pad less, but each takes the time that
a micro-batch takes at least. So micro-batches keep a cap on their time beside the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measured import MeasuredCost
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
# A smaller gain is looked for among windows as they are dealt: they were up to 0.9 % slower.
_SURE: Final = 0.05

Sized: TypeAlias = tuple[npt.NDArray[Any], Labels]


def with_least_time(
    rules: BatchRules, windows: Sequence[Sized], ranks: Dealing, strips: int
) -> tuple[BatchRules, int]:
    """Rules with the cap on time under which windows take the least time, and strips to cut by.

    The time of a window is that of its slowest rank; if ranks wait for each other every round, the
    sum over its rounds of the slowest one's.

    A measured cost has a time of its own, for rules that have none.

    Args:
        rules: of a micro-batch, without a cap on time.
        windows: sizes of some windows' samples, shape `(S,)` or `(S, d)`, and their labels.
        ranks: that share each window.
        strips: that are best for full micro-batches.

    Returns:
        The same rules and strips where no cap is faster, or none can be: there is no time, single
        samples take no longer than together, or micro-batches are packed or have given shapes.
    """
    if rules.time is None and isinstance(rules.cost, MeasuredCost) and rules.cost.seconds:
        rules = replace(rules, time=rules.cost.time)
    if rules.time is None or rules.packing is not None or rules.max_shapes is not None:
        return rules, strips
    every = rules.padded(np.concatenate([sizes for sizes, _ in windows]))
    one, two = (rules.time.batch_bytes(n, every) for n in (1, 2))
    if (2 * one <= two).all():
        return rules, strips
    fastest = partial(_fastest, rules, windows, ranks, int(one.min()))
    cap, gain = fastest(strips)
    if every.ndim > 1 and cap is not None:  # how many strips are best depends on the cap
        strips = best_strips(windows[0][0], replace(rules, most_time=cap))
        cap, gain = fastest(strips)
    timed = replace(rules, most_time=cap)
    if gain < _SURE:
        with suppress(UnevenRanksError):  # of which the plan tells where it comes to the window
            full, capped = (_solved_time(one, windows, ranks, strips) for one in (rules, timed))
            return rules if full <= _NEARLY * capped else timed, strips
    return timed, strips


def _fastest(
    rules: BatchRules, windows: Sequence[Sized], ranks: Dealing, least_each: int, strips: int
) -> tuple[int | None, float]:
    """The cap under which windows take the least time, `None` if none is faster, and what it gains.

    Dealing evens out the ranks, so the time of a window is estimated as the mean of their sums, to
    which each micro-batch that fills the last round up adds the time of the shortest sample.
    """

    def arranged(rules: BatchRules) -> list[Windows]:
        each = partial(arranged_windows, rules=rules, strips=strips, ranks=ranks)
        return [each(sizes[None], labels=labels) for sizes, labels in windows]

    def work_under(cap: int, arranged: Sequence[Windows]) -> list[IntArray]:
        return [work_of_runs(window, window.cut(np.array([cap])))[0] for window in arranged]

    def time_of(work: IntArray) -> float:
        if not ranks.even_sums:
            return float(np.sort(work)[:: -ranks.number].sum())
        more = -len(work) % ranks.together * least_each
        return float(max((work.sum() + more) / ranks.number, work.max()))

    full = work_under(rules.budget_bytes, arranged(rules))
    top = int(max(work.max() for work in full))
    times = {top: sum(map(time_of, full))}
    timed = arranged(replace(rules, most_time=top))
    cap, rounds = top // 2, 0
    while cap and rounds * least_each < min(times.values()):  # lower caps make more rounds
        works = work_under(cap, timed)
        times[cap], rounds = sum(map(time_of, works)), sum(map(len, works)) // ranks.number
        cap //= 2
    best = min(times, key=times.__getitem__)
    for finer in _FINER:
        cap = min(max(round(best * finer), 1), top)
        times[cap] = sum(map(time_of, work_under(cap, timed)))
    least = min(times.values())
    nearly = [cap for cap, time in times.items() if time <= _NEARLY * least]
    return (None if top in nearly else max(nearly)), 1 - least / times[top]


def _solved_time(rules: BatchRules, windows: Sequence[Sized], ranks: Dealing, strips: int) -> float:
    """The time of windows as they are dealt, in the unit of `rules.time`."""
    total = 0.0
    for sizes, labels in windows:
        block = solve(rules, sizes[None], ranks, strips=strips, labels=labels)
        work = block.costs(rules, rules.work).reshape(-1, ranks.number).astype(float)
        total += float(work.sum(axis=0).max() if ranks.even_sums else work.max(axis=1).sum())
    return total
