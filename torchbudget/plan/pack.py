"""Packing of windows whose samples need no padding.

One limit: best fit decreasing, over kinds of samples, which is faster than the other way and takes
up to 0.5 % fewer bins (log-normal, uniform and long-tailed lengths in windows of 4,096). Several
limits, or several ranks: the heaviest sample first, each into the lightest bin that has room for it
by every limit.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import AdditiveCost, IntArray
from torchbudget.plan.cut import Windows, arrange, ascending
from torchbudget.plan.rules import BatchRules
from torchbudget.units import MAX_BYTES

# Amounts of several limits are digits of one integer, each below a bit that no amount reaches.
_DIGIT: Final = 64
_ABOVE: Final = 1 << (_DIGIT - 1)


class PackedWindow(Windows):
    """One window whose samples are packed.

    Args:
        sizes: shape `(1, S)` or `(1, S, d)`.
        rules: budget and options of a micro-batch.
        packing: cost of a micro-batch.
    """

    def __init__(self, sizes: npt.NDArray[Any], rules: BatchRules, packing: AdditiveCost) -> None:
        # Along one axis bytes rise with the size, and are needed of the distinct sizes only.
        keys = sizes if sizes.ndim == 2 else packing.item_bytes(rules.padded(sizes))
        super().__init__(sizes, arrange(keys, 1), rules)
        self._sorted = self.samples, self.sizes
        self._work = rules.work if isinstance(rules.work, AdditiveCost) else packing
        kinds = keys[0].take(self.samples, mode="clip")
        first = np.flatnonzero(np.append(True, kinds[1:] != kinds[:-1]))
        self._items = packing.item_bytes(rules.padded(self.sizes[0, first]))
        self._counts = np.diff(first, append=len(kinds))

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """Pack under the whole budget; `samples` and `sizes` are grouped by bin afterwards.

        Budgets are lowered for padded windows only: see `deal`.
        """
        if len(self.rules.summed) == 1 and self.rules.most is None:
            return [self._group(*pack(self._items, self._counts, self.rules.summed[0][1]))]
        parts, rooms = self._parts()
        return [self._group(*_grouped(spread(parts, rooms, fewest_bins(parts, rooms))))]

    def _group(self, grouped: IntArray, starts: IntArray) -> IntArray:
        """Put the samples into the order of their bins; where those start, unchanged."""
        self.samples = self._sorted[0].take(grouped, mode="clip")
        self.sizes = self._sorted[1].take(grouped, axis=1, mode="clip")
        return starts

    def _parts(self) -> tuple[IntArray, list[int]]:
        """Each sample's part of each room of a bin, shape `(rooms, S)`, sorted; and the rooms."""
        padded, most = self.rules.padded(self._sorted[1][0]), self.rules.most
        rooms = [max(room, 0) for _, room in self.rules.summed]
        parts = np.array([cost.item_bytes(padded) for cost, _ in self.rules.summed])
        over: npt.NDArray[np.bool_] = np.any(parts > np.array(rooms)[:, None], axis=0)
        if most is not None or over.any():  # a sample over a limit takes a bin of its own
            rooms.append(len(over) if most is None else most)
            parts = np.vstack([parts, np.where(over, rooms[-1], 1)])
        return np.minimum(parts, np.array(rooms)[:, None]), rooms

    def deal(self, rounds: int, ranks: int) -> IntArray | None:
        """Give the samples to ranks of even work, then each rank's to bins of even work.

        `samples` and `sizes` are grouped by bin afterwards, round by round, in a round rank by
        rank; each rank has its heaviest bin in the first round.

        Args:
            rounds: bins of each rank, as many as packing them all makes necessary.
            ranks: number of ranks.

        Returns:
            Starts of the bins, shape `(rounds·ranks,)`; `None` where a rank's samples need more
            bins, or are too few to fill as many. O(samples · log(rounds · ranks)) in Python.
        """
        parts, rooms = self._parts()
        work = self._work.item_bytes(self.rules.padded(self._sorted[1][0]))
        whole = [min(room * rounds, MAX_BYTES) for room in rooms]
        rank_of = spread(parts, whole, ranks, work)
        by_rank, firsts = _grouped(rank_of)
        if len(firsts) != ranks or np.diff(firsts, append=len(rank_of)).min() < rounds:
            return None
        bins = np.empty_like(rank_of)
        for rank, mine in enumerate(np.split(by_rank, firsts[1:])):
            own = spread(parts[:, mine], rooms, rounds, work[mine])
            sums = np.bincount(own, work[mine])
            if len(sums) != rounds:
                return None
            turns = np.empty_like(own, shape=rounds)
            turns[np.argsort(-sums, kind="stable")] = np.arange(rounds)
            bins[mine] = turns[own] * ranks + rank
        return self._group(*_grouped(bins))


