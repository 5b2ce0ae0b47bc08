"""Windows: put into an order in which neighbours are alike, and cut into the longest runs that fit.

Along one axis the first sample of a run alone decides how long the run may be, so a window is cut
by following jumps from start to start.

Along several axes the padded size of a run is the maximum over it on every axis, and its longest
length is found by bounds from both sides.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.plan.groups import NO_LABELS, Labels
from torchbudget.plan.rules import BatchRules

# Rows with at least this many keys are faster by radix sort: 4 ns a key instead of 16 at 4,096
# keys, but 7 instead of 2 at 64 (AMD EPYC, NumPy 2.4).
_RADIX: Final = 512
# Lockstep was measured faster if windows times samples per micro-batch are at least this.
LOCKSTEP: Final = 800


def ascending(keys: npt.NDArray[np.integer[Any]]) -> IntArray:
    """A stable argsort of each row of non-negative keys, shape `(rows, S)`.

    Keys below 2¹⁶ are sorted by NumPy's radix sort, whose tables pay off unless rows are short.
    Otherwise key and position are sorted as one number: NumPy's vectorised sort is several times as
    fast as an argsort. The number has 32 bits if they suffice. Rows of 64 to 262,144 keys took 1/18
    to 1/1.6 of the time of `np.argsort(keys, axis=1, kind="stable")` in int64.
    """
    length = keys.shape[1]
    bits = max(length - 1, 1).bit_length()
    largest = int(keys.max(initial=0))
    if largest >= 2 ** (63 - bits) or (largest < 2**16 and length >= _RADIX):
        narrow = keys.astype(np.min_scalar_type(largest), copy=False)
        return np.argsort(narrow, axis=1, kind="stable")
    width = np.uint32 if largest < 2 ** (32 - bits) else np.uint64
    joined = keys.astype(width)
    np.left_shift(joined, width(bits), out=joined)
    np.bitwise_or(joined, np.arange(length, dtype=width), out=joined)
    joined.sort(axis=1)
    np.bitwise_and(joined, width(2**bits - 1), out=joined)
    return joined.astype(np.int64)


def arrange(sizes: npt.NDArray[Any], strips: int) -> IntArray:
    """The order in which the samples of a window are cut, so that neighbours are alike.

    One axis: by size, descending; samples of one size stay in their order.

    Several axes: by strips, as Leutenegger's sort-tile-recursive packing of R-trees does ("STR: a
    simple and efficient algorithm for R-tree packing", 1997). The samples are sorted by the first
    axis and cut into `strips` equal strips; each strip is arranged by the remaining axes, every
    second one backwards, so that neighbours across a strip's border are alike too.

    Args:
        sizes: shape `(windows, S)` or `(windows, S, d)`, non-negative.
        strips: for several axes, the number of strips that an axis is cut into.

    Returns:
        Positions within the window, shape `(windows, S)`. O(windows·S·d·log S).
    """
    if sizes.ndim == 2:
        return ascending(sizes.max(initial=0) - sizes)
    windows, length, axes = sizes.shape
    order = ascending(sizes[..., 0].max(initial=0) - sizes[..., 0])
    for axis in range(1, axes):
        lengths = sizes[..., axis]
        span = int(lengths.max(initial=0)) + 1
        # The rank within the window decides the strip: strips are equal in number of samples, and
        # a tile of an outer axis is split into strips of its own.
        each = math.ceil(length / strips**axis)
        # Half the width is half the memory that passes through the caches.
        width = np.min_scalar_type(-(-length // each) * span).type
        tile = np.empty((windows, length), width)
        np.put_along_axis(tile, order, (np.arange(length) // each)[None].astype(width), 1)
        keys = lengths.astype(width)
        np.subtract(width(span - 1), keys, out=keys, where=tile % 2 == 0)
        tile *= width(span)
        tile += keys
        order = ascending(tile)
    return order


class Windows(ABC):
    """Windows of one length, arranged once, to be cut under any budget.

    Args:
        sizes: shape `(windows, S)` or `(windows, S, d)`.
        order: order of the samples in each window, shape `(windows, S)`.
        rules: budget and options of a micro-batch.
        labels: of the samples of a single window: no run has two groups, nor a part of a unit that
            stays in one micro-batch.

    Attributes:
        samples: places in the given sizes, window after window, group after group, shape
            `(windows·S,)`.
        sizes: sizes of those samples, in the shape that was given.
        groups: number of each sample's group, by its place; `None`: all are alike.
        units: number of each sample's unit, by its place; `None`: each sample is one.
        reach: samples of a run from each sample on at the most, by summed limits and by its
            group's end, shape `(windows, S)`; `None`: any number, or packed samples.
    """

    def __init__(
        self,
        sizes: npt.NDArray[Any],
        order: IntArray,
        rules: BatchRules,
        labels: Labels = NO_LABELS,
    ) -> None:
        windows, self.length = sizes.shape[:2]
        self.rules, self.groups = rules, labels.groups
        self.units = labels.units if labels.whole else None
        if self.groups is not None:
            order = order[:, np.argsort(self.groups[order[0]], kind="stable")]
        if self.units is not None:  # each of them stands where the first of its samples does
            _, first, unit = np.unique(self.units[order[0]], return_index=True, return_inverse=True)
            order = order[:, np.argsort(first[unit], kind="stable")]
        self.samples = (order + np.arange(windows)[:, None] * self.length).reshape(-1)
        flat = sizes.reshape(windows * self.length, *sizes.shape[2:])
        self.sizes = flat.take(self.samples, axis=0, mode="clip").reshape(sizes.shape)
        self.reach = rules.longest_summed(self.sizes) if rules.packing is None else None
        if self.groups is not None:
            mine = self.groups[self.samples]
            left = np.searchsorted(mine, mine, side="right") - np.arange(self.length)
            self.reach = left[None] if self.reach is None else np.minimum(self.reach, left)

    @abstractmethod
    def cut(self, budgets: IntArray) -> list[IntArray]:
        """The starts of the micro-batches of each window, ascending from 0.

        Args:
            budgets: bytes, shape `(windows,)`.
        """

    @property
    def firsts(self) -> IntArray:
        """Places at which a run may start, ascending from 0: those of a window's units."""
        if self.units is None:
            return np.arange(self.length)
        return np.flatnonzero(np.diff(self.units[self.samples], prepend=-1))

    def ended(self, at: IntArray, runs: IntArray) -> IntArray:
        """Runs from `at` on, shortened to where one may end; shapes `(k,)`."""
        runs = self.rules.rounded(runs)
        if self.units is None:
            return runs
        ends = np.append(self.firsts, self.length)
        stops = at + np.minimum(runs, self.length - at)
        stops = ends[np.searchsorted(ends, stops, side="right") - 1]
        least = ends[np.minimum(np.searchsorted(ends, at, side="right"), len(ends) - 1)]
        # A unit that exceeds the budget stands alone.
        shortened: IntArray = np.maximum(stops, least) - at
        return shortened


