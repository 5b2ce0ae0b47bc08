"""Packing a window whose samples need no padding: best fit decreasing, over kinds of samples."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import AdditiveCost, IntArray
from torchbudget.plan.cut import Windows, arrange, ascending
from torchbudget.plan.rules import BatchRules


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
        kinds = keys[0].take(self.samples, mode="clip")
        first = np.flatnonzero(np.append(True, kinds[1:] != kinds[:-1]))
        self._packing = packing
        self._items = packing.item_bytes(rules.padded(self.sizes[0, first]))
        self._counts = np.diff(first, append=len(kinds))

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """See `Windows.cut`; `samples` and `sizes` are grouped by bin afterwards."""
        room, most = self._packing.room_bytes(int(budgets[0])), self.rules.max_batch_size
        grouped, starts = pack(self._items, self._counts, room, most)
        self.samples = self._sorted[0].take(grouped, mode="clip")
        self.sizes = self._sorted[1].take(grouped, axis=1, mode="clip")
        return [starts]

    def least(self, micro_batches: IntArray) -> IntArray:
        """See `Windows.least`: bytes of bins that are all full."""
        return self._packing.base_bytes + -(-int(self._items @ self._counts) // micro_batches)


def pack(
    sizes: IntArray, counts: IntArray, room: int, most: int | None = None
) -> tuple[IntArray, IntArray]:
    """Put every item into a bin.

    Args:
        sizes: bytes of an item of each kind in descending order, shape `(D,)`, D ≥ 1.
        counts: number of items of each kind, at least one, shape `(D,)`; their sum is k.
        room: bytes of a bin. A larger item gets a bin of its own.
        most: largest number of items in a bin; a bin with more is cut into pieces.

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
