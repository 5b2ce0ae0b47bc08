"""Cutting sorted windows into micro-batches: each is the longest run that fits.

Along one axis the first sample of a run alone decides how long the run may be, so a window is cut
by following jumps from start to start. One run gets what the others leave: of all places between
the longest and the shortest samples it has the one where the window is padded least.

Along several axes the padded size of a run is the maximum over it on every axis, and how long it
may be is found by bounding it from both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.plan.arrange import arrange
from torchbudget.plan.rules import BatchRules

# Windows times samples of a micro-batch from which on lockstep is faster, as measured.
LOCKSTEP: Final = 800
# Runs of a window beyond which the short one is too little of it to be worth a microsecond a run:
# of 520, where it was did not matter to a hundredth of a percent of padding.
_MOST_RUNS: Final = 256


class Windows(ABC):
    """Windows of one length, arranged once, to be cut under any budget.

    Args:
        sizes: shape `(windows, S)` or `(windows, S, d)`.
        order: of the samples in each window, shape `(windows, S)`.
        rules: what a micro-batch may be.

    Attributes:
        samples: places in the given sizes, window after window, shape `(windows·S,)`.
        sizes: of those samples, in the shape that was given.
    """

    def __init__(self, sizes: npt.NDArray[Any], order: IntArray, rules: BatchRules) -> None:
        windows, self.length = sizes.shape[:2]
        self.rules = rules
        self.samples = (order + np.arange(windows)[:, None] * self.length).reshape(-1)
        flat = sizes.reshape(windows * self.length, *sizes.shape[2:])
        self.sizes = flat.take(self.samples, axis=0, mode="clip").reshape(sizes.shape)

    @abstractmethod
    def cut(self, budgets: IntArray) -> list[IntArray]:
        """Where the micro-batches of each window start, ascending from 0.

        Args:
            budgets: bytes, shape `(windows,)`.
        """

    def least_padded(self, row: int, starts: IntArray) -> IntArray:
        """As many runs of a window that was cut under the whole budget, with less padding.

        As they are, where no order tells which run had better be the short one.
        """
        return starts

    def least(self, micro_batches: IntArray) -> IntArray:
        """Bytes below which no budget gives so few micro-batches; both of shape `(windows,)`.

        0, as nothing is known of padded batches.
        """
        return np.zeros_like(micro_batches)


class SortedWindows(Windows):
    """Windows of one axis, sorted by size, descending.

    Args:
        sizes: shape `(windows, S)`.
        rules: what a micro-batch may be.

    A cut takes O(distinct sizes) in NumPy and O(micro-batches) in Python.
    """

    def __init__(self, sizes: npt.NDArray[Any], rules: BatchRules) -> None:
        super().__init__(sizes, arrange(sizes, 1), rules)
        # Along one axis capacities under the whole budget are looked up by size.
        self._table = rules.table(int(self.sizes[:, 0].max()))
        self._kinds: list[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]] = []

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """See `Windows.cut`."""
        return [np.array(self.starts(row, one)) for row, one in enumerate(budgets.tolist())]

    def starts(self, row: int, budget: int) -> list[int]:
        """Where the micro-batches of one window start under a budget."""
        starts = _jumps(*self._longest(row, budget), self.length)
        # The last run ends with the window, where its length need not be a multiple.
        last = self.length - starts[-1]
        rest = last - int(self.rules.rounded(np.array(last)))
        return [*starts, self.length - rest] if rest else starts

    def least_padded(self, row: int, starts: IntArray) -> IntArray:
        """See `Windows.least_padded`; as they are also where lengths are to be multiples."""
        if self.rules.batch_size_multiple > 1 or len(starts) > _MOST_RUNS:
            return starts
        which, most = self._longest(row, self.rules.budget_bytes)
        sizes, multiple = self.sizes[row].data, self.rules.size_multiple
        return np.array(_least_padded(which, most, sizes, multiple, starts.tolist()))

    def _longest(self, row: int, budget: int) -> tuple[Sequence[int], Sequence[int]]:
        """Each sample's kind, and by kind how long a run may be whose first sample it is."""
        rules = self.rules
        if self._table is not None and budget == rules.budget_bytes:
            return self.sizes[row].data, self._table.data
        values, which = self._kinds_of(row)
        return which.data, rules.rounded(rules.capacity(values, budget)).data

    def _kinds_of(self, row: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """The distinct sizes of a window, and which of them each sample has."""
        if not self._kinds:
            for sizes in self.sizes:
                new = np.append(False, sizes[1:] != sizes[:-1])
                which = np.cumsum(new, dtype=np.int32)  # half the memory of the default
                self._kinds.append((sizes[np.append(0, np.flatnonzero(new))], which))
        return self._kinds[row]


def _jumps(which: Sequence[int], most: Sequence[int], length: int) -> list[int]:
    """Starts of runs, each as long as its first sample allows; the last one may end past `length`.

    A plain loop: NumPy has nothing that follows a chain, and an epoch has far fewer runs than
    samples.
    """
    starts = []
    start = 0
    while start < length:
        starts.append(start)
        start += most[which[start]]
    return starts


def _least_padded(
    which: Sequence[int],
    most: Sequence[int],
    sizes: Sequence[int],
    multiple: int,
    starts: list[int],
) -> list[int]:
    """As many runs as those of `_jumps`, of which the short one is where padding is least.

    Cut from the end on, each run is as long as its last sample allows. It ends no later than that
    of `starts`, so that it starts no later, and after the one before, which did not reach so far:
    there are as many runs, and the short one is the first. With any number of runs from the
    beginning of `starts`, and the others from the end on, it lies between them. No run is longer
    than its shortest sample has the capacity for, nor need it be shorter than its longest one has:
    where neighbours are alike these bounds all but meet. O(log(longest run)) for a run.
    """
    moved = starts.copy()
    stop = len(sizes)
    from_end = len(starts)  # runs from this one on are those from the end
    padding = least = 0  # beyond that of `starts`
    longest = -(-sizes[starts[-1]] // multiple) * multiple
    for number in range(len(starts) - 1, 0, -1):
        before, start = starts[number - 1], starts[number]
        low, high = max(stop - most[which[stop - 1]], before + 1), start
        bound = stop - most[which[low]]
        if low < bound < high:
            allowed = stop - most[which[bound]]
            if allowed <= bound:  # as of every monotone cost
                low, high = max(low, allowed), bound
        while low < high:
            middle = (low + high) // 2
            if middle + most[which[middle]] >= stop:
                high = middle
            else:
                low = middle + 1
        if high == start:
            break  # and so would be all before it
        # What moves from the run before to this one, whose own samples may pad to more then.
        padding += (stop - high) * (-(-sizes[high] // multiple) * multiple)
        padding -= (stop - start) * longest
        longest = -(-sizes[before] // multiple) * multiple
        padding -= (start - high) * longest
        moved[number] = stop = high
        if padding < least:
            least, from_end = padding, number
    return starts[:from_end] + moved[from_end:]


class TiledWindows(Windows):
    """Windows of several axes, arranged so that neighbours are alike.

    A run of n samples that has the capacity c fits if c ≥ n. Otherwise c samples do, since they
    pad to no more; and never more than c. So each trial bounds the longest run from both sides.

    The maximum over any run is that of two runs of a power of two in length, which are kept:
    O(windows·S·d·log(longest run)) memory.

    Args:
        sizes: shape `(windows, S, d)`.
        order: of the samples in each window, shape `(windows, S)`: see `arrange`.
        rules: what a micro-batch may be.
    """

    def __init__(self, sizes: npt.NDArray[Any], order: IntArray, rules: BatchRules) -> None:
        super().__init__(sizes, order, rules)
        axes = range(sizes.shape[2])
        smallest = np.array([self.sizes[..., axis].min() for axis in axes])
        self._longest = min(int(rules.capacity(smallest, rules.budget_bytes)), self.length)
        middle = self.sizes[:, self.length // 2]
        self._usual = float(rules.capacity(middle, rules.budget_bytes).mean())
        levels = self._longest.bit_length()
        # Narrow numbers are a quarter of the memory that passes through the caches.
        narrow = np.uint16 if self.sizes.max() < 2**16 else np.int64
        self._maxima = np.empty((levels, *self.sizes.shape), narrow)
        self._maxima[0] = self.sizes
        self._levels = 1  # those that are filled in: most cuts need a few

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """See `Windows.cut`."""
        # Both give the same: in lockstep each call of NumPy is on one sample of each window,
        # otherwise on all samples of one.
        if len(budgets) * self._usual >= LOCKSTEP:
            return [starts[starts < self.length] for starts in self._lockstep(budgets).T]
        return [np.array(self._starts(row, budget)) for row, budget in enumerate(budgets.tolist())]

    def _starts(self, row: int, budget: int) -> list[int]:
        """Cut one window: the longest run from every sample on, and the chain through them."""
        left = self.length - np.arange(self.length)
        at = row * self.length + np.arange(self.length)
        low = np.ones_like(left)
        high = tried = np.minimum(left, self._longest)
        runs = np.empty_like(left)
        while at.size:
            low, high = self._bounds(at, tried, low, high, budget)
            found = low >= high
            runs[at[found] - row * self.length] = low[found]
            at, low, high = at[~found], low[~found], high[~found]
            tried = (low + high + 1) // 2
        return _jumps(range(self.length), self.rules.rounded(runs).data, self.length)

    def _lockstep(self, budgets: IntArray) -> IntArray:
        """Starts in all windows, ascending, shape `(trials, windows)`; S where none was found.

        A run's first guess is the one before it, the next one what that has the capacity for. Every
        window goes on to its next run as soon as it knows the last one, whatever the others do.
        """
        length = self.length
        first = np.arange(len(budgets)) * length
        start = np.zeros_like(first)
        found = np.ones_like(first, np.bool_)
        low = tried = run = np.ones_like(first)
        high = np.full_like(first, self._longest)
        starts = [start]
        while True:
            at = first + np.minimum(start, length - 1)
            low, high = self._bounds(at, tried, low, high, budgets)
            guessed, found = found, low >= high
            if found.any():
                run = np.where(found, self.rules.rounded(low), run)
                # A window that is done stays at its end.
                start = np.where(found, np.minimum(start + run, length), start)
                starts.append(np.where(found, start, length))
                left = length - start
                if not left.any():
                    return np.array(starts)
                low = np.where(found, 1, low)
                high = np.where(found, np.minimum(np.maximum(left, 1), self._longest), high)
            tried = np.where(guessed, high, (low + high + 1) // 2)
            tried = np.where(found, np.minimum(run, high), tried)

    def _bounds(
        self, at: IntArray, tried: IntArray, low: IntArray, high: IntArray, budget: IntArray | int
    ) -> tuple[IntArray, IntArray]:
        """Bounds on the longest runs from `at` on, closer by runs that are tried; shapes `(k,)`."""
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
