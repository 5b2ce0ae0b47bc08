"""Parts of a cost: expressions that hold for some shapes, and a grid for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.expressions import Expressions, Node
from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES

# What a piece says of a shape.
NOT_HELD, TESTED, EXACT = 0, 1, 2
_CHUNK: Final = 2**13  # sizes at once


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
        n: samples.
        size: padded size, one int per axis.
        peak_bytes: the peak of its step.
        held_out: whether it was left out of the fit, to judge it.
        how: "trace" or "run".
        seconds: duration of the step; `None` where it was traced.
    """

    n: int
    size: tuple[int, ...]
    peak_bytes: int
    held_out: bool
    how: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The peak of a step as an expression of the shape, and the shapes at which it holds.

    Attributes:
        nodes: of `Expressions`.
        sums: the sums of storages that are the peak somewhere, as `(expression, number)` pairs.
        conditions: expressions that hold of a shape of this piece.
        fixed: the value of each coordinate that has no symbol, `None` of others.
        harmless: sets of conditions, as rows of `failed`, that may fail together: concrete traces
            had the same bytes there.
        granularity: bytes of a storage are a multiple of it.
        flops: of a step, an expression.
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

    def flops_at(self, shapes: npt.ArrayLike) -> FloatArray:
        """Floating-point operations of a step at each shape."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        [flops] = self._expressions.evaluate(shapes, [self.flops])
        return np.broadcast_to(np.asarray(flops, float), len(shapes))

    def holds(self, shapes: npt.ArrayLike) -> npt.NDArray[np.int8]:
        """`EXACT` where every condition holds, `TESTED` where a harmless set fails, else 0."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Bytes at some shapes, in between interpolated.

    Between two sizes, `(bytes - floor) / (n · L₁ ⋯)` is linear in each size, as of a step with
    terms in n·L and n·L²; between two numbers of samples, bytes are linear.

    Attributes:
        numbers: of samples, ascending.
        sizes: ascending, for each axis.
        values: bytes at each of them, shape `(numbers, sizes of the first axis, …)`; 2⁶² where they
            were not measured.
        floor: bytes that do not depend on the batch.
        reached: the most bytes that were measured; beyond them nothing is known.
    """

    numbers: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]
    values: npt.NDArray[np.float64]
    floor: float
    reached: int = MAX_BYTES

    def at(self, sizes: npt.NDArray[Any]) -> FloatArray:
        """Bytes for each of `numbers` and of `sizes`, `(S, d - 1)`: shape `(numbers, S)`."""
        corners, shares = [], []
        for nodes, column in zip(self.sizes, sizes.T, strict=True):
            known = np.array(nodes)
            column = np.clip(column, known[0], known[-1])
            below = np.clip(np.searchsorted(known, column, side="right") - 1, 0, len(known) - 1)
            above = np.minimum(below + 1, len(known) - 1)
            span = np.maximum(known[above] - known[below], 1)
            corners.append((below, above))
            shares.append((column - known[below]) / span)
        numbers = np.array(self.numbers, float)[:, None]
        total = np.zeros((len(self.numbers), len(sizes)))
        area = numbers * np.prod(sizes.astype(float), axis=1)
        for bits in product((0, 1), repeat=len(self.sizes)):
            at = tuple(pair[bit] for pair, bit in zip(corners, bits, strict=True))
            weight = np.prod(
                [s if bit else 1 - s for s, bit in zip(shares, bits, strict=True)], axis=0
            )
            each = np.prod([np.array(n)[k] for n, k in zip(self.sizes, at, strict=True)], axis=0)
            part = (self.values[(slice(None), *at)] - self.floor) / (numbers * each)
            total += np.where(weight > 0, weight * part, 0)
        return np.asarray(self.floor + total * area, float)

    def bytes_at(self, shapes: npt.ArrayLike) -> FloatArray:
        """Bytes at each shape, `(S, d)`: shape `(S,)`."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        at_numbers = self.at(shapes[:, 1:])
        known, n = np.array(self.numbers), shapes[:, 0]
        below = np.clip(np.searchsorted(known, n, side="right") - 1, 0, max(len(known) - 2, 0))
        above = np.minimum(below + 1, len(known) - 1)
        share = (n - known[below]) / np.maximum(known[above] - known[below], 1)
        columns = np.arange(len(n))
        low, high = at_numbers[below, columns], at_numbers[above, columns]
        return np.asarray(low + share * (high - low), float)
