"""The bytes of every shape, monotone, as a table of polynomials in n for each size.

A planner asks for the capacities of millions of sizes at once, and relies on bytes that never fall.
Pieces are too slow for that, and their bytes may fall: where a longer size has one more chunk, or
where another piece begins. So a `Surface` is made of them once.

A row of the table has a polynomial for each size, and holds from a first number of samples to a
last one. At n samples it is `c₀ + c₁·m + c₂·m²`, with m = n − first. Below the first number it says
nothing; above the last one it stays at its last value. The largest row counts. Each coefficient is
the running maximum over all shorter sizes, so neither more samples nor longer ones ever cost less.

Example: a step needs 500 + 10·n·L bytes, and sizes are 1 to 4. The table has one row, from 1 sample
on, with the constants 510, 520, 530, 540 and the slopes 10, 20, 30, 40. At L = 3, n = 5 it is
530 + 4 · 30 = 650 bytes; in 1000 bytes, 1 + (1000 − 530) // 30 = 16 samples fit.

To change the sizes of the table, see `levels_of`; how rows are made of pieces and of a grid,
`Surface.of`; what is asked of them, `batch_bytes` and `capacities`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.pieces import Grid, Piece, first_held
from torchbudget.cost.protocol import ArrayLike, FloatArray, IntArray, axes_last
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES

# Sizes that a table has in all: of more, the table has some, evenly in their logarithms, and others
# are rounded up. Of two axes these are 256 each, of which two that follow differ by up to 1.7 %; of
# more axes 64 or fewer each. With 40 each, three axes were 7.6 % too high. Bytes that fall with a
# size, as in chunks, may be higher between two of them than at both.
_MOST_SIZES: Final = 2**16
_OF_MANY_AXES: Final = 2**18
# Rows begin at these numbers of samples, and at one in between if another piece begins there at one
# of some sizes. A piece that holds at `_ANY_N` is taken to hold for every larger n.
_STARTS: Final = tuple(sorted({round(2 ** (k / 4)) for k in range(81)}))
_SEARCHED_SIZES: Final = 64
_ANY_N: Final = 2 * _STARTS[-1]
_NOTHING: Final = -(2.0**62)  # the constant of a row that says nothing of a size
_LARGE: Final = 2**62  # bytes from here on count as too many for any budget


def levels_of(smallest: int, largest: int, multiple: int, axes: int) -> IntArray:
    """The sizes on one axis that a table of so many axes has."""
    most = int((_MOST_SIZES if axes < 3 else _OF_MANY_AXES) ** (1 / axes))
    every = np.arange(smallest, largest + multiple, multiple, dtype=np.int64)
    if len(every) > most:
        spread = np.geomspace(max(smallest, 1), largest, most)
        every = np.unique(-(-spread.astype(np.int64) // multiple) * multiple)
    return np.unique([smallest, *np.clip(every, smallest, largest)])


@dataclass(frozen=True, slots=True, eq=False)
class Surface:
    """A table of bytes of n samples of each size.

    Attributes:
        levels: the sizes of the table, for each axis.
        starts: the fewest samples of each row, shape `(rows,)`.
        ends: the most samples of each row.
        rows: coefficients in bytes, shape `(rows, 3, sizes)`.
        most: the largest number of samples with known bytes, shape `(sizes,)`.
        empty: bytes of a batch without samples.
    """

    levels: tuple[IntArray, ...]
    starts: IntArray
    ends: IntArray
    rows: IntArray
    most: IntArray
    empty: int
    _asked: dict[int, IntArray] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(
        cls,
        levels: Sequence[IntArray],
        pieces: Sequence[Piece],
        grid: Grid | None,
        *,
        empty: int,
        offset: float,
        scale: float,
    ) -> Surface:
        """The table of pieces where they hold, and of a grid elsewhere.

        Args:
            levels: the sizes of the table, for each axis.
            pieces: of which the first one counts that holds.
            grid: for shapes that no piece holds; `None`: they cost as much as a larger held shape.
            empty: traced bytes of a batch without samples.
            offset: bytes beside the traced ones.
            scale: of the traced bytes.
        """
        points = _points(levels)
        reached = 0 if grid is None else max(grid.ends)
        # Numbers of samples fall into intervals. `owner` is the piece that holds at both ends of
        # each interval, `(intervals, 2, points)`; `len(pieces)` if none does.
        starts = np.array(sorted({*_STARTS, max(reached, 1), *_changes(pieces, points)}), np.int64)
        ends = np.append(starts[1:] - 1, MAX_BYTES)
        owner = np.stack([_owners(pieces, n, points) for n in (starts, ends)], axis=1)
        shape = tuple(map(len, levels))
        if grid is None:
            owner = _filled(owner.reshape(-1, len(points)), len(pieces)).reshape(owner.shape)
            two = (owner[starts == 2] < len(pieces)).all(axis=(0, 1))
            every = np.arange(len(points)).reshape(shape)
            # A size without a piece takes those of the next larger size that has one.
            places = np.where(two.reshape(shape), every, -1)
            for axis in range(len(shape)):
                places = _filled(places.swapaxes(0, axis), -1).swapaxes(0, axis)
            known = np.where(places < 0, every, places).ravel()
            points, owner = points[known], owner[..., known]
        # The rows: the first and the last n of each, and its coefficients. Consecutive intervals in
        # which a piece holds at the same sizes are one row for each of its sums.
        found: list[tuple[int, int, FloatArray]] = []
        for at, piece in enumerate(pieces):
            active = (owner == at).any(axis=1)
            coefficients = piece.in_n(points) if active.any() else ()
            for first, last in _same_intervals(active):
                for total in coefficients:
                    rising = moved(total, int(starts[first]))
                    rising[1:] = np.maximum(rising[1:], 0)
                    row = _running_maximum(rising, active[first], shape)
                    found.append((int(starts[first]), int(ends[last]), row))
        # Where no piece holds, the grid has a line for each interval, up to its last samples.
        missing = (owner == len(pieces)).any(axis=1)
        for k in np.flatnonzero(missing.any(axis=1) & (starts <= reached)).tolist():
            if grid is not None:
                span = int(starts[k]), min(int(ends[k]) + 1, reached)
                found.append((*span, _line(grid, points, missing[k], span, shape)))
        # Bytes are known up to the first interval that neither a piece nor the grid has.
        traced = np.zeros(len(points), np.int64) if grid is None else grid.known_at(points)
        unknown = missing & (starts[:, None] >= traced)
        before = starts[np.maximum(unknown.argmax(axis=0) - 1, 0)]
        most = np.maximum(np.where(unknown.any(axis=0), before, MAX_BYTES), traced).reshape(shape)
        for axis in range(len(shape)):
            most = np.minimum.accumulate(most, axis=axis)
        # Of the bytes that were traced, those in use: whole bytes, rounded up.
        rows = np.array([row for *_, row in found])
        rows[:, 0] = np.where(rows[:, 0] > _NOTHING, rows[:, 0] * scale + offset, _NOTHING)
        rows[:, 1:] *= scale
        floor = max(int(np.ceil(empty * scale + offset)), 0)
        rows = np.clip(np.ceil(rows), _NOTHING, _LARGE).astype(np.int64)
        surface = cls(
            tuple(levels),
            np.array([start for start, *_ in found], np.int64),
            np.array([end for _, end, _ in found], np.int64),
            rows,
            most.ravel(),
            floor,
        )
        if grid is None or grid.reached == MAX_BYTES:
            return surface
        # A grid of runs says nothing beyond the most bytes that were reached. Bytes of each sample
        # have been rounded up.
        fitting = surface.capacities(int(grid.reached * scale + offset) + max(grid.ends) + 1)
        return replace(surface, most=np.minimum(surface.most, fitting))

    def plus(self, fixed: Sequence[float], each: Sequence[float]) -> Surface:
        """The table with `c₀ + Σ c·L` for each batch and `d₀ + Σ d·L` for each sample more.

        Args:
            fixed: `c₀`, and `c` for each axis' size L; not negative.
            each: the same for `d`.
        """
        sizes = [np.ones(len(self.most)), *_points(self.levels).T]
        once, more = (np.ceil(np.dot(factors, sizes)).astype(np.int64) for factors in (fixed, each))
        rows = self.rows.copy()
        rows[:, 0] += once + more * self.starts[:, None]
        rows[:, 1] += more
        return replace(self, rows=rows)

    def place(self, padded_size: ArrayLike) -> tuple[IntArray, npt.NDArray[np.bool_]]:
        """The column of each size, rounded up, and which are beyond the largest, of shape `(…)`.

        Raises:
            CostError: the sizes have another number of axes.
        """
        size = axes_last(padded_size, len(self.levels))
        counts = tuple(map(len, self.levels))
        each = [np.searchsorted(known, size[..., k]) for k, known in enumerate(self.levels)]
        beyond = np.any([at == count for at, count in zip(each, counts, strict=True)], axis=0)
        return np.ravel_multi_index(each, counts, mode="clip"), beyond

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `MAX_BYTES` if nothing is known."""
        number = np.asarray(n, np.int64)
        if number.size and number.min() < 0:
            raise CostError(f"a batch has at least 0 samples, got {number.min()}")
        column, beyond = self.place(padded_size)
        number, column, beyond = np.broadcast_arrays(number, column, beyond)
        rows = self.rows[:, :, column]
        lead = (slice(None), *(None,) * number.ndim)
        m = np.maximum(np.minimum(number, self.ends[lead]) - self.starts[lead], 0)
        as_float = m.astype(float)
        about = rows[:, 0] + as_float * (rows[:, 1] + as_float * rows[:, 2])
        too_many = about >= _LARGE
        m = np.where(too_many, 0, m)
        total = rows[:, 0] + m * (rows[:, 1] + m * rows[:, 2])
        total = np.where(too_many, MAX_BYTES, total)
        total = np.where(number >= self.starts[lead], total, self.empty)
        largest: IntArray = np.maximum(total.max(axis=0), self.empty)
        unknown = beyond | (number > self.most[column])
        return np.where(number == 0, self.empty, np.where(unknown, MAX_BYTES, largest))

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        budgets = np.asarray(budget_bytes, np.int64)
        column, beyond, budgets = np.broadcast_arrays(*self.place(padded_size), budgets)
        found = np.zeros(column.shape, np.int64)
        for budget in np.unique(budgets).tolist():
            mine = budgets == budget
            found[mine] = self._fitting(budget)[column[mine]]
        return np.where(beyond, 0, found)

    def _fitting(self, budget_bytes: int) -> IntArray:
        """The capacities under a budget, kept for the last budgets.

        Planning 200,000 samples of two axes by a grid took 0.20 s, and 0.48 s without.
        """
        if budget_bytes not in self._asked:
            for old in [*self._asked][:-7]:
                del self._asked[old]
            self._asked[budget_bytes] = self.capacities(budget_bytes)
        return self._asked[budget_bytes]

    def capacities(self, budget_bytes: int) -> IntArray:
        """The most samples that fit a budget, for each size of the table."""
        room = budget_bytes - self.rows[:, 0]
        each, square = self.rows[:, 1], self.rows[:, 2]
        more = np.where(each == 0, _LARGE, np.maximum(room, 0) // np.maximum(each, 1))
        if square.any():
            more = np.where(square > 0, _largest_root(square, each, room), more)
        # A row has no value below its first number of samples, and its last value beyond its end.
        n = self.starts[:, None] + np.where(room < 0, -1, np.minimum(more, _LARGE))
        n = np.where(n >= np.minimum(self.ends, _LARGE)[:, None], MAX_BYTES, n)
        most = np.minimum(n.min(axis=0), self.most)
        return most if budget_bytes >= self.empty else np.zeros_like(most)


def _points(levels: Sequence[IntArray]) -> IntArray:
    """The size on each axis of each column of a table, shape `(sizes, d)`."""
    return np.stack([one.ravel() for one in np.meshgrid(*levels, indexing="ij")], axis=1)


def _same_intervals(active: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of consecutive rows that are equal and not empty: the first and the last of each."""
    alike = groupby(range(len(active)), key=lambda row: active[row].tobytes())
    runs = [[*rows] for _, rows in alike]
    return [(run[0], run[-1]) for run in runs if active[run[0]].any()]


def moved(rows: npt.NDArray[Any], by: int) -> npt.NDArray[np.float64]:
    """The coefficients, `(3, …)`, of the same polynomial in n − `by`."""
    constant, each, square = rows.astype(float)
    return np.stack([constant + by * (each + by * square), each + 2 * by * square, square])


def _running_maximum(
    rows: FloatArray, active: npt.NDArray[np.bool_], shape: tuple[int, ...]
) -> FloatArray:
    """The largest of each coefficient over all sizes up to each one, where a row is active."""
    started = np.where(active, rows, np.array([[_NOTHING], [0.0], [0.0]])).reshape(3, *shape)
    for axis in range(1, len(shape) + 1):
        started = np.maximum.accumulate(started, axis=axis)
    return started.reshape(3, -1)


def _owners(pieces: Sequence[Piece], numbers: IntArray, points: IntArray) -> IntArray:
    """The first piece that holds for each number of samples, shape `(numbers, sizes)`."""
    every = (np.column_stack([np.full(len(points), min(n, _ANY_N)), points]) for n in numbers)
    return np.stack([first_held(pieces, shapes)[0] for shapes in every])


def _changes(pieces: Sequence[Piece], points: IntArray) -> list[int]:
    """Numbers of samples at which another piece begins, up to one between two of `_STARTS`."""
    some = points[np.linspace(0, len(points) - 1, _SEARCHED_SIZES).astype(int)]
    found: list[int] = []
    for first, end in pairwise(_STARTS):
        low, high = np.full(len(some), first), np.full(len(some), end)
        own, last = (first_held(pieces, np.column_stack([n, some]))[0] for n in (low, high - 1))
        low, high, sizes, own = (one[own != last] for one in (low, high, some, own))
        while (high - low > 1).any():
            middle = (low + high) // 2
            is_own = first_held(pieces, np.column_stack([middle, sizes]))[0] == own
            low, high = np.where(is_own, middle, low), np.where(is_own, high, middle)
        found += np.unique(high)[:1].tolist()
    return found


def _filled(values: IntArray, none: int) -> IntArray:
    """Along the first axis, each `none` becomes the next other value, if there is one."""
    own = np.arange(len(values)).reshape(-1, *[1] * (values.ndim - 1))
    later = np.where(values == none, len(values) - 1, own)
    return np.take_along_axis(values, np.minimum.accumulate(later[::-1])[::-1], 0)


def _line(
    grid: Grid,
    points: IntArray,
    active: npt.NDArray[np.bool_],
    span: tuple[int, int],
    shape: tuple[int, ...],
) -> FloatArray:
    """The row of a grid over a span of n, counted from its start; nowhere below in the middle."""
    found = []
    for n in (span[0], sum(span) // 2, span[1]):
        values = grid.bytes_at(np.column_stack([np.full(len(points), n), points]))
        column = np.stack([values, 0 * values, 0 * values])
        found.append(_running_maximum(column, active, shape)[0])
    low, middle, high = found
    slope = np.where(low > _NOTHING, np.maximum(high - low, 0) / max(span[1] - span[0], 1), 0)
    above = np.maximum(middle - low - slope * (sum(span) // 2 - span[0]), 0)
    rows = np.stack([np.where(low > _NOTHING, low + above, _NOTHING), slope, 0 * slope])
    return _running_maximum(rows, np.ones(len(points), bool), shape)


def _largest_root(square: IntArray, each: IntArray, room: IntArray) -> IntArray:
    """The largest n ≥ 0 with `each·n + square·n² ≤ room`, where `square` is at least 1."""
    square, room = np.maximum(square, 1), np.clip(room, 0, 2**62)  # beyond, products could wrap
    half = each / 2
    # The form of the root that does not subtract two nearly equal numbers.
    root = room / np.maximum(half + np.sqrt(half * half + square * room.astype(np.float64)), 1)
    n: IntArray = np.maximum(np.floor(root).astype(np.int64) - 1, 0)
    for _ in range(2):  # n is below 2**32, where its error is below 1
        more = n + 1
        n = np.where(more * each + more * more * square <= room, more, n)
    return n
