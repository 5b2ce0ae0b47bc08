"""Parts of a cost: traces, expressions that hold for some shapes, and a grid for the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.batch_recipe import Shape
from torchbudget.cost.expressions import Expressions, Node, UntraceableError
from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES

# Results of a piece for a shape.
NOT_HELD, TESTED, EXACT = 0, 1, 2
_CHUNK: Final = 2**13  # sizes at once
_MOST_CELLS: Final = 10**7  # of arrays of events by shapes
# Events that follow alike where a turn of a loop ends.
_ALIKE: Final = 16
# Slopes of one line: in a loss of 230 chunks, the last two differed by 0.0005.
_LINE: Final = 1.002


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
        peaks: IntArray = self._totals(shapes).max(axis=0)
        return peaks

    def kept(self, shapes: npt.ArrayLike) -> Piece:
        """The piece with only those sums that are the peak at one of some shapes, `(S, d)`."""
        largest = np.unique(self._totals(shapes).argmax(axis=0)).tolist()
        return replace(self, sums=tuple(self.sums[k] for k in largest))

    def _totals(self, shapes: npt.ArrayLike) -> IntArray:
        """Each sum at each shape, `(S, d)`: shape `(sums, S)`."""
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
        return totals

    def failed(self, shapes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Which conditions do not hold at each shape: shape `(coordinates + conditions, S)`."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        columns = zip(self.fixed, shapes.T, strict=True)
        rows = [column < 2 if one is None else column != one for one, column in columns]
        values = self._expressions.evaluate(shapes, self.conditions)
        return np.array(
            [*rows, *(~np.broadcast_to(one, len(shapes)).astype(bool) for one in values)], bool
        )

    @property
    def equalities(self) -> list[int]:
        """The rows of `failed` that are equalities: a symbol turned into a number.

        A coordinate that is fixed to 1 is none: torch only takes another kernel there.
        """
        rows = enumerate(self.conditions, start=len(self.fixed))
        return [row for row, at in rows if self.nodes[at][0] == "Equality"]

    def holds(self, shapes: npt.ArrayLike) -> npt.NDArray[np.int8]:
        """`EXACT` if every condition holds, `TESTED` if a harmless set fails, else 0."""
        failed = self.failed(shapes)
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
class Trace:
    """The storages of two steps, and the shapes with this sequence of allocations and frees.

    Attributes:
        expressions: expressions that the other attributes refer to.
        sizes: the different sizes of storages in bytes, as numbers of expressions.
        events: the storage size of each event, an index of `sizes`.
        signs: +1 if a storage was allocated, −1 if it was freed.
        made: for each event, the one that allocated its storage.
        starts: the event at which the second step begins, and the number of events.
        conditions: expressions that are true for these shapes.
        fixed: the value of each coordinate that has no symbol, `None` of others.
        granularity: each storage takes a multiple of it, in bytes.
        flops: floating-point operations of the second step, as an expression.
        assumed: how often the step branched on a value of a tensor, taken as `False`.
        seconds: of computing that it took.
    """

    expressions: Expressions
    sizes: tuple[int, ...]
    events: IntArray
    signs: IntArray
    made: IntArray
    starts: tuple[int, int]
    conditions: tuple[int, ...]
    fixed: tuple[int | None, ...]
    granularity: int
    flops: int
    assumed: int = 0
    seconds: float = 0.0

    def living(self, shapes: npt.ArrayLike) -> IntArray:
        """Bytes that live after each event at each shape, `(S, d)`: shape `(events, S)`."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        values = self.expressions.evaluate(shapes, self.sizes)
        sizes = np.array([np.broadcast_to(one, len(shapes)) for one in values], np.int64)
        blocks = -(-sizes // self.granularity) * self.granularity
        living: IntArray = np.cumsum(blocks[self.events] * self.signs[:, None], axis=0)
        return living

    def peaks(self, shapes: npt.ArrayLike) -> IntArray:
        """The larger peak of both steps at each shape, `(S, d)`: shape `(S,)`."""
        peaks: IntArray = self.living(shapes).max(axis=0)
        return peaks

    @property
    def loop(self) -> tuple[int, int, int]:
        """The row of the one condition that is an equality, and its expression and number.

        Raises:
            UntraceableError: there is none, or there are several.
        """
        nodes = self.expressions.nodes
        rows = [row for row, at in enumerate(self.conditions) if nodes[at][0] == "Equality"]
        if len(rows) != 1:
            raise UntraceableError("there is not one loop")
        _, turns, number = nodes[self.conditions[rows[0]]]
        if nodes[number][0] != "int":
            raise UntraceableError("the number of turns is no number")
        return rows[0], turns, nodes[number][1]

    def piece(self, shapes: npt.ArrayLike) -> Piece:
        """Keep the running sums that are the peak at one of many shapes, `(S, d)`."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        tops: set[int] = set()
        for some in np.array_split(shapes, 1 + len(shapes) * len(self.events) // _MOST_CELLS):
            tops.update(self.living(some).argmax(axis=0).tolist())
        sums = set()
        for top in tops:
            counts = np.bincount(self.events[: top + 1], self.signs[: top + 1])
            used = np.flatnonzero(counts).tolist()
            sums.add(tuple((self.sizes[k], int(counts[k])) for k in used))
        return Piece(
            nodes=tuple(self.expressions.nodes),
            sums=tuple(sorted(sums)),
            conditions=self.conditions,
            fixed=self.fixed,
            harmless=(),
            granularity=self.granularity,
            flops=self.flops,
        )

    def forms(self, known: dict[Any, int]) -> list[int]:
        """A number for each event: the same for all whose bytes differ in integers alone.

        Args:
            known: numbers of forms; new ones are added.
        """
        forms = (self.expressions.form(at) for at in self.sizes)
        numbers = np.array([known.setdefault(form, 1 + len(known)) for form in forms])
        signed: list[int] = (self.signs * numbers[self.events]).tolist()
        return signed

    def same(self, other: Trace, shape: Shape) -> bool:
        """Whether another trace has the same storages at a shape, in the same order."""
        return len(self.events) == len(other.events) and np.array_equal(
            self.living([shape]), other.living([shape])
        )


def continued(one: Trace, other: Trace, shapes: npt.ArrayLike) -> tuple[Piece, int]:
    """A loop of any number of turns, from traces of two numbers of them.

    All events of the first trace are found in the second one, which has more turns somewhere
    between them. Numbers that differ, in expressions and of storages, grow as much in each turn.

    Args:
        one: with the fewer turns.
        other: with more turns.
        shapes: of which each has its peak among the sums that are kept, `(S, d)`.

    Returns:
        The piece, and its expression for the number of turns.

    Raises:
        UntraceableError: the traces differ in another way.
    """
    turns = _Turns(one, other)
    known: dict[Any, int] = {}
    mine, its = one.forms(known), other.forms(known)
    last = len(its) - 1
    sums = turns.sums(_places(mine, its)) | turns.sums(last - _places(mine[::-1], its[::-1])[::-1])
    return turns.piece(tuple(sorted(sums))).kept(shapes), turns.number


def _places(one: list[int], other: list[int]) -> IntArray:
    """Where each item of a list is in another list that has some more items, as late as possible.

    Raises:
        UntraceableError: they are not all in it.
    """
    places, at = [], 0
    for k, item in enumerate(one):
        if at >= len(other) or other[at] != item:
            some = one[k : k + _ALIKE]
            later = (j for j in range(at, len(other)) if other[j : j + len(some)] == some)
            at = next(later, len(other))
            if at == len(other):
                raise UntraceableError("a turn of the loop differs from the others")
        places.append(at)
        at += 1
    return np.array(places)


class _Turns:
    """Joins the expressions of two traces that differ in the number of a loop's turns."""

    def __init__(self, one: Trace, other: Trace) -> None:
        self.one, self.other, self.joined = one, other, Expressions()
        self._row, turns, self._first = one.loop
        row, others, second = other.loop
        conditions = len(one.conditions), len(other.conditions)
        if row != self._row or one.fixed != other.fixed or conditions[0] != conditions[1]:
            raise UntraceableError("the traces have other conditions")
        self._more = 0
        self.number = self._of(turns, others)
        self._more = second - self._first

    def _of(self, at: int, its: int) -> int:
        """The expression that is one in the first trace, and another in the second."""
        mine, others = self.one.expressions, self.other.expressions
        if mine.form(at) != others.form(its):
            raise UntraceableError("the traces have other expressions")
        (name, *parts), (_, *same) = mine.nodes[at], others.nodes[its]
        if name == "int":
            return self._rising(parts[0], same[0])
        is_leaf = name in ("symbol", "float")
        return self.joined.node(name, *(parts if is_leaf else map(self._of, parts, same)))

    def _rising(self, first: int, second: int) -> int:
        """A number that grows in each turn."""
        node = self.joined.node
        if first == second:
            return node("int", first)
        if not self._more or (second - first) % self._more:
            raise UntraceableError("a number does not grow in each turn")
        each = (second - first) // self._more
        grown = node("Mul", node("int", each), self.number)
        return node("Add", node("int", first - each * self._first), grown)

    def sums(self, places: IntArray) -> set[tuple[tuple[int, int], ...]]:
        """The storages that live after each allocation.

        Args:
            places: for each event of the first trace, the one of the second.
        """
        one, other, blocks = self.one, self.other, self.joined.node("int", self.one.granularity)
        made = np.flatnonzero(one.signs > 0)
        pairs = [*zip(one.events[made].tolist(), other.events[places[made]].tolist(), strict=True)]
        kinds = {pair: k for k, pair in enumerate(dict.fromkeys(pairs))}
        # Those of further turns are like others of the same size.
        alike = {pair[1]: k for pair, k in kinds.items()}
        if not alike.keys() >= {*other.events.tolist()}:
            raise UntraceableError("a turn of the loop has other storages")
        own, its = np.zeros_like(one.events), np.array([alike[k] for k in other.events.tolist()])
        own[made] = its[places[made]] = [kinds[pair] for pair in pairs]
        before = _living(own[one.made], one.signs, len(kinds))[made]
        grown = _living(its[other.made], other.signs, len(kinds))[places[made]] - before
        if (grown % self._more).any():
            raise UntraceableError("the number of storages does not grow in each turn")
        found = set()
        expressions = [self._of(one.sizes[a], other.sizes[b]) for a, b in kinds]
        for counts in np.unique(np.hstack([before, grown]), axis=0).tolist():
            each = zip(expressions, counts[: len(kinds)], counts[len(kinds) :], strict=True)
            total = []
            for at, number, more in each:
                if more:
                    whole = self.joined.node("Mul", blocks, self.joined.node("CeilDiv", at, blocks))
                    rising = self._rising(number, number + more)
                    total.append((self.joined.node("Mul", rising, whole), 1))
                elif number:
                    total.append((at, number))
            found.add(tuple(total))
        return found

    def piece(self, sums: tuple[tuple[tuple[int, int], ...], ...]) -> Piece:
        """The piece of some sums."""
        both = [*zip(self.one.conditions, self.other.conditions, strict=True)]
        del both[self._row]
        first = self.joined.node("int", self._first)
        # Together they are the equality; but one of them may fail, if traces show it.
        ends = [self.joined.node(name, self.number, first) for name in ("LessThan", "GreaterThan")]
        return Piece(
            conditions=(*ends, *(self._of(at, its) for at, its in both)),
            flops=self._of(self.one.flops, self.other.flops),
            nodes=tuple(self.joined.nodes),
            sums=sums,
            fixed=self.one.fixed,
            harmless=(),
            granularity=self.one.granularity,
        )


def _living(kinds: IntArray, signs: IntArray, number: int) -> IntArray:
    """How many storages of each kind live after each event: shape `(events, kinds)`."""
    each = np.zeros((len(kinds), number), np.int64)
    each[np.arange(len(kinds)), kinds] = signs
    living: IntArray = each.cumsum(axis=0)
    return living


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
