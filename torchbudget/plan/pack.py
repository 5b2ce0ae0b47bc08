"""Packing: the heaviest item first, each into the lightest bin with room for it by all limits."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import AdditiveCost, IntArray
from torchbudget.plan.cut import Windows, ascending
from torchbudget.plan.groups import NO_LABELS, Labels
from torchbudget.plan.rules import BatchRules


class PackedWindow(Windows):
    """One window whose samples are packed.

    Args:
        sizes: shape `(1, S)` or `(1, S, d)`.
        rules: budget and options of a micro-batch.
        labels: see `Windows`.
    """

    def __init__(
        self, sizes: npt.NDArray[Any], rules: BatchRules, labels: Labels = NO_LABELS
    ) -> None:
        super().__init__(sizes, np.arange(sizes.shape[1])[None], rules, labels)
        self._items = self.samples if self.units is None else self.units[self.samples]
        self._parts, self._rooms = parts_of(rules, self.sizes[0], self._items)

    def cut(self, budgets: IntArray) -> list[IntArray]:
        """Pack each group under the whole budget; `samples` and `sizes` are grouped by bin.

        Budgets are lowered for padded windows only.
        """
        bins, opened = np.zeros(self._parts.shape[1], np.int64), 0
        group = np.zeros_like(bins)  # of each item
        if self.groups is not None:
            group[self._items] = self.groups[self.samples]
        ordered, starts = grouped_by(group)
        for items in np.split(ordered, starts[1:]):
            parts = self._parts[:, items]
            bins[items] = opened + spread(parts, self._rooms, fewest_bins(parts, self._rooms))
            opened = int(bins[items].max()) + 1
        return [self._group(bins)]

    def even(self, bins: int) -> IntArray | None:
        """Pack into a number of bins of even work; `samples` and `sizes` are grouped by bin.

        Returns:
            The starts of the bins; `None` if the items need more of them or are fewer, or are of
            several groups.
        """
        if self.groups is not None:
            return None
        work = np.bincount(self._items, work_of(self.rules, self.sizes[0]))
        found = spread(self._parts, self._rooms, bins, work)
        return self._group(found) if found.max() + 1 == bins else None

    def _group(self, bins: IntArray) -> IntArray:
        """Put the samples into the order of their bins, and return where each bin starts."""
        grouped, starts = grouped_by(bins[self._items])
        self.samples = self.samples.take(grouped, mode="clip")
        self.sizes = self.sizes.take(grouped, axis=1, mode="clip")
        return starts


def parts_of(
    rules: BatchRules, sizes: npt.NDArray[Any], items: IntArray
) -> tuple[IntArray, list[int]]:
    """The parts that items take of the rooms of a bin, one for each summed and counted limit.

    Args:
        rules: with the limits.
        sizes: of samples, before rounding, shape `(S,)` or `(S, d)`.
        items: number of each sample's item, from 0 on, shape `(S,)`.

    Returns:
        The parts, at most the room, shape `(rooms, items)`; and the rooms, at least one. An item
        that is over a limit takes a whole bin.
    """
    padded, most = rules.padded(sizes), rules.most
    rooms = [max(room, 0) for _, room in rules.summed]
    parts = [of_items(cost.item_bytes(padded), items) for cost, _ in rules.summed]
    over = np.zeros(int(items.max()) + 1, np.bool_)
    for part, (_, room) in zip(parts, rules.summed, strict=True):
        over |= part > room
    if most is not None or not rooms or over.any():
        rooms.append(len(sizes) if most is None else most)
        parts.append(of_items(np.ones_like(items), items))
        parts[-1][over] = rooms[-1]
    return np.minimum(parts, np.array(rooms)[:, None]), rooms


def of_items(values: IntArray, items: IntArray) -> IntArray:
    """Sums of the samples' values over each item, in integers."""
    sums = np.zeros(int(items.max()) + 1, np.int64)
    np.add.at(sums, items, values)
    return sums


def work_of(rules: BatchRules, sizes: npt.NDArray[Any]) -> npt.NDArray[np.number[Any]]:
    """The work of each sample, by `BatchRules.work`, shape `(S,)`.

    Of a padded batch a sample has its part of one that is full of samples of its size.
    """
    model, padded = rules.work, rules.padded(sizes)
    if rules.packing is not None and isinstance(model, AdditiveCost):
        return model.item_bytes(padded)
    n = rules.alike(sizes)
    return rules.costs(model, n, padded) / n


def fewest_bins(parts: IntArray, rooms: list[int]) -> int:
    """The number of bins below which the sums of the parts exceed the rooms, at least 1."""
    rows = zip(parts.tolist(), rooms, strict=True)  # sums of Python's integers do not wrap
    return max(1, *(int(-(-sum(row) // max(room, 1))) for row, room in rows))


def spread(parts: IntArray, rooms: list[int], bins: int, work: IntArray | None = None) -> IntArray:
    """Put items into bins, the heaviest first, each into the lightest bin that has room for it.

    Longest processing time first (Graham, "Bounds on multiprocessing timing anomalies", 1969), with
    limits. Bins are opened by the heaviest items; another one is opened if an item fits nowhere.

    Args:
        parts: each item's part of each room, at most the room, shape `(rooms, items)`.
        rooms: amounts that no bin exceeds.
        bins: number of bins to begin with.
        work: weight of each item, shape `(items,)`; `None`: the sum of its shares of the rooms.

    Returns:
        The bin of each item, shape `(items,)`; none is empty if there are as many items as bins.
        In Python O(items · log bins). With several rooms, O(bins) for an item that only a nearly
        full bin can take.
    """
    shares = parts / np.maximum(rooms, 1)[:, None]
    weights = shares.sum(axis=0) if work is None else work
    order = np.argsort(-weights, kind="stable")
    # The amounts under all rooms are digits of one integer, each below a guard bit. One subtraction
    # compares an item with a bin's free space: a digit that would fall below 0 clears its bit.
    bits = max(rooms).bit_length()
    items = _joined(parts[:, order].tolist(), bits)
    least = _joined(np.minimum.accumulate(parts[:, order[::-1]], axis=1)[:, ::-1].tolist(), bits)
    (enough,) = _joined([[1 << bits]] * len(rooms), bits)
    (whole,) = _joined([[(1 << bits) + room] for room in rooms], bits)
    weights, largest = weights[order].tolist(), shares.max(axis=0)[order].tolist()
    opened = min(bins, len(items))
    left = [whole - item for item in items[:opened]]
    bin_of = list(range(opened))
    ready = [(weight, number) for number, weight in enumerate(weights[:opened])]
    heapq.heapify(ready)
    # Bins that had no room for an item, by their free share, until an item is small enough.
    parked: list[tuple[float, Any, int]] = []

    def free(number: int) -> float:
        digits = (left[number] >> (bits + 1) * k & (1 << bits) - 1 for k in range(len(rooms)))
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
            some = parked if len(rooms) > 1 else []  # of one room, none that is parked has enough
            fitting = [one[1:] for one in some if (left[one[2]] - item) & enough == enough]
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


def _joined(digits: list[list[int]], bits: int) -> list[int]:
    """Numbers with these digits of some bits and one above, a row for each, the highest first."""
    numbers = digits[0]
    for row in digits[1:]:
        numbers = [high << bits + 1 | low for high, low in zip(numbers, row, strict=True)]
    return numbers


def grouped_by(bins: IntArray) -> tuple[IntArray, IntArray]:
    """The items' numbers grouped by bin, and where each bin starts among them."""
    order = ascending(bins[None])[0]
    return order, np.flatnonzero(np.diff(bins[order], prepend=-1))
