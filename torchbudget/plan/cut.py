"""Cutting sorted windows into micro-batches: each is the longest run that fits.

Along one axis the first sample of a run alone decides how long the run may be, so a window is cut
by following jumps from start to start. Along several axes the padded size of a run is the maximum
over it on every axis, and how long it may be is found by bounding it from both sides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import AdditiveCost, IntArray
from torchbudget.plan.arrange import arrange, ascending
from torchbudget.plan.rules import BatchRules

# Windows times samples of a micro-batch from which on lockstep is faster, as measured.
LOCKSTEP: Final = 800


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
        rules = self.rules
        if self._table is not None and budget == rules.budget_bytes:
            which, most = self.sizes[row], self._table
        else:
            values, which = self._kinds_of(row)
            most = rules.rounded(rules.capacity(values, budget))
        starts = _jumps(which.data, most.data, self.length)
        # The last run ends with the window, where its length need not be a multiple.
        last = self.length - starts[-1]
        rest = last - int(rules.rounded(np.array(last)))
        return [*starts, self.length - rest] if rest else starts

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


class PackedWindow(Windows):
    """One window whose samples are packed.

    Args:
        sizes: shape `(1, S)` or `(1, S, d)`.
        rules: what a micro-batch may be.
        packing: its cost.
    """

    def __init__(self, sizes: npt.NDArray[Any], rules: BatchRules, packing: AdditiveCost) -> None:
        # Along one axis bytes rise with the size, and are needed of the distinct sizes only.
        keys = sizes if sizes.ndim == 2 else packing.item_bytes(rules.padded(sizes))
        super().__init__(sizes, arrange(keys, 1), rules)
        self._sorted = self.samples, self.sizes
        kinds = keys[0].take(self.samples, mode="clip")
        first = np.flatnonzero(np.append(True, kinds[1:] != kinds[:-1]))
        self._base = packing.base_bytes
        self._items = packing.item_bytes(rules.padded(self.sizes[0, first]))
        self._counts = np.diff(first, append=len(kinds))

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """See `Windows.cut`; `samples` and `sizes` are grouped by bin afterwards."""
        room, most = int(budgets[0]) - self._base, self.rules.max_batch_size
        grouped, starts = pack(self._items, self._counts, room, most)
        self.samples = self._sorted[0].take(grouped, mode="clip")
        self.sizes = self._sorted[1].take(grouped, axis=1, mode="clip")
        return [starts]

    def least(self, micro_batches: IntArray) -> IntArray:
        """See `Windows.least`: bins that are all full."""
        return self._base + -(-int(self._items @ self._counts) // micro_batches)


def pack(
    sizes: IntArray, counts: IntArray, room: int, most: int | None = None
) -> tuple[IntArray, IntArray]:
    """Put every item into a bin.

    Args:
        sizes: bytes of an item of each kind in descending order, shape `(D,)`, D ≥ 1.
        counts: items of each kind, at least one, shape `(D,)`, together k.
        room: bytes of a bin. An item of more than that gets a bin of its own.
        most: items in a bin at the most; a bin of more is cut into pieces.

    Returns:
        The items' numbers, kind after kind, grouped by bin, shape `(k,)`, and where each bin
        starts among them, shape `(bins,)`. In NumPy O(k); in Python O(D²) at the very worst, and
        about O(D log D) in practice.
    """
    bins, taken = _shares(sizes.tolist(), counts.tolist(), room)
    items = np.cumsum(taken) - taken
    order = ascending(bins[None])[0]
    bins, taken, items = bins[order], taken[order], items[order]
    before = np.cumsum(taken) - taken
    grouped = np.repeat(items - before, taken)
    grouped += np.arange(len(grouped))
    starts = before[np.append(True, bins[1:] != bins[:-1])]
    if most is not None:
        taken = np.diff(starts, append=len(grouped))
        pieces = -(-taken // most)
        before = np.cumsum(pieces) - pieces
        nth = np.arange(pieces.sum()) - np.repeat(before, pieces)
        starts = np.repeat(starts, pieces) + most * nth
    return grouped, starts


def _shares(sizes: list[int], counts: list[int], room: int) -> tuple[IntArray, IntArray]:
    """Which bin takes the next items, kind after kind, and how many of them; shapes `(shares,)`."""
    smallest = sizes[-1]
    opened = 0
    # Bins by the room they have left: its distinct values, ascending, and for each of them
    # half-open ranges of bins.
    rooms: list[int] = []
    ranges: dict[int, list[tuple[int, int]]] = {}
    # Moves in the order of the items: into `bins[j]` bins from `first[j]` on, `each[j]` items each.
    first: list[int] = []
    bins: list[int] = []
    each: list[int] = []

    def put(low: int, number: int, items: int, left: int) -> None:
        first.append(low)
        bins.append(number)
        each.append(items)
        if left >= smallest:
            if left in ranges:
                ranges[left].append((low, low + number))
            else:
                ranges[left] = [(low, low + number)]
                insort(rooms, left)

    for size, count in zip(sizes, counts, strict=True):
        while count:
            fullest = bisect_left(rooms, size) if size else 0
            if fullest == len(rooms):
                break
            left = rooms[fullest]
            alike = ranges[left]
            low, high = alike.pop()
            items = left // size if size else count
            number = min(high - low, count // items)
            if not number:  # fewer items than fill a bin
                number, items = 1, count
            if low + number < high:
                alike.append((low + number, high))
            if not alike:
                del ranges[left], rooms[fullest]
            put(low, number, items, left - items * size)
            count -= number * items
        while count:
            items = min(max(room // size, 1) if size else count if room >= 0 else 1, count)
            number = count // items
            put(opened, number, items, room - items * size)
            opened += number
            count -= number * items

    numbers = np.array(bins)
    move = np.repeat(np.arange(len(numbers)), numbers)
    before = np.cumsum(numbers) - numbers
    return np.array(first)[move] + np.arange(len(move)) - before[move], np.array(each)[move]
