"""Evening out the ranks of a step beyond what dealing whole micro-batches can do."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.plan.cut import SortedWindows
from torchbudget.plan.dealing import deal_steps
from torchbudget.plan.rules import BatchRules

_HALVINGS: Final = 12
# Budgets between the lowest that gives few enough micro-batches and the whole one, under which the
# micro-batches of the longest samples are cut: which one leaves the least uneven, none can tell.
_HEADS: Final = 3


def level(
    windows: SortedWindows, row: int, work: IntArray, most: int, budget: int, ranks: int
) -> tuple[IntArray, IntArray] | None:
    """Fill every rank up to one level with a run of the window's shortest samples.

    The micro-batches of long samples are coarse: where a step has few of them on each rank, no
    dealing makes the ranks even. So all but the last `ranks` runs are dealt, and the samples after
    them are cut anew into one run for each rank, as long as its others leave room for under a
    common level. The lowest level at which all samples have their place is found by bisection.

    Args:
        windows: that were cut.
        row: which of them.
        work: what ranks are balanced by, of each of its micro-batches, shape `(micro-batches,)`.
        most: the sum of the costliest rank, to be lowered.
        budget: the lowered one, under which the window was cut.
        ranks: how many ranks.

    Returns:
        Where the micro-batches start now, and their numbers by round and rank, shape
        `(rounds, ranks)`; `None` where that is no better.
    """
    head = len(work) - ranks
    if not head:
        return None  # one micro-batch each: they are as alike as can be already
    found = None
    for tried in np.linspace(budget, windows.rules.budget_bytes, _HEADS).astype(np.int64).tolist():
        starts = np.array(windows.starts(row, tried)[: head + 1])
        if len(starts) > head and windows.length - starts[head] >= ranks:
            better = _Level(windows.sizes[row], starts, windows.rules, ranks).lowest(most)
            if better is not None:
                most, *found = better
    return None if found is None else (found[0], found[1])


class _Level:
    """A head of micro-batches that are dealt, and a tail that fills the ranks up.

    Args:
        sizes: of the window's samples, descending, shape `(S,)`.
        starts: where the micro-batches of the head start, and where the tail does.
        rules: what a micro-batch may be.
        ranks: how many ranks.
    """

    def __init__(
        self, sizes: npt.NDArray[Any], starts: IntArray, rules: BatchRules, ranks: int
    ) -> None:
        self._sizes, self._starts, self._rules, self._ranks = sizes, starts, rules, ranks
        self._model = rules.cost if rules.balance is None else rules.balance
        head = starts[:-1]
        work = self._model.batch_bytes(np.diff(starts), rules.padded(sizes[head]))
        self._dealt = deal_steps(work[None], ranks)[0]
        self._sums = work[self._dealt].sum(axis=0)
        # The longest samples of the tail go to the rank that has the most room.
        self._order = np.argsort(self._sums, kind="stable")
        tail = sizes[starts[-1] :]
        new = np.append(True, tail[1:] != tail[:-1])
        self._which = np.cumsum(new) - 1
        self._values = rules.padded(tail[new])
        self._fits = rules.capacity(tail[new], rules.budget_bytes)

    def lowest(self, most: int) -> tuple[int, IntArray, IntArray] | None:
        """The lowest level below `most`: the costliest rank's sum, starts and numbers."""
        low, high, best = int(self._sums.max()), most, None
        for _ in range(_HALVINGS):
            middle = (low + high) // 2
            bounds = self._bounds(middle)
            if bounds is None:
                low = middle
            else:
                high, best = middle, bounds
        if best is None:
            return None
        starts = np.append(self._starts[:-1], self._starts[-1] + np.array(best[:-1]))
        counts = np.diff(starts, append=len(self._sizes))
        work = self._model.batch_bytes(counts, self._rules.padded(self._sizes[starts]))
        last = np.empty(self._ranks, np.int64)
        last[self._order] = len(self._starts) - 1 + np.arange(self._ranks)
        rounds = np.vstack([self._dealt, last])
        costliest = int(work[rounds].sum(axis=0).max())
        if costliest >= most:
            return None
        # Rounds again: the g-th costliest of every rank.
        again = np.argsort(-work[rounds], axis=0, kind="stable")
        return costliest, starts, np.take_along_axis(rounds, again, axis=0)

    def _bounds(self, top: int) -> list[int] | None:
        """Where the ranks' runs of the tail start under a level, and its end; `None`: too low."""
        room = self._model.capacity(self._values, (top - self._sums[self._order])[:, None])
        longest = self._rules.rounded(np.maximum(np.minimum(room, self._fits), 1))
        bounds, length = [0], len(self._which)
        for rank in range(self._ranks):
            at = bounds[-1]
            left = length - at - (self._ranks - 1 - rank)  # every later rank has a sample, too
            bounds.append(at + min(int(longest[rank, self._which[at]]), left))
        return bounds if bounds[-1] == length else None
