"""Parts of a cost: traces, pieces that hold for some shapes, and a grid for the others.

A `Trace` records the storages of one traced step. Its `Piece` has the sums of storages that are the
peak somewhere, as expressions of the shape, and the conditions under which the step allocates in
the same way. A loop is traced twice, with other numbers of turns: `joined` and `continued` make one
trace or piece of both that holds for any number. A `Grid` interpolates between shapes that were
traced or run one by one.
"""

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
_CHUNK: Final = 2**10  # sizes whose polynomials are computed at once
_MOST_CELLS: Final = 10**7  # moments × shapes in one array
# Fewer turns of a loop than were traced may take other bytes. So many numbers of turns below those
# of the trace have a condition each, and each condition is tested by a trace of its own.
_FEWER: Final = 4


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

    def weighted(self, flop: float, byte: float, above: float, knee: int) -> Piece:
        """The piece of `flop·operations + byte·bytes + above·(bytes above a knee)`."""
        expressions = Expressions.of(self.nodes)
        node = expressions.node
        operations = node("Mul", node("float", flop), self.flops) if flop else node("int", 0)
        # Whichever of the two lines is higher counts, as with all sums.
        lines = [(byte, 0.0)] if not above else [(byte, 0.0), (byte + above, -above * knee)]
        sums = [
            node("Add", node("float", fixed), node("Mul", node("float", slope), at), operations)
            for slope, fixed in lines
            for at in self.sums
        ]
        return replace(self, nodes=tuple(expressions.nodes), sums=tuple(sums))

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

    def peak(self, shape: Sequence[int]) -> int:
        """The larger peak of both steps at a shape."""
        return int(self.living([shape]).max())

    def weight(self, shape: Sequence[int]) -> tuple[int, int]:
        """The larger peak of both steps at a shape, and the bytes of all allocations."""
        sizes = np.array(self.base.expressions.evaluate([shape], self.sizes), np.int64)
        return self.peak(shape), int(sizes[self.events[self.signs > 0]].sum())

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
        counts = _living_kinds(self, self.events, len(self.sizes))[self.signs > 0]
        expressions = Expressions.of(self.base.nodes)
        sums = _peaks(expressions, self.sizes, counts, shapes)
        return replace(self.base, nodes=tuple(expressions.nodes), sums=tuple(sorted(sums)))


