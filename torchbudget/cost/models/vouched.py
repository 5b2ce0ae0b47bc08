"""How far a fit may be used: no further than measured batches have reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.units import MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class VouchedRange:
    """The batches that measured ones vouch for, where a fit may not be used beyond them.

    A fit is trusted for a padded size L up to b bytes if one measured batch of at most that size
    (on every axis) and one of at least that size both took b bytes or more. And a batch that is
    no larger than a trusted one, in samples and on every axis, is trusted, too. Where no such batch
    has left the floor, bytes do not show how many samples are trusted: no more than were measured.

    Attributes:
        numbers: samples of the measured batches.
        sizes: their padded sizes, tuples of d ints.
        peak_bytes: their bytes.
        floor_bytes: up to here, a batch has not left the floor.
    """

    numbers: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    peak_bytes: tuple[int, ...]
    floor_bytes: int

    def batch_bytes(
        self, fitted: Callable[[ArrayLike, ArrayLike], IntArray], n: ArrayLike, size: ArrayLike
    ) -> IntArray:
        """What was fitted, or `MAX_BYTES` for batches beyond; see `CostModel.batch_bytes`."""
        found = []
        for padded, most_bytes, most in self._ranges(size):
            bytes_ = fitted(n, padded)
            trusted = (bytes_ <= most_bytes) & (np.asarray(n) <= most)
            found.append(np.where(trusted, bytes_, MAX_BYTES))
        total: IntArray = np.min(found, axis=0)
        return total

    def capacity(
        self,
        fitted: Callable[[ArrayLike, ArrayLike], IntArray],
        size: ArrayLike,
        budget_bytes: IntArray,
    ) -> IntArray:
        """The largest vouched-for number of samples that fits; see `CostModel.capacity`."""
        if len(self.sizes[0]) == 1:
            return _of_one_axis(self).capacity(fitted, np.asarray(size), budget_bytes)
        found = [
            np.minimum(fitted(padded, np.minimum(budget_bytes, most_bytes)), most)
            for padded, most_bytes, most in self._ranges(size)
        ]
        n: IntArray = np.max(found, axis=0)
        return n

    def _ranges(self, size: ArrayLike) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
        """Sizes that are at least `size`, and up to how many bytes and samples they are trusted.

        A size is raised to that of each measured batch: where shorter ones reached less than longer
        ones, the longer ones vouch for more samples.
        """
        numbers, sizes, peaks = _arrays(self)
        one_axis = sizes.shape[1] == 1
        wanted = np.asarray(size, np.int64)
        wanted = wanted[..., None] if one_axis else wanted
        for at in _first_to_reach(self.sizes, self.peak_bytes):
            low, reached = sizes[at], peaks[at]
            padded = np.maximum(wanted, low)
            covers = (padded[..., None, :] <= sizes).all(axis=-1)
            most_bytes = np.minimum(np.where(covers, peaks, 0).max(axis=-1), reached)
            most = np.where(covers, numbers, 0).max(axis=-1)
            most = np.where(most_bytes > self.floor_bytes, MAX_BYTES, most)
            yield padded[..., 0] if one_axis else padded, most_bytes, most


class _OneAxis:
    """The ranges of sizes of one axis, where the planner asks most.

    A size is at least that of the ranges that begin at or below it, of which the one that reached
    furthest counts; and it is raised to where each of the others begins, whatever the size. So one
    evaluation for each size and one for each range do, instead of one for each pair of them.

    Args:
        measured: what vouches.
    """

    def __init__(self, measured: VouchedRange) -> None:
        numbers, sizes, peaks = _arrays(measured)
        order = np.argsort(sizes[:, 0], kind="stable")
        self._sizes = sizes[order, 0]
        # Of batches of at least each size; nothing covers those beyond the last.
        self._peaks = _suffix_maxima(peaks[order])
        self._numbers = _suffix_maxima(numbers[order])
        first = _first_to_reach(measured.sizes, measured.peak_bytes)
        at = sorted(first, key=measured.sizes.__getitem__)
        self._begins, reached = sizes[at, 0], peaks[at]
        # Of the ranges that begin at or below a size, none of them first.
        self._reached = np.append(0, np.maximum.accumulate(reached))
        self._floor_bytes = measured.floor_bytes
        self._most_bytes, self._most = self._trusted(self._begins, reached)

    def _trusted(self, size: IntArray, reached: IntArray) -> tuple[IntArray, IntArray]:
        """Up to how many bytes and samples sizes are trusted, in a range that reached so far."""
        covered = np.searchsorted(self._sizes, size)
        most_bytes = np.minimum(self._peaks[covered], reached)
        return most_bytes, np.where(
            most_bytes > self._floor_bytes, MAX_BYTES, self._numbers[covered]
        )

    def capacity(
        self,
        fitted: Callable[[ArrayLike, ArrayLike], IntArray],
        size: IntArray,
        budget_bytes: IntArray,
    ) -> IntArray:
        """See `VouchedRange.capacity`."""
        begun = np.searchsorted(self._begins, size, side="right")
        most_bytes, most = self._trusted(size, self._reached[begun])
        own = np.minimum(fitted(size, np.minimum(budget_bytes, most_bytes)), most)
        own = np.where(begun > 0, own, 0)
        if begun.min(initial=len(self._begins)) == len(self._begins):
            return own
        budgets = budget_bytes.reshape(-1, 1)
        raised = np.minimum(fitted(self._begins, np.minimum(budgets, self._most_bytes)), self._most)
        best = _suffix_maxima(raised)
        which = np.arange(budgets.size).reshape(budget_bytes.shape)
        return np.maximum(own, best[which, begun])


def _suffix_maxima(values: IntArray) -> IntArray:
    """The maximum from each position of the last axis on, and 0 after the last one."""
    from_behind = np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]
    return np.append(from_behind, np.zeros((*values.shape[:-1], 1), np.int64), axis=-1)


@lru_cache(maxsize=64)
def _of_one_axis(measured: VouchedRange) -> _OneAxis:
    return _OneAxis(measured)


@lru_cache(maxsize=64)
def _arrays(measured: VouchedRange) -> tuple[IntArray, IntArray, IntArray]:
    """Samples, sizes and bytes of the measured batches."""
    return np.array(measured.numbers), np.array(measured.sizes), np.array(measured.peak_bytes)


@lru_cache(maxsize=64)
def _first_to_reach(sizes: tuple[tuple[int, ...], ...], peak_bytes: tuple[int, ...]) -> list[int]:
    """Which batches are such that no other one is of shorter samples and reached as far."""
    found = []
    for at, (low, reached) in enumerate(zip(sizes, peak_bytes, strict=True)):
        others = (
            size != low or peak > reached
            for size, peak in zip(sizes, peak_bytes, strict=True)
            if peak >= reached and all(a <= b for a, b in zip(size, low, strict=True))
        )
        if not any(others):
            found.append(at)
    return found
