"""Few static shapes: chosen for the sizes and the budget, and windows cut into batches of them.

A batch of the shape (n, L) takes samples of up to L, and of shorter ones where those are too few.
Where a window ends, rows are missing, which the collate masks. Ranks see one shape at a time: a
round is one run of the sorted window, of which rank r takes every R-th sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.checks import is_int
from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cut import SortedWindows, jumps
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.groups import Labels
from torchbudget.plan.pack import grouped_by
from torchbudget.plan.rules import BatchRules

# Most lengths that are compared for shapes. 4,096 of them take up to 30 times as long and gain
# less than 0.01 % of the batches (a million log-normal or uniform sizes, budgets of 2²⁰ and 2²⁴).
_CANDIDATES: Final = 1024


def fitted(rules: BatchRules, sizes: npt.NDArray[Any], skipped: IntArray) -> BatchRules:
    """The rules with the best shapes for sizes, if `max_shapes` is a number of shapes.

    Args:
        rules: of a micro-batch.
        sizes: of all samples, shape `(N,)`.
        skipped: indices of the samples that are not drawn; every other one fits the budget.

    Raises:
        OptionError: sizes of several axes.
    """
    number = rules.max_shapes
    if number is not None and sizes.ndim > 1:
        raise OptionError(f"max_shapes needs sizes of one axis, got sizes of {sizes.shape[1]} axes")
    if not is_int(number):
        return rules
    padded = rules.padded(np.delete(sizes, skipped))
    lengths, counts = np.unique(padded, return_counts=True)
    fits = np.minimum(rules.capacity(lengths, rules.budget_bytes), len(padded))
    fits = np.minimum.accumulate(fits)
    # Among lengths with equal capacities, the longest takes the samples of all.
    last = np.flatnonzero(np.append(fits[1:] < fits[:-1], True))
    chosen = last[_fewest_batches(np.cumsum(counts)[last], fits[last], number)]
    shapes = zip(fits[chosen].tolist(), lengths[chosen].tolist(), strict=True)
    return replace(rules, max_shapes=tuple(shapes))


def _fewest_batches(before: IntArray, fits: IntArray, number: int) -> IntArray:
    """The candidates whose batches are the fewest, the last one included.

    A sample takes 1/fits of a batch of the first chosen candidate that is no shorter: a shortest
    path of `number` edges.

    Args:
        before: samples that are no longer than each candidate, shape `(V,)`, ascending.
        fits: samples of a batch of its length, `(V,)`, descending.
        number: of candidates to choose at the most.

    Returns:
        Places of the chosen ones, ascending.
    """
    places = np.arange(len(fits))
    if len(fits) > _CANDIDATES:  # parts of equal numbers of batches
        batches = np.cumsum(np.diff(before, prepend=0) / fits)
        marks = np.linspace(0, batches[-1], _CANDIDATES)
        places = np.unique(np.append(np.searchsorted(batches, marks[:-1]), len(fits) - 1))
        before, fits = before[places], fits[places]
    # Batches of the samples after candidate i − 1, up to candidate j.
    edges = (before - np.append(0, before[:-1])[:, None]) / fits
    edges[np.tril_indices(len(fits), -1)] = np.inf
    best, ways = edges[0], []
    for _ in range(min(number, len(fits)) - 1):
        through = np.append(np.inf, best[:-1])[:, None] + edges
        ways.append(through.argmin(axis=0))
        best = through[ways[-1], np.arange(len(fits))]
    chosen = [len(fits) - 1]
    for way in reversed(ways):
        if not way[chosen[-1]]:
            break
        chosen.append(int(way[chosen[-1]]) - 1)
    return places[chosen[::-1]]


class RoundWindow(SortedWindows):
    """One window of one axis that is cut into rounds, of which rank r takes every R-th sample.

    Args:
        sizes: shape `(1, S)`.
        rules: of a micro-batch.
        ranks: that share the window.
        labels: see `Windows`.
    """

    def __init__(
        self, sizes: npt.NDArray[Any], rules: BatchRules, ranks: Dealing, labels: Labels
    ) -> None:
        super().__init__(sizes, rules, labels)
        self._ranks = ranks.number

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """Cut under the whole budget; `samples` and `sizes` are grouped by micro-batch afterwards.

        Returns:
            Starts of the micro-batches, round by round, in a round rank by rank.

        Raises:
            UnevenRanksError: a round would have several shapes, or no sample for some rank.
        """
        ranks = self._ranks
        which, most = self._longest(0, self.rules.lowered.amount)
        cut = jumps(which, most, self.length, ranks)
        starts = np.array(cut if self.length % ranks == 0 else self._uneven(cut, which, most))
        of_round = np.repeat(np.arange(len(starts)), np.diff(starts, append=self.length))
        of_rank = (np.arange(self.length) - starts[of_round]) % ranks
        order, begins = grouped_by(of_round * ranks + of_rank)
        self.samples, self.sizes = self.samples[order], self.sizes[:, order]
        return [begins]

    def _uneven(self, starts: list[int], which: Sequence[int], most: Sequence[int]) -> list[int]:
        """Starts of rounds; in the last round, some ranks have one sample more.

        Both numbers must take one shape: the fewer must not be the rows of one. So the last round
        takes samples of the round before, or leaves some to another round after it.
        """
        ranks = self._ranks
        few, more = divmod(self.length - starts[-1], ranks)
        rows = {rows for rows, _ in self.rules.shapes}
        before = (starts[-1] - starts[-2]) // ranks - 1 if len(starts) > 1 else 0
        for number in (*range(max(few, 1), few + before + 1), *range(few - 1, 0, -1)):
            start = self.length - number * ranks - more
            if number not in rows and most[which[start]] > number:
                return [*starts[:-1], start] if number >= few else [*starts, start]
        raise UnevenRanksError(
            f"{self.length} samples cannot be split evenly over {ranks} ranks in rounds of one "
            f"shape: use a multiple of {ranks} samples, or a shape with two rows more than the "
            "next longer one; a sampler or stream can drop the rest (drop_last=True)"
        )
