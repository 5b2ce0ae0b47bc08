"""Parts of a cost: expressions that hold for some shapes, and a grid for the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.expressions import Expressions, Node
from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES

# Results of a piece for a shape.
NOT_HELD, TESTED, EXACT = 0, 1, 2
_CHUNK: Final = 2**13  # sizes at once
# Slopes of one line: in a loss of 230 chunks, the last two differed by 0.0005.
_LINE: Final = 1.002


def failed_of(
    expressions: Expressions,
    fixed: Sequence[int | None],
    conditions: Sequence[int],
    shapes: npt.ArrayLike,
) -> npt.NDArray[np.bool_]:
    """Which conditions do not hold at each shape, `(S, d)`: `(coordinates + conditions, S)`."""
    shapes = np.atleast_2d(np.asarray(shapes, np.int64))
    columns = zip(fixed, shapes.T, strict=True)
    rows = [column < 2 if one is None else column != one for one, column in columns]
    values = expressions.evaluate(shapes, conditions)
    return np.array([*rows, *(~np.broadcast_to(v, len(shapes)).astype(bool) for v in values)], bool)


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured batch.

    Attributes:
        n: number of samples.
        size: padded size, one int for each axis.
        peak_bytes: peak bytes of the step.
        held_out: whether the batch was left out of the fit, to judge the fit.
        how: "trace" or "run".
        seconds: duration of the step; `None` if it was traced.
    """

    n: int
    size: tuple[int, ...]
    peak_bytes: int
    held_out: bool
    how: str
    seconds: float | None = None

    @property
    def asked(self) -> int | tuple[int, ...]:
        """The size as a cost model takes it: an int for one axis."""
        return self.size if len(self.size) > 1 else self.size[0]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The peak of a step as an expression of the shape, and the shapes at which it holds.

    Attributes:
        nodes: nodes of `Expressions`.
        sums: the sums of storages that are the peak somewhere, as `(expression, number)` pairs.
        conditions: expressions that are true for every shape of this piece.
        fixed: the value of each coordinate without a symbol; `None` for coordinates with one.
        harmless: sets of conditions, as rows of `failed`, that may fail together: concrete traces
            had the same bytes there.
        granularity: the bytes of each storage are rounded up to a multiple of it.
        flops: expression of a step's floating-point operations.
    """

    nodes: tuple[Node, ...]
    sums: tuple[tuple[tuple[int, int], ...], ...]
    conditions: tuple[int, ...]
    fixed: tuple[int | None, ...]
    harmless: tuple[tuple[int, ...], ...]
    granularity: int
    flops: int
    _expressions: Expressions = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_expressions", Expressions.of(self.nodes))
        used = [at for total in self.sums for at, _ in total] + [*self.conditions, self.flops]
        if not all(isinstance(at, int) and 0 <= at < len(self.nodes) for at in used):
            raise CostError("a piece refers to an expression that it does not have")

    def bytes_at(self, shapes: npt.ArrayLike) -> IntArray:
        """The traced peak at each shape, `(S, d)`: shape `(S,)`."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        used = sorted({at for total in self.sums for at, _ in total})
        values = self._expressions.evaluate(shapes, used)
        blocks = {
            at: -(-np.asarray(value, np.int64) // self.granularity) * self.granularity
            for at, value in zip(used, values, strict=True)
        }
        totals = np.zeros((len(self.sums), len(shapes)), np.int64)
        for total, pairs in zip(totals, self.sums, strict=True):
            for at, number in pairs:
                total += number * blocks[at]
        peaks: IntArray = totals.max(axis=0)
        return peaks

    def holds(self, shapes: npt.ArrayLike) -> npt.NDArray[np.int8]:
        """`EXACT` if every condition holds, `TESTED` if a harmless set fails, else 0."""
        failed = failed_of(self._expressions, self.fixed, self.conditions, shapes)
        held = np.where(failed.any(axis=0), NOT_HELD, EXACT).astype(np.int8)
        for some in self.harmless:
            others = np.ones(len(failed), bool)
            others[list(some)] = False
            harmless = failed[list(some)].all(axis=0) & ~failed[others].any(axis=0)
            held[harmless] = TESTED
        return held

    def in_n(self, sizes: npt.NDArray[Any]) -> FloatArray:
        """Each sum as a polynomial in n that is nowhere smaller, for each of `sizes`, `(S, d - 1)`.

        Blocks that storages are rounded up to are charged in full where n decides.

        Returns:
            Coefficients of n⁰, n¹ and n², shape `(sums, 3, S)`.

        Raises:
            UntraceableError: a sum is not bounded by such a polynomial.
        """
        if len(sizes) > _CHUNK:
            parts = np.array_split(sizes, 1 + len(sizes) // _CHUNK)
            return np.concatenate([self.in_n(part) for part in parts], axis=2)
        used = sorted({at for total in self.sums for at, _ in total})
        blocks, rows = self.granularity, {}
        for at, row in zip(used, self._expressions.in_n(sizes, used), strict=True):
            if (row[1:] % blocks).any():
                row[0] += blocks - 1
            else:
                row[0] = np.ceil(row[0] / blocks) * blocks
            rows[at] = row
        sums = [sum(number * rows[at] for at, number in total) for total in self.sums]
        return np.asarray(sums, float)


def first_held(pieces: Sequence[Piece], shapes: IntArray) -> tuple[IntArray, npt.NDArray[np.int8]]:
    """The first piece that holds at each shape, else their number, and how it holds: `(S,)`."""
    owners = np.full(len(shapes), len(pieces))
    how = np.full(len(shapes), NOT_HELD, np.int8)
    for at in reversed(range(len(pieces))):
        held = pieces[at].holds(shapes)
        owners = np.where(held != NOT_HELD, at, owners)
        how = np.where(held != NOT_HELD, held, how)
    return owners, how


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Bytes at some shapes; bytes between them are interpolated.

    Each size has a column: bytes at some numbers of samples, with lines between them. Between two
    sizes, bytes are linear in each size along the same n · L₁ ⋯, as for most storages; or along the
    same n, as for a loop over parts of the batch.

    Attributes:
        sizes: ascending sizes of each axis.
        numbers: ascending numbers of samples of each column, two or more; none if nothing was
            measured. Columns are in the order of `itertools.product(*sizes)`.
        values: bytes at each of these numbers.
        most: the largest number of samples at which bytes are known.
        by_area: bytes are linear in sizes along the same n · L₁ ⋯; otherwise along the same n.
        reached: the most bytes that were measured; larger batches are not known.
        raised_share: the largest relative error on other shapes. Bytes are raised by it, or by
            `raised_bytes` if that is less.
        raised_bytes: the largest absolute error on other shapes.
        ends: the largest number of samples at which bytes are known, in each column; empty: `most`.
    """

    sizes: tuple[tuple[int, ...], ...]
    numbers: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]
    most: int
    by_area: bool = True
    reached: int = MAX_BYTES
    raised_share: float = 0.0
    raised_bytes: float = 0.0
    ends: tuple[int, ...] = ()

    @property
    def floor(self) -> float:
        """The least bytes of any shape."""
        return min(min(column) for column in self.values if column)

    def without_floor(self) -> Grid:
        """The grid of bytes above the floor."""
        floor = self.floor
        values = tuple(tuple(one - floor for one in column) for column in self.values)
        return replace(self, values=values, reached=MAX_BYTES)

    def extended(self) -> Grid:
        """The grid in which columns go on along the line of their last three bytes, if it is one.

        Other sums may be the peak for more samples: only real steps show it.
        """
        columns = zip(self.numbers, self.values, self.ends, strict=False)
        ends = (self.most if goes_on(n, values) else end for n, values, end in columns)
        return replace(self, ends=tuple(ends))

    def bytes_at(self, shapes: npt.ArrayLike) -> FloatArray:
        """Bytes at each shape, `(S, d)`: shape `(S,)`; 2⁶² if nothing was measured."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        area = shapes[:, 0] * self._areas(shapes[:, 1:])
        total = np.zeros(len(shapes))
        for columns, weight in self._corners(shapes[:, 1:]):
            for column in np.unique(columns[weight > 0]).tolist():
                mine = (columns == column) & (weight > 0)
                total[mine] += weight[mine] * self._along(column, area[mine])
        return total + np.minimum(self.raised_share * total, self.raised_bytes)

    def known_at(self, sizes: IntArray) -> IntArray:
        """Samples of each size, `(S, d)`, up to which bytes are known: shape `(S,)`."""
        known = np.full(len(sizes), float(self.most))
        ends = np.array(self.ends or [self.most] * len(self.numbers), float)
        area = self._areas(np.array([*product(*self.sizes)])) / self._areas(sizes)[:, None]
        row = np.arange(len(sizes))
        for columns, weight in self._corners(sizes):
            ended = (ends[columns] < self.most) & (weight > 0)
            fewer = np.minimum(known, ends[columns] * area[row, columns])
            known = np.where(ended, fewer, known)
        return known.astype(np.int64)

    def _areas(self, sizes: IntArray) -> FloatArray:
        """The factor of n that is kept in between two sizes, L₁ ⋯ or 1; shape `(S,)`."""
        if not self.by_area:
            return np.ones(len(sizes))
        ends = zip(*((nodes[0], nodes[-1]) for nodes in self.sizes), strict=True)
        areas: FloatArray = np.clip(sizes, *map(np.array, ends)).prod(axis=1).astype(float)
        return areas

    def _corners(self, sizes: IntArray) -> Iterator[tuple[IntArray, FloatArray]]:
        """The columns around each size, and their weights, shape `(S,)`, corner by corner."""
        corners, shares = [], []
        for nodes, own in zip(self.sizes, sizes.T, strict=True):
            known = np.array(nodes)
            inside = np.clip(own, known[0], known[-1])
            below = np.clip(np.searchsorted(known, inside, side="right") - 1, 0, len(known) - 1)
            above = np.minimum(below + 1, len(known) - 1)
            corners.append((below, above))
            shares.append((inside - known[below]) / np.maximum(known[above] - known[below], 1))
        for bits in product((0, 1), repeat=len(self.sizes)):
            at = tuple(pair[bit] for pair, bit in zip(corners, bits, strict=True))
            pairs = zip(shares, bits, strict=True)
            weight = np.prod([share if bit else 1 - share for share, bit in pairs], axis=0)
            yield np.ravel_multi_index(at, tuple(map(len, self.sizes))), weight

    def _along(self, column: int, area: FloatArray) -> FloatArray:
        if not self.numbers[column]:
            return np.full(len(area), 2.0**62)
        at = np.unravel_index(column, tuple(map(len, self.sizes)))
        pairs = zip(self.sizes, at, strict=True)
        size = math.prod(nodes[k] for nodes, k in pairs) if self.by_area else 1
        found = along(self.numbers[column], self.values[column], area / size)
        return np.maximum(found, self.floor)


def goes_on(numbers: Sequence[int], values: Sequence[float]) -> bool:
    """Whether the last three values at some numbers lie on a rising line."""
    slopes = np.diff(values[-3:]) / np.diff(numbers[-3:])
    return len(slopes) == 2 and bool(slopes.min() > 0 and slopes.max() <= _LINE * slopes.min())


def along(numbers: Sequence[int], values: Sequence[float], wanted: npt.ArrayLike) -> FloatArray:
    """Lines between values at some numbers; the first and the last line continue."""
    n, value, at = np.array(numbers, float), np.array(values), np.asarray(wanted, float)
    k = np.clip(np.searchsorted(n, at) - 1, 0, len(n) - 2)
    return np.asarray(value[k] + (value[k + 1] - value[k]) * (at - n[k]) / (n[k + 1] - n[k]))