def fewest_bins(parts: IntArray, rooms: list[int]) -> int:
    """The number of bins below which the sums of the parts exceed the rooms, at least 1."""
    rows = zip(parts.tolist(), rooms, strict=True)  # sums of Python's integers do not wrap
    return max(1, *(int(-(-sum(row) // max(room, 1))) for row, room in rows))


def spread(parts: IntArray, rooms: list[int], bins: int, work: IntArray | None = None) -> IntArray:
    """Put items into bins, the heaviest first, each into the lightest bin that has room for it.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969), with
    limits. Bins are opened by the heaviest items; another one is opened where an item fits nowhere.

    Args:
        parts: each item's part of each room, at most the room, shape `(rooms, items)`.
        rooms: amounts that no bin exceeds.
        bins: number of bins to begin with.
        work: weight of each item, shape `(items,)`; `None`: the sum of its shares of the rooms.

    Returns:
        The bin of each item, shape `(items,)`; none is empty where there are as many items as bins.
        In Python O(items · log bins), and O(bins) for an item that only a nearly full bin can take.
    """
    shares = parts / np.maximum(rooms, 1)[:, None]
    weights = shares.sum(axis=0) if work is None else work
    order = np.argsort(-weights, kind="stable")
    # What is left of all rooms of a bin is compared by one subtraction: a digit that would fall
    # below 0 loses the bit above it.
    items = _joined(parts[:, order].tolist())
    least = _joined(np.minimum.accumulate(parts[:, order[::-1]], axis=1)[:, ::-1].tolist())
    (enough,) = _joined([[_ABOVE]] * len(rooms))
    (whole,) = _joined([[_ABOVE + room] for room in rooms])
    weights, largest = weights[order].tolist(), shares.max(axis=0)[order].tolist()
    opened = min(bins, len(items))
    left = [whole - item for item in items[:opened]]
    bin_of = list(range(opened))
    ready = [(weight, number) for number, weight in enumerate(weights[:opened])]
    heapq.heapify(ready)
    # Bins that had no room for an item, by their share that is left, until a small one comes.
    parked: list[tuple[float, Any, int]] = []

    def free(number: int) -> float:
        digits = (left[number] >> _DIGIT * k & _ABOVE - 1 for k in range(len(rooms)))
        return min(d / max(room, 1) for d, room in zip(digits, reversed(rooms), strict=True))

    for item, weight, share, smallest in zip(
        items[opened:], weights[opened:], largest[opened:], least[opened:], strict=True
    ):
        while parked and -parked[0][0] >= share:
            heapq.heappush(ready, heapq.heappop(parked)[1:])
        while ready and (left[ready[0][1]] - item) & enough != enough:
            level, number = heapq.heappop(ready)
            if (left[number] - smallest) & enough == enough:  # else no later item fits either
                heapq.heappush(parked, (-free(number), level, number))
        if not ready:
            fitting = [one[1:] for one in parked if (left[one[2]] - item) & enough == enough]
            level, number = min(fitting, default=(0, len(left)))
            if fitting:
                parked = [one for one in parked if one[2] != number]
                heapq.heapify(parked)
            else:
                left.append(whole)
            ready.append((level, number))
        level, number = ready[0]
        left[number] -= item
        bin_of.append(number)
        heapq.heapreplace(ready, (level + weight, number))
    found = np.empty(len(items), np.int64)
    found[order] = bin_of
    return found


def _joined(digits: list[list[int]]) -> list[int]:
    """Numbers with these digits, a row for each digit, the highest first."""
    numbers = digits[0]
    for row in digits[1:]:
        numbers = [high << _DIGIT | low for high, low in zip(numbers, row, strict=True)]
    return numbers


def _grouped(bins: IntArray) -> tuple[IntArray, IntArray]:
    """The items' numbers grouped by bin, and where each bin starts among them."""
    order = ascending(bins[None])[0]
    return order, np.flatnonzero(np.diff(bins[order], prepend=-1))


def pack(sizes: IntArray, counts: IntArray, room: int) -> tuple[IntArray, IntArray]:
    """Put every item into a bin: best fit decreasing.

    Args:
        sizes: bytes of an item of each kind in descending order, shape `(D,)`, D ≥ 1.
        counts: number of items of each kind, at least one, shape `(D,)`; their sum is k.
        room: bytes of a bin. A larger item gets a bin of its own.

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
    return grouped, before[np.append(True, bins[1:] != bins[:-1])]


def _shares(sizes: list[int], counts: list[int], room: int) -> tuple[IntArray, IntArray]:
    """The bin that takes the next items, kind after kind, and their number; shapes `(shares,)`."""
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
