"""Parts of a cost: traces, expressions that hold for some shapes, and a grid for the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.expressions import Expressions, Node, UntraceableError
from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES

# Results of a piece for a shape.
NOT_HELD, TESTED, EXACT = 0, 1, 2
_CHUNK: Final = 2**10  # sizes at once
_MOST_CELLS: Final = 10**7  # of arrays of moments by shapes
_FEWER: Final = 4  # numbers of turns below those of a trace, each with a condition of its own


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
        sums: the sums of storages that are the peak somewhere.
        conditions: expressions that are true for every shape of this piece.
        harmless: sets of conditions, as rows of `failed`, that may fail together: concrete traces
            had the same bytes there.
        flops: expression of a step's floating-point operations.
    """

    nodes: tuple[Node, ...]
    sums: tuple[int, ...]
    conditions: tuple[int, ...]
    harmless: tuple[tuple[int, ...], ...]
    flops: int
    expressions: Expressions = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "expressions", Expressions.of(self.nodes))
        used = [*self.sums, *self.conditions, self.flops]
        if not all(isinstance(at, int) and 0 <= at < len(self.nodes) for at in used):
            raise CostError("a piece refers to an expression that it does not have")

    def weighted(self, each: float, byte: float, flop: float) -> Piece:
        """The piece of `each·n + byte·bytes + flop·operations`."""
        expressions = Expressions.of(self.nodes)
        node = expressions.node
        both = ((each, node("symbol", 0)), (flop, self.flops))
        beside = [node("Mul", node("float", factor), at) for factor, at in both]
        own = (node("Mul", node("float", byte), at) for at in self.sums)
        sums = tuple(node("Add", one, *beside) for one in own)
        return replace(self, nodes=tuple(expressions.nodes), sums=sums)

    def bytes_at(self, shapes: npt.ArrayLike) -> IntArray:
        """The traced peak at each shape, `(S, 1 + d)`: shape `(S,)`."""
        peaks: IntArray = self._totals(shapes).max(axis=0)
        return peaks

    def kept(self, shapes: npt.ArrayLike) -> Piece:
        """The piece with only those sums that are the peak at one of some shapes, `(S, 1 + d)`."""
        return replace(self, sums=tuple(self.sums[k] for k in np.unique(self.tops(shapes))))

    def tops(self, shapes: npt.ArrayLike) -> IntArray:
        """Which sum is the peak at each shape, `(S, 1 + d)`: shape `(S,)`."""
        tops: IntArray = self._totals(shapes).argmax(axis=0)
        return tops

    def _totals(self, shapes: npt.ArrayLike) -> IntArray:
        """Each sum at each shape, `(S, 1 + d)`: shape `(sums, S)`."""
        return np.array(self.expressions.evaluate(shapes, self.sums), np.int64)

    def failed(self, shapes: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Which conditions do not hold at each shape: shape `(conditions, S)`."""
        return np.array([one == 0 for one in self.expressions.evaluate(shapes, self.conditions)])

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
        """Each sum as a polynomial in n that is nowhere smaller, for each of `sizes`, `(S, d)`.

        Returns:
            Coefficients of n⁰, n¹ and n², shape `(sums, 3, S)`.

        Raises:
            UntraceableError: a sum is not bounded by such a polynomial.
        """
        parts = np.array_split(sizes, 1 + len(sizes) // _CHUNK)
        return np.concatenate([self.expressions.in_n(part, self.sums) for part in parts], axis=2)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The storages of two steps, and the shapes with this sequence of allocations and frees.

    Attributes:
        base: their conditions and floating-point operations: a piece without sums.
        sizes: expressions of the different bytes that storages take.
        events: the storage size of each event, an index of `sizes`.
        signs: +1 if a storage was allocated, −1 if it was freed.
        made: for each event, the one that allocated its storage.
        starts: the number of events up to the end of the first step, and of the second.
        assumed: how often the step branched on a value of a tensor, taken as `False`.
        seconds: of computing that it took.
    """

    base: Piece
    sizes: tuple[int, ...]
    events: IntArray
    signs: IntArray
    made: IntArray
    starts: tuple[int, int]
    assumed: int = 0
    seconds: float = 0.0

    def living(self, shapes: npt.ArrayLike) -> IntArray:
        """Bytes that live after each event at each shape, `(S, 1 + d)`: shape `(events, S)`."""
        sizes = np.array(self.base.expressions.evaluate(shapes, self.sizes), np.int64)
        return np.cumsum(sizes[self.events] * self.signs[:, None], axis=0)

    def peaks(self, shapes: npt.ArrayLike) -> IntArray:
        """The larger peak of both steps at each shape, `(S, 1 + d)`: shape `(S,)`."""
        peaks: IntArray = self.living(shapes).max(axis=0)
        return peaks

    def weight(self, shape: Sequence[int]) -> tuple[int, int]:
        """The larger peak of both steps at a shape, and the bytes of all allocations."""
        sizes = np.array(self.base.expressions.evaluate([shape], self.sizes), np.int64)
        return int(self.peaks([shape])[0]), int(sizes[self.events[self.signs > 0]].sum())

    @property
    def equalities(self) -> dict[Any, tuple[int, int, int]]:
        """The conditions that an expression has one value: row, expression and value, by its form.

        Without remainders that are 0, and sizes of 1, as of a last slice.
        """
        found, nodes = {}, self.base.nodes
        for row, at in enumerate(self.base.conditions):
            name, *parts = nodes[at]
            if name == "Equality" and nodes[parts[1]][0] == "int" and nodes[parts[1]][1] > 1:
                form = self.base.expressions.form(parts[0], integers=True)
                found[form] = row, parts[0], nodes[parts[1]][1]
        return found

    def piece(self, shapes: npt.ArrayLike) -> Piece:
        """Keep the running sums that are the peak at one of many shapes, `(S, 1 + d)`."""
        each = np.eye(len(self.sizes))[self.events] * self.signs[:, None]
        counts = each.cumsum(axis=0)[self.signs > 0]
        expressions = Expressions.of(self.base.nodes)
        sums = _peaks(expressions, self.sizes, counts, shapes)
        return replace(self.base, nodes=tuple(expressions.nodes), sums=tuple(sorted(sums)))


def _peaks(
    expressions: Expressions, sizes: Sequence[int], counts: npt.NDArray[Any], shapes: npt.ArrayLike
) -> set[int]:
    """The running sums that are the peak at one of many shapes, `(S, 1 + d)`.

    Args:
        expressions: to which they are added.
        sizes: expressions of the bytes of storages.
        counts: the storages of each size that live at each moment, shape `(moments, sizes)`.
        shapes: of the batch.
    """
    values = np.array(expressions.evaluate(shapes, sizes), float)
    count = 1 + values.shape[1] * len(counts) // _MOST_CELLS
    parts = np.array_split(values, count, axis=1)
    tops = np.unique([top for part in parts for top in (counts @ part).argmax(axis=0).tolist()])
    return {expressions.total(sizes, counts[top].astype(int).tolist()) for top in tops}


def joined(one: Trace, other: Trace) -> Trace:
    """The trace for any value of the expression in which two traces differ.

    Every number in it is linear in that value.

    Raises:
        UntraceableError: they differ in more than numbers.
    """
    turns = _Turns(one, other)
    if not np.array_equal(one.signs, other.signs):
        raise UntraceableError("the traces have other storages")
    pairs = [*zip(one.events.tolist(), other.events.tolist(), strict=True)]
    kinds = {pair: k for k, pair in enumerate(dict.fromkeys(pairs))}
    sizes = tuple(turns.of(one.sizes[a], other.sizes[b]) for a, b in kinds)
    events = np.array([kinds[pair] for pair in pairs])
    return replace(one, base=turns.base(), sizes=sizes, events=events)


def continued(one: Trace, other: Trace, shapes: npt.ArrayLike) -> Piece:
    """The piece of a loop with any number of turns, from traces with two numbers of turns.

    All events of the first trace are found in the second one, which has more turns somewhere
    between them. Numbers that differ, in expressions and of storages, grow equally in each turn.

    Args:
        one: with the fewer turns.
        other: with more turns.
        shapes: of which each has its peak among the sums that are kept, `(S, 1 + d)`.

    Raises:
        UntraceableError: the traces differ in another way.
    """
    turns = _Turns(one, other)
    places = _placed(*_alike(one, other))
    sums = set().union(*(turns.sums(its, shapes) for its in places))
    return replace(turns.base(), sums=tuple(sorted(sums)))


def _alike(*traces: Trace) -> list[IntArray]:
    """A number for each event: the same for equal bytes, or for those that differ in integers."""
    sizes = [[one.base.expressions.form(at, integers=True) for at in one.sizes] for one in traces]
    both = set.intersection(*map(set, sizes))
    found = []
    for trace, its in zip(traces, sizes, strict=True):
        forms = map(trace.base.expressions.form, trace.sizes)
        found.append(
            [size if size in both else form for size, form in zip(its, forms, strict=True)]
        )
    pairs = zip(traces, _numbered(*found), strict=True)
    return [trace.signs * (1 + numbers[trace.events]) for trace, numbers in pairs]


def _numbered(*items: Sequence[Any]) -> list[IntArray]:
    """A number for each item, the same for equal ones."""
    known: dict[Any, int] = {}
    return [np.array([known.setdefault(one, len(known)) for one in some]) for some in items]


def _placed(one: IntArray, other: IntArray) -> tuple[IntArray, IntArray]:
    """The places of one array's items in the other, from the first item on, and from the last."""
    last = len(other) - 1
    return _places(one, other), last - _places(one[::-1], other[::-1])[::-1]


def _places(one: IntArray, other: IntArray) -> IntArray:
    """The place of each item of an array in the other one; only where they differ, it skips some.

    Raises:
        UntraceableError: the other one has not all of them, in this order.
    """
    places, at, more = np.zeros_like(one), 0, len(other) - len(one)
    for k, item in enumerate(one.tolist()):
        if at > k + more or other[at] != item:
            # Further items are here: the place from which most items are the same.
            runs = [_run(one[k:], other[j:]) for j in range(at, k + more + 1)]
            if not max(runs, default=0):
                raise UntraceableError("a turn of the loop differs from the others")
            at += runs.index(max(runs))
        places[k] = at
        at += 1
    return places


def _run(one: IntArray, other: IntArray) -> int:
    """How many items are equal from the start on."""
    most = min(len(one), len(other))
    unequal = one[:most] != other[:most]
    return int(unequal.argmax()) if unequal.any() else most


class _Turns:
    """Joins two traces that differ in the value of one expression, as in a loop's turns.

    Attributes:
        joined: the expressions for any value.
    """

    def __init__(self, one: Trace, other: Trace) -> None:
        self._one, self._other, self.joined = one, other, Expressions()
        mine, its = one.equalities, other.equalities
        # A turn may have conditions: those of the first ones are joined, and those of the last.
        forms = ([*map(one.expressions.form, one.conditions)] for one in (one.base, other.base))
        places = (enumerate(own.tolist()) for own in _placed(*_numbered(*forms)))
        changed = [form for form in mine if form in its and mine[form][2] != its[form][2]]
        if len(changed) != 1:
            raise UntraceableError("the traces have other conditions")
        (row, turns, self._first), (its_row, same, second) = mine[changed[0]], its[changed[0]]
        self._pairs = sorted({pair for own in places for pair in own} - {(row, its_row)})
        self._more = 0
        self._number = self.of(turns, same)
        self._more = second - self._first

    def of(self, at: int, its: int) -> int:
        """The joined expression of two: of the first trace, and of the second."""
        mine, others = self._one.base.expressions, self._other.base.expressions
        if mine.form(at) != others.form(its):
            raise UntraceableError("the traces have other expressions")
        (name, *parts), (_, *same) = mine.nodes[at], others.nodes[its]
        if name == "int":
            return self._rising(parts[0], same[0])
        is_leaf = name in ("symbol", "float")
        return self.joined.node(name, *(parts if is_leaf else map(self.of, parts, same)))

    def _rising(self, first: int, second: int) -> int:
        """A number that grows in each turn."""
        node = self.joined.node
        if first == second:
            return node("int", first)
        if not self._more or (second - first) % self._more:
            raise UntraceableError("a number does not grow in each turn")
        each = (second - first) // self._more
        grown = node("Mul", node("int", each), self._number)
        return node("Add", node("int", first - each * self._first), grown)

    def base(self) -> Piece:
        """The conditions of both traces; in place of the equality, "at most" and "at least".

        Concrete traces may show that one of them does not matter. Fewer turns than were traced
        have a condition for each number of them, so that each is tested for itself.
        """
        node, mine, its = self.joined.node, self._one.base, self._other.base
        same = (self.of(mine.conditions[a], its.conditions[b]) for a, b in self._pairs)
        fewer = _FEWER if len(self._one.events) < len(self._other.events) else 0
        ends = range(max(self._first - fewer, 2), self._first + 1)
        least = (node("GreaterThan", self._number, node("int", end)) for end in ends)
        most = node("LessThan", self._number, node("int", self._first))
        conditions = (*same, *least, most)
        flops = self.of(mine.flops, its.flops)
        return replace(mine, nodes=tuple(self.joined.nodes), conditions=conditions, flops=flops)

    def sums(self, places: IntArray, shapes: npt.ArrayLike) -> set[int]:
        """The running sums that are the peak at one of many shapes, `(S, 1 + d)`.

        Args:
            places: for each event of the first trace, the one of the second.
            shapes: of the batch.
        """
        one, other = self._one, self._other
        made = np.flatnonzero(one.signs > 0)
        pairs = [*zip(one.events[made].tolist(), other.events[places[made]].tolist(), strict=True)]
        kinds = {pair: k for k, pair in enumerate(dict.fromkeys(pairs))}
        # Those of further turns are like others of the same size.
        alike = {pair[1]: k for pair, k in kinds.items()}
        if not alike.keys() >= {*other.events.tolist()}:
            raise UntraceableError("a turn of the loop has other storages")
        own, its = np.zeros_like(one.events), np.array([alike[k] for k in other.events.tolist()])
        own[made] = its[places[made]] = [kinds[pair] for pair in pairs]
        each = np.eye(len(kinds), dtype=np.int64)
        mine = (each[own[one.made]] * one.signs[:, None]).cumsum(axis=0)[made]
        others = (each[its[other.made]] * other.signs[:, None]).cumsum(axis=0)[places[made]]
        if ((others - mine) % self._more).any():
            raise UntraceableError("the storages do not grow in each turn")
        node, sizes = self.joined.node, [self.of(one.sizes[a], other.sizes[b]) for a, b in kinds]
        further = node("Add", self._number, node("int", -self._first))
        sizes += [node("Mul", further, at) for at in sizes]
        return _peaks(self.joined, sizes, np.hstack([mine, (others - mine) // self._more]), shapes)


def first_held(pieces: Sequence[Piece], shapes: IntArray) -> tuple[IntArray, npt.NDArray[np.int8]]:
    """The index of the first piece that holds at each shape, or `len(pieces)`; how it holds."""
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
    sizes, bytes are linear in each size along the same n · L₁ ⋯, as for most storages. Where they
    jump, those of the upper size hold, along the same n.

    Attributes:
        sizes: ascending sizes of each axis.
        numbers: ascending numbers of samples of each column, two or more; none if nothing was
            measured. Columns are in the order of `itertools.product(*sizes)`.
        values: bytes at each of these numbers.
        ends: the largest number of samples at which bytes are known, in each column.
        reached: the most bytes that were measured; larger batches are not known.
        raised: the share by which bytes are raised, for the largest error on other shapes.
        jumps: for each axis, the sizes below which bytes jump; empty: nowhere.
    """

    sizes: tuple[tuple[int, ...], ...]
    numbers: tuple[tuple[int, ...], ...]
    values: tuple[tuple[float, ...], ...]
    ends: tuple[int, ...]
    reached: int = MAX_BYTES
    raised: float = 0.0
    jumps: tuple[tuple[int, ...], ...] = ()

    @property
    def floor(self) -> float:
        """The least bytes of any shape."""
        return min(min(column) for column in self.values if column)

    def without_floor(self) -> Grid:
        """The grid of bytes above the floor."""
        floor = self.floor
        values = tuple(tuple(one - floor for one in column) for column in self.values)
        return replace(self, values=values, reached=MAX_BYTES)

    def weighted(self, each: float, byte: float) -> Grid:
        """The grid of `each·n + byte·bytes`."""
        columns = zip(self.numbers, self.values, strict=True)
        values = tuple(
            tuple(each * n + byte * one for n, one in zip(*column, strict=True))
            for column in columns
        )
        return replace(self, values=values, reached=MAX_BYTES)

    def bytes_at(self, shapes: npt.ArrayLike) -> FloatArray:
        """Bytes at each shape, `(S, 1 + d)`: shape `(S,)`; 2⁶² if nothing was measured."""
        shapes = np.atleast_2d(np.asarray(shapes, np.int64))
        sizes = self.with_jumps(shapes[:, 1:])
        area = shapes[:, 0] * self._areas(sizes)
        total = np.zeros(len(shapes))
        for columns, weight in self._corners(sizes):
            for column in np.unique(columns[weight > 0]).tolist():
                mine = (columns == column) & (weight > 0)
                total[mine] += weight[mine] * self._along(column, area[mine])
        return total * (1 + self.raised)

    def known_at(self, sizes: IntArray) -> IntArray:
        """Samples of each size, `(S, d)`, up to which bytes are known: shape `(S,)`."""
        sizes = self.with_jumps(sizes)
        known, ends = np.full(len(sizes), float(max(self.ends))), np.array(self.ends, float)
        area = self._areas(np.array([*product(*self.sizes)])) / self._areas(sizes)[:, None]
        row = np.arange(len(sizes))
        for columns, weight in self._corners(sizes):
            ended = (ends[columns] < ends.max()) & (weight > 0)
            fewer = np.minimum(known, ends[columns] * area[row, columns])
            known = np.where(ended, fewer, known)
        return known.astype(np.int64)

    def with_jumps(self, sizes: IntArray) -> IntArray:
        """The sizes, `(S, d)`, or the next ones of the grid where bytes jump below them."""
        found = sizes.copy()
        for axis, jumps in enumerate(self.jumps):
            known = np.array(self.sizes[axis])
            above = known[np.searchsorted(known[:-1], sizes[:, axis])]
            found[:, axis] = np.where(np.isin(above, jumps), above, sizes[:, axis])
        return found

    def _areas(self, sizes: IntArray) -> FloatArray:
        """The factor of n that is kept in between two sizes, L₁ ⋯; shape `(S,)`."""
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
        size = math.prod([*product(*self.sizes)][column])
        n, value, at = np.array(self.numbers[column]), self.values[column], area / size
        k = np.clip(np.searchsorted(n, at) - 1, 0, len(n) - 2)
        low, high = np.array(value)[[k, k + 1]]
        found = low + (high - low) * (at - n[k]) / (n[k + 1] - n[k])
        return np.asarray(np.maximum(found, self.floor))
