"""A cost without a formula: a table of measured batches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCost:
    """Bytes of the cheapest measured batch that is at least as large.

    A batch of n samples of size L costs at most what a measured one of n' ≥ n samples of L' ≥ L (on
    every axis) cost. What no measured batch covers, in samples or in size, costs `MAX_BYTES`, which
    is over every budget. Monotone, and above the true cost wherever that is monotone; coarse where
    measurements are few.

    Attributes:
        numbers: samples of each measured batch.
        sizes: its padded size, a tuple of d ints.
        peak_bytes: its bytes.

    Raises:
        CostError: the three differ in length, or are empty.

    >>> table = TableCost(numbers=(8, 2), sizes=((100,), (500,)), peak_bytes=(1000, 1200))
    >>> table.batch_bytes([1, 8, 2], [50, 100, 500]).tolist()
    [1000, 1000, 1200]
    >>> table.capacity([100, 500, 501], 1400).tolist()
    [8, 2, 0]
    """

    numbers: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    peak_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.numbers) == len(self.sizes) == len(self.peak_bytes) > 0:
            raise CostError(
                "a table needs as many numbers and sizes as peaks, at least one of each"
            )

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.sizes[0])

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `MAX_BYTES` beyond what was measured."""
        covers = self._covers(padded_size)
        covers = covers & (np.asarray(n, np.int64)[..., None] <= np.array(self.numbers))
        total: IntArray = np.where(covers, np.array(self.peak_bytes), MAX_BYTES).min(axis=-1)
        return total

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; at most as many samples as were measured."""
        fits = np.asarray(budget_bytes, np.int64)[..., None] >= np.array(self.peak_bytes)
        covers = self._covers(padded_size) & fits
        most: IntArray = np.where(covers, np.array(self.numbers), 0).max(axis=-1)
        return most

    def _covers(self, padded_size: ArrayLike) -> npt.NDArray[np.bool_]:
        """Which measured batches are at least as large on every axis, shape `(…, batches)`."""
        size = np.asarray(padded_size)
        size = size[..., None] if self.axes == 1 else size
        covers: npt.NDArray[np.bool_] = np.all(size[..., None, :] <= np.array(self.sizes), axis=-1)
        return covers