def _peaks(
    expressions: Expressions, sizes: Sequence[int], counts: IntArray, shapes: npt.ArrayLike
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
    return {expressions.total(sizes, counts[top].tolist()) for top in tops}


def joined(one: Trace, other: Trace) -> Trace:
    """Return the trace for any value of the expression in which two traces differ.

    Both traces have the same events, and every number in them is linear in that value. Traces of
    windows of 5 and of 8 samples may be joined so.

    Raises:
        UntraceableError: they differ in more than numbers.
    """
    turns = _Turns(one, other)
    if not np.array_equal(one.signs, other.signs):
        raise UntraceableError("the traces have other storages")
    pairs = [*zip(one.events.tolist(), other.events.tolist(), strict=True)]
    sizes = tuple(turns.of(one.sizes[a], other.sizes[b]) for a, b in dict.fromkeys(pairs))
    [events] = _numbered(pairs)
    return replace(one, base=turns.base(), sizes=sizes, events=events)


def continued(one: Trace, other: Trace, shapes: npt.ArrayLike) -> Piece:
    """Return the piece of a loop with any number of turns, from traces with two numbers of turns.

    The second trace has all events of the first one, and those of its further turns between them.
    Numbers that differ, in expressions and of storages, grow equally in each turn. Of a loop
    `for chunk in x.split(100)`, traces of 500 and of 800 rows have 5 and 8 turns; their piece holds
    for any number of rows.

    Args:
        one: the trace with fewer turns.
        other: the trace with more turns.
        shapes: of which each has its peak among the sums that are kept, `(S, 1 + d)`.

    Raises:
        UntraceableError: the traces differ in another way.
    """
    turns = _Turns(one, other)
    found: set[int] = set()
    for places in _placed(*_event_kinds(one, other)):
        found |= turns.sums(places, shapes)
    return replace(turns.base(), sums=tuple(sorted(found)))


def _event_kinds(*traces: Trace) -> list[IntArray]:
    """A number for each event of each trace; events that may be the same have the same number.

    They are allocations, or releases, of equal bytes. Bytes that only one of the traces has are
    compared without their integers, which may grow with the number of turns.
    """
    sizes = [[one.base.expressions.form(at, integers=True) for at in one.sizes] for one in traces]
    common = set.intersection(*map(set, sizes))
    forms = []
    for trace, exact in zip(traces, sizes, strict=True):
        loose = map(trace.base.expressions.form, trace.sizes)
        forms.append([a if a in common else b for a, b in zip(exact, loose, strict=True)])
    pairs = zip(traces, _numbered(*forms), strict=True)
    return [trace.signs * (1 + numbers[trace.events]) for trace, numbers in pairs]


def _numbered(*lists: Sequence[Any]) -> list[IntArray]:
    """A number for each item of each list, the same for equal items."""
    known: dict[Any, int] = {}
    return [np.array([known.setdefault(item, len(known)) for item in items]) for items in lists]


def _placed(short: IntArray, long: IntArray) -> tuple[IntArray, IntArray]:
    """The place of each item of an array in a longer one, matched from the start and from the end.

    From the start, the further turns of a loop come last; from the end, they come first.
    """
    last = len(long) - 1
    return _places(short, long), last - _places(short[::-1], long[::-1])[::-1]


def _places(short: IntArray, long: IntArray) -> IntArray:
    """The place of each item of an array in a longer one, which is skipped only where both differ.

    Raises:
        UntraceableError: the longer one does not have all items in this order.
    """
    places, at, more = np.zeros_like(short), 0, len(long) - len(short)
    for k, item in enumerate(short.tolist()):
        if at > k + more or long[at] != item:
            # Further turns begin here: go on where most of the following items are the same.
            runs = [_equal_items(short[k:], long[j:]) for j in range(at, k + more + 1)]
            if not max(runs, default=0):
                raise UntraceableError("a turn of the loop differs from the others")
            at += runs.index(max(runs))
        places[k] = at
        at += 1
    return places


def _equal_items(first: IntArray, second: IntArray) -> int:
    """How many items of two arrays are equal, from their starts on."""
    most = min(len(first), len(second))
    unequal = first[:most] != second[:most]
    return int(unequal.argmax()) if unequal.any() else most


class _Turns:
    """Joins the expressions of two traces that differ in the value of one expression: the turns.

    An integer that is the same in both traces stays. One that differs becomes linear in the number
    of turns: of 5 turns and 500 rows, and of 8 turns and 800 rows, it is 100 · turns.

    Args:
        first: the trace with fewer turns.
        second: the trace with more turns.

    Attributes:
        joined: the expressions for any number of turns.
    """

    def __init__(self, first: Trace, second: Trace) -> None:
        self._first, self._second, self.joined = first, second, Expressions()
        equalities, second_equalities = first.equalities, second.equalities
        changed = [
            form
            for form, (_, _, value) in equalities.items()
            if form in second_equalities and second_equalities[form][2] != value
        ]
        if len(changed) != 1:
            raise UntraceableError("the traces have other conditions")
        row, turns, self._turns = equalities[changed[0]]
        second_row, second_turns, more = second_equalities[changed[0]]
        # A turn may have conditions: those of the first turns are joined, and those of the last.
        forms = ([*map(one.expressions.form, one.conditions)] for one in (first.base, second.base))
        matched = (enumerate(places.tolist()) for places in _placed(*_numbered(*forms)))
        pairs = {pair for places in matched for pair in places}
        self._conditions = sorted(pairs - {(row, second_row)})
        self._more = 0  # the turns themselves are joined as they are
        self._number = self.of(turns, second_turns)
        self._more = more - self._turns

    def of(self, at: int, second_at: int) -> int:
        """Return the joined expression of one in the first trace and one in the second."""
        first, second = self._first.base.expressions, self._second.base.expressions
        if first.form(at) != second.form(second_at):
            raise UntraceableError("the traces have other expressions")
        (name, *parts), (_, *second_parts) = first.nodes[at], second.nodes[second_at]
        if name == "int":
            return self._linear(parts[0], second_parts[0])
        if name in ("symbol", "float"):
            return self.joined.node(name, *parts)
        return self.joined.node(name, *map(self.of, parts, second_parts))

    def _linear(self, value: int, second_value: int) -> int:
        """An integer that is linear in the number of turns, from its values in both traces."""
        node = self.joined.node
        if value == second_value:
            return node("int", value)
        if not self._more or (second_value - value) % self._more:
            raise UntraceableError("a number does not grow in each turn")
        each = (second_value - value) // self._more
        grown = node("Mul", node("int", each), self._number)
        return node("Add", node("int", value - each * self._turns), grown)

    def base(self) -> Piece:
        """Return the conditions of both traces, with "at most" and "at least" for the turns.

        Concrete traces may show that one of them does not matter. Fewer turns than were traced
        have a condition for each number of them, so that each is tested for itself.
        """
        node, first, second = self.joined.node, self._first.base, self._second.base
        both = (self.of(first.conditions[a], second.conditions[b]) for a, b in self._conditions)
        fewer = _FEWER if len(self._first.events) < len(self._second.events) else 0
        ends = range(max(self._turns - fewer, 2), self._turns + 1)
        least = (node("GreaterThan", self._number, node("int", end)) for end in ends)
        most = node("LessThan", self._number, node("int", self._turns))
        conditions = (*both, *least, most)
        flops = self.of(first.flops, second.flops)
        return replace(first, nodes=tuple(self.joined.nodes), conditions=conditions, flops=flops)

    def sums(self, places: IntArray, shapes: npt.ArrayLike) -> set[int]:
        """Return the running sums that are the peak at one of many shapes, `(S, 1 + d)`.

        At each allocation of the first trace, each kind of storage lives so many times; in the
        second trace, at the same allocation, some kinds live more often: so much for each turn.

        Args:
            places: for each event of the first trace, the same one of the second.
            shapes: of the batch.
        """
        first, second = self._first, self._second
        made = np.flatnonzero(first.signs > 0)
        second_made = places[made]
        # A kind of storage: its size in the first trace, and in the second.
        pairs = [
            *zip(first.events[made].tolist(), second.events[second_made].tolist(), strict=True)
        ]
        kinds = {pair: k for k, pair in enumerate(dict.fromkeys(pairs))}
        # Storages of further turns are like others of the same size.
        by_size = {second_size: k for (_, second_size), k in kinds.items()}
        if not by_size.keys() >= {*second.events.tolist()}:
            raise UntraceableError("a turn of the loop has other storages")
        kind = np.zeros_like(first.events)
        second_kind = np.array([by_size[size] for size in second.events.tolist()])
        kind[made] = second_kind[second_made] = [kinds[pair] for pair in pairs]
        counts = _living_kinds(first, kind, len(kinds))[made]
        more = _living_kinds(second, second_kind, len(kinds))[second_made] - counts
        if (more % self._more).any():
            raise UntraceableError("the storages do not grow in each turn")
        node = self.joined.node
        sizes = [self.of(first.sizes[a], second.sizes[b]) for a, b in kinds]
        further = node("Add", self._number, node("int", -self._turns))
        sizes += [node("Mul", further, at) for at in sizes]
        return _peaks(self.joined, sizes, np.hstack([counts, more // self._more]), shapes)


def _living_kinds(trace: Trace, kind: IntArray, number: int) -> IntArray:
    """How many storages of each kind live after each event: shape `(events, kinds)`.

    Args:
        trace: of the events.
        kind: of the storage that each event allocates; shape `(events,)`.
        number: of kinds.
    """
    each = np.eye(number, dtype=np.int64)
    living: IntArray = (each[kind[trace.made]] * trace.signs[:, None]).cumsum(axis=0)
    return living


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

    def weighted(self, byte: float, above: float, knee: int) -> Grid:
        """The grid of `byte·bytes + above·(bytes above a knee)`."""
        values = tuple(
            tuple(byte * one + above * max(one - knee, 0) for one in column)
            for column in self.values
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
                counted = (columns == column) & (weight > 0)
                total[counted] += weight[counted] * self._along(column, area[counted])
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
        for nodes, lengths in zip(self.sizes, sizes.T, strict=True):
            known = np.array(nodes)
            inside = np.clip(lengths, known[0], known[-1])
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
        """Bytes of one column's size at the numbers of samples that have some areas."""
        if not self.numbers[column]:
            return np.full(len(area), 2.0**62)
        size = math.prod([*product(*self.sizes)][column])
        n, value, at = np.array(self.numbers[column]), self.values[column], area / size
        k = np.clip(np.searchsorted(n, at) - 1, 0, len(n) - 2)
        low, high = np.array(value)[[k, k + 1]]
        found = low + (high - low) * (at - n[k]) / (n[k + 1] - n[k])
        floor = min(min(values) for values in self.values if values)
        return np.asarray(np.maximum(found, floor))
