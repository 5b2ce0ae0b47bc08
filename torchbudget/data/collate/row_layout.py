"""Where samples are in one row, each with room for a multiple, and the segments of the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import CollateError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """The places of n samples in a field of one row, `(1, total, …)`.

    Attributes:
        lengths: each sample's length, `(n, 1)`.
        starts: the position of its first element, `(n,)`.
        total: the length of the row.
        multiple: the room of each sample is a multiple of it.
    """

    lengths: IntArray
    starts: IntArray
    total: int
    multiple: int

    @classmethod
    def of(cls, lengths: IntArray, multiple: int, total: int | None) -> RowLayout:
        """The samples one after the other, each at a multiple, in a row of a fixed total if given.

        Raises:
            CollateError: they are more than the total.
        """
        rooms = _rooms(lengths, multiple)
        end = int(rooms.sum())
        if total is not None and end > total:
            raise CollateError(
                f"the samples of a batch have {end} positions, more than total={total}; plan with "
                "a budget that is at most total, such as PackedCost(unit_bytes=1) and a budget of "
                "total units, and the same size_multiple"
            )
        starts = rooms.cumsum() - rooms
        return cls(lengths=lengths, starts=starts, total=total or end, multiple=multiple)

    def room(self, multiple: int) -> int:
        """The length of the row without what pads it to a total, with rooms of this multiple."""
        return int(_rooms(self.lengths, multiple).sum())

    @property
    def most(self) -> int:
        """See `Layout.most`."""
        return self.room(self.multiple)

    @property
    def own(self) -> IntArray:
        """The position in the row of every element of the samples, `(Σ lengths,)`."""
        lengths = self.lengths[:, 0]
        shifts = self.starts - (lengths.cumsum() - lengths)
        return np.arange(int(lengths.sum())) + np.repeat(shifts, lengths)

    def bounds(self) -> list[int]:
        """0 and the end of each segment: a sample, or padding.

        Padding is in segments of its own, none longer than the longest sample: so it costs what
        samples of its size do, and its positions are ones that the model has.
        """
        bounds = [0]
        longest = max(int(self.lengths.max(initial=0)), 1)
        stops = [*self.starts[1:].tolist(), self.total]
        for length, stop in zip(self.lengths[:, 0].tolist(), stops, strict=True):
            bounds.append(bounds[-1] + length)
            bounds += range(bounds[-1] + longest, stop, longest)
            bounds += [stop] if bounds[-1] < stop else []
        return bounds

    @property
    def shapes(self) -> IntArray:
        """See `Layout.shapes`."""
        return self.lengths

    def samples(self, field: Tensor) -> list[Tensor]:
        """See `Layout.samples`."""
        places = zip(self.starts.tolist(), self.lengths[:, 0].tolist(), strict=True)
        return [field[0, start : start + length] for start, length in places]

    def part(self, start: int, stop: int) -> tuple[tuple[slice, slice], RowLayout]:
        """See `Layout.part`: without what pads the row to a fixed total."""
        last = stop - 1
        room = int(_rooms(self.lengths[last:stop], self.multiple)[0])
        first, end = int(self.starts[start]), int(self.starts[last]) + room
        layout = RowLayout(
            lengths=self.lengths[start:stop],
            starts=self.starts[start:stop] - first,
            total=end - first,
            multiple=self.multiple,
        )
        return (slice(None), slice(first, end)), layout

    def fits(self, field: Tensor) -> bool:
        """See `Layout.fits`."""
        return field.shape[:2] == (1, self.total)

    @property
    def nbytes(self) -> int:
        """None: it has no tensors."""
        return 0

    def map(self, function: Callable[[Tensor], Tensor]) -> RowLayout:
        """See `nbytes`."""
        return self


def _rooms(lengths: IntArray, multiple: int) -> IntArray:
    rooms: IntArray = -(-lengths[:, 0] // multiple) * multiple
    return rooms
