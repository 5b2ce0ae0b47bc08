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
