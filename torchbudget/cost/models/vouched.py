"""How far a fit may be used: no further than measured batches have reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.units import MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class VouchedRange:
    """The batches that measured ones vouch for, where a fit may not be used beyond them.

    A fit is trusted for a padded size L up to b bytes if one measured batch of at most that size
    (on every axis) and one of at least that size both took b bytes or more. And a batch that is
    no larger than a trusted one, in samples and on every axis, is trusted, too.

    Attributes:
        sizes: padded sizes of the measured batches, tuples of d ints.
        peak_bytes: their bytes.
    """

    sizes: tuple[tuple[int, ...], ...]
    peak_bytes: tuple[int, ...]

    def batch_bytes(
        self, fitted: Callable[[ArrayLike, ArrayLike], IntArray], n: ArrayLike, size: ArrayLike
    ) -> IntArray:
        """What was fitted, or `MAX_BYTES` for batches beyond; see `CostModel.batch_bytes`."""
        found = []
        for padded, most in self._ranges(size):
            bytes_ = fitted(n, padded)
            found.append(np.where(bytes_ <= most, bytes_, MAX_BYTES))
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
            np.where(most > 0, fitted(padded, np.minimum(budget_bytes, most)), 0)
            for padded, most in self._ranges(size)
        ]
        n: IntArray = np.max(found, axis=0)
        return n

    def _ranges(self, size: ArrayLike) -> Iterator[tuple[IntArray, IntArray]]:
        """Sizes that are at least `size`, and up to how many bytes the fit is trusted there.

        A size is raised to that of each measured batch: where shorter ones reached less than longer
        ones, the longer ones vouch for more samples.
        """
        each = [(np.array(s), b) for s, b in zip(self.sizes, self.peak_bytes, strict=True)]
        one_axis = len(self.sizes[0]) == 1
        wanted = np.asarray(size, np.int64)
        wanted = wanted[..., None] if one_axis else wanted
        for low, reached in each:
            if any(
                (other <= low).all() and more >= reached and ((other < low).any() or more > reached)
                for other, more in each
            ):
                continue  # the other one begins no later, and reaches as far
            padded = np.maximum(wanted, low)
            above = [np.where((padded <= high).all(axis=-1), most, 0) for high, most in each]
            yield (
                padded[..., 0] if one_axis else padded,
                np.minimum(np.max(above, axis=0), reached),
            )
