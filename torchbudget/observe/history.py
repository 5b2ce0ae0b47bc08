"""A history that stays within its bytes: when it is full, its resolution is halved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class History:
    """Rows of numbers over time, of which neighbours are merged, by their maxima, when it is full.

    So every peak is kept, whatever the resolution; only its moment is known less exactly. NaN is a
    number that was not read. Adding a row takes O(1) on average.

    Args:
        columns: numbers in a row.
        max_bytes: that the rows may take; two rows at the least.

    Attributes:
        stride: added rows that a kept one stands for.
    """

    def __init__(self, columns: int, max_bytes: int) -> None:
        rows = max(2, max_bytes // (8 * columns) // 2 * 2)
        self._rows: npt.NDArray[np.float64] = np.empty((rows, columns))
        self._closed = 0  # rows that are complete
        self._in_next = 0  # added rows in the next one
        self.stride = 1

    def add(self, values: Sequence[float]) -> npt.NDArray[np.float64] | None:
        """Add a row; the kept row that it completed, if it did."""
        if self._closed == len(self._rows):
            self._halve()
        row = self._rows[self._closed]
        row[:] = values if not self._in_next else np.fmax(row, values)
        self._in_next += 1
        if self._in_next < self.stride:
            return None
        self._closed += 1
        self._in_next = 0
        kept: npt.NDArray[np.float64] = row.copy()
        return kept

    def _halve(self) -> None:
        half = len(self._rows) // 2
        pairs = self._rows.reshape(half, 2, -1)
        self._rows[:half] = np.fmax(pairs[:, 0], pairs[:, 1])
        self._closed, self.stride = half, 2 * self.stride

    def rows(self) -> npt.NDArray[np.float64]:
        """The kept rows and the incomplete one, a copy of shape `(N, columns)`."""
        return self._rows[: self._closed + (self._in_next > 0)].copy()

    def most(self) -> npt.NDArray[np.float64]:
        """The largest of each column; NaN where none was read."""
        most: npt.NDArray[np.float64] = np.fmax.reduce(self.rows())
        return most