class SortedWindows(Windows):
    """Windows of one axis, sorted by size, descending.

    Args:
        sizes: shape `(windows, S)`.
        rules: budget and options of a micro-batch.
        labels: see `Windows`.

    A cut takes O(distinct sizes) in NumPy and O(micro-batches) in Python.
    """

    def __init__(
        self, sizes: npt.NDArray[Any], rules: BatchRules, labels: Labels = NO_LABELS
    ) -> None:
        super().__init__(sizes, arrange(sizes, 1), rules, labels)
        # Along one axis capacities under the whole budget are looked up by size.
        self._table = rules.table(int(sizes.max()))
        self._kinds: list[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]] = []

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """See `Windows.cut`."""
        return [np.array(self.starts(row, one)) for row, one in enumerate(budgets.tolist())]

    def starts(self, row: int, budget: int) -> list[int]:
        """The starts of the micro-batches of one window under a budget."""
        starts = jumps(*self._longest(row, budget), self.length)
        # The last run ends with the window, and its length need not be a multiple.
        last = self.length - starts[-1]
        rest = last - int(self.rules.rounded(np.array(last)))
        return [*starts, self.length - rest] if rest else starts

    def _longest(self, row: int, budget: int) -> tuple[Sequence[int], Sequence[int]]:
        """Each sample's kind, and the longest run that may begin with a sample of each kind."""
        rules = self.rules
        if self._table is not None and budget == rules.lowered.amount:
            which, most = self.sizes[row], self._table
        else:
            values, which = self._kinds_of(row)
            most = rules.rounded(rules.capacity(values, budget))
        if self.reach is None and self.units is None:
            return which.data, most.data
        # A run with a sum, or with units, depends on each of its samples, so each sample is a kind.
        runs = np.minimum(most[which], self.length if self.reach is None else self.reach[row])
        return range(self.length), self.ended(np.arange(self.length), runs).data

    def _kinds_of(self, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """The distinct sizes of a window, and each sample's number among them."""
        if not self._kinds:
            for sizes in self.sizes:
                new = np.append(False, sizes[1:] != sizes[:-1])
                which = np.cumsum(new, dtype=np.int32)  # half the memory of the default
                self._kinds.append((sizes[np.append(0, np.flatnonzero(new))], which))
        return self._kinds[row]


def jumps(which: Sequence[int], most: Sequence[int], length: int, together: int = 1) -> list[int]:
    """Starts of runs, each as long as its first sample allows; the last one may end past `length`.

    A run is that of `together` micro-batches.

    A plain loop: NumPy has nothing that follows a chain, and an epoch has far fewer runs than
    samples.
    """
    starts = []
    start = 0
    while start < length:
        starts.append(start)
        start += most[which[start]] * together
    return starts


class TiledWindows(Windows):
    """Windows of several axes, arranged so that neighbours are alike.

    A run of n samples whose padded size has the capacity c fits if c ≥ n. Otherwise its first c
    samples fit, since they are padded to no more, and at most n − 1. So each trial bounds the
    longest run from both sides.

    The maximum over any run is the maximum of two runs whose length is a power of two, which are
    kept: O(windows·S·d·log(longest run)) memory.

    Args:
        sizes: shape `(windows, S, d)`.
        order: order of the samples in each window, shape `(windows, S)`: see `arrange`.
        rules: budget and options of a micro-batch.
        labels: see `Windows`.
    """

    def __init__(
        self,
        sizes: npt.NDArray[Any],
        order: IntArray,
        rules: BatchRules,
        labels: Labels = NO_LABELS,
    ) -> None:
        super().__init__(sizes, order, rules, labels)
        axes = range(sizes.shape[2])
        smallest = np.array([self.sizes[..., axis].min() for axis in axes])
        self._longest = min(int(rules.capacity(smallest, rules.lowered.amount)), self.length)
        self._usual = float(rules.alike(self.sizes[:, self.length // 2]).mean())
        levels = self._longest.bit_length()
        # Narrow numbers are a quarter of the memory that passes through the caches.
        narrow = np.uint16 if self.sizes.max() < 2**16 else np.int64
        self._maxima = np.empty((levels, *self.sizes.shape), narrow)
        self._maxima[0] = self.sizes
        self._levels = 1  # levels that are filled in: most cuts need a few

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """See `Windows.cut`."""
        # Both ways return the same: in lockstep each call of NumPy is on one sample of each window,
        # otherwise on all samples of one window. 64 to 2,048 windows took 1/17 to 1/265 of the time
        # in lockstep; 1 to 4 windows of 4,096 samples took 1.6 to 2.4 times as long.
        if len(budgets) * self._usual >= LOCKSTEP:
            return [starts[starts < self.length] for starts in self._lockstep(budgets).T]
        return [np.array(self._starts(row, budget)) for row, budget in enumerate(budgets.tolist())]

    def _starts(self, row: int, budget: int) -> list[int]:
        """Cut one window: the longest run from every sample on, and the chain through them."""
        left = self.length - np.arange(self.length)
        at = row * self.length + np.arange(self.length)
        low = np.ones_like(left)
        high = tried = np.minimum(left, self._most(at))
        runs = np.empty_like(left)
        while at.size:
            low, high = self._bounds(at, tried, low, high, budget)
            found = low >= high
            runs[at[found] - row * self.length] = low[found]
            at, low, high = at[~found], low[~found], high[~found]
            tried = (low + high + 1) // 2
        runs = self.ended(np.arange(self.length), runs)
        return jumps(range(self.length), runs.data, self.length)

    def _lockstep(self, budgets: IntArray) -> IntArray:
        """Starts in all windows, ascending, shape `(trials, windows)`; S if none was found.

        The first guess at a run is the run before it, the second one the capacity of the first.
        Each window goes on to its next run as soon as it knows the last one.
        """
        length = self.length
        first = np.arange(len(budgets)) * length
        start = np.zeros_like(first)
        found = np.ones_like(first, np.bool_)
        low = tried = run = np.ones_like(first)
        high = self._most(first)
        starts = [start]
        while True:
            at = first + np.minimum(start, length - 1)
            low, high = self._bounds(at, tried, low, high, budgets)
            guessed, found = found, low >= high
            if found.any():
                run = np.where(found, self.ended(start, low), run)
                # A window that is done stays at its end.
                start = np.where(found, np.minimum(start + run, length), start)
                starts.append(np.where(found, start, length))
                left = length - start
                if not left.any():
                    return np.array(starts)
                low = np.where(found, 1, low)
                most = self._most(first + np.minimum(start, length - 1))
                high = np.where(found, np.minimum(np.maximum(left, 1), most), high)
            tried = np.where(guessed, high, (low + high + 1) // 2)
            tried = np.where(found, np.minimum(run, high), tried)

    def _most(self, at: IntArray) -> IntArray:
        """Bounds on the longest runs from `at` on, by the smallest sample and `reach`."""
        most = np.full_like(at, self._longest)
        return most if self.reach is None else np.minimum(most, self.reach.reshape(-1)[at])

    def _bounds(
        self, at: IntArray, tried: IntArray, low: IntArray, high: IntArray, budget: IntArray | int
    ) -> tuple[IntArray, IntArray]:
        """Bounds on the longest runs from `at` on, closer by the runs tried; shapes `(k,)`."""
        capacity = self.rules.capacity(self._maximum(at, tried), budget)
        above = np.where(capacity < tried, tried - 1, capacity)
        return np.maximum(low, np.minimum(capacity, tried)), np.minimum(high, above)

    def _maximum(self, at: IntArray, runs: IntArray) -> npt.NDArray[Any]:
        """The maximum over `runs` samples from `at` on, on every axis, shape `(k, d)`."""
        level = np.frexp(runs)[1] - 1  # the largest power of two within the run
        while self._levels <= level.max():
            reach = 2 ** (self._levels - 1)
            narrow, wide = self._maxima[self._levels - 1 : self._levels + 1]
            np.maximum(narrow[:, :-reach], narrow[:, reach:], out=wide[:, :-reach])
            wide[:, -reach:] = narrow[:, -reach:]
            self._levels += 1
        flat = self._maxima.reshape(-1, self._maxima.shape[3])
        row = level * (self.sizes.shape[0] * self.length) + at
        one = flat.take(row, axis=0)
        other = flat.take(row + runs - (1 << level), axis=0)
        longest: IntArray = np.maximum(one, other).astype(np.int64)
        return longest
