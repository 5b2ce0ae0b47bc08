"""Traces that cover a domain: symbolic pieces, checked by concrete ones, and a grid elsewhere.

`Covering.cover` draws some hundred shapes, and then works on those that nothing covers yet:

1. `_cover` traces the step with symbols, at the middle of the shapes that are left. The trace gives
   a piece, which holds wherever the step takes the same branches.
2. `_continued` extends the piece of a step that loops to other numbers of turns.
3. `_tested` compares the piece with concrete traces, where it holds and where a condition fails
   that may not matter. What agrees is covered. Then 1. again.
4. `_make_grid` traces what is left one shape at a time, as columns of a grid. It adds columns until
   other shapes, which are held out, are right, and raises the grid by the error that remains.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.batch_recipe import Recipe, Shape
from torchbudget.cost.expressions import UntraceableError
from torchbudget.cost.pieces import (
    NOT_HELD,
    Grid,
    Piece,
    Probe,
    Trace,
    continued,
    first_held,
    joined,
)
from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.cost.subject import Subject
from torchbudget.cost.tracing import Tracer, ValueDependentError
from torchbudget.units import format_bytes

# Pieces.
# Shapes that are drawn to see which of them each piece covers.
_DRAWN_SHAPES: Final = 400
# A piece is poor if it adds less than this share of the drawn shapes. After so many poor pieces no
# more are traced: every shape may have a trace of its own.
_POOR_SHARE: Final = 0.03
_MOST_POOR_PIECES: Final = 3
_MOST_PIECES: Final = 8
# Of computing for pieces: then, no further failed conditions are tested.
_PIECES_SECONDS: Final = 60.0
# Most samples in traces that are compared; with a budget, more if they fit.
_COMPARED_SAMPLES: Final = 256
_MOST_COMPARED_SAMPLES: Final = 2**13
# Of so many shapes at which a set of conditions fails, one more is tested. Of `a and b`, a trace in
# which a is false has no condition on b: with the smallest and the largest alone, bytes were 66 %
# too low.
_SHAPES_PER_TEST: Final = 20
# Sizes, and numbers of samples of each, that are searched for other peaks.
_SEARCHED_SIZES: Final = 32
_SEARCHED_NUMBERS: Final = 2 ** np.arange(21)

# Loops.
# A trace with symbols, or of many samples, is given up after this multiple of the seconds that two
# samples took, which count as half a second at least: does it loop? Symbols took up to 9 times as
# long as numbers, and 32 times for windows of two axes, for which the limit is doubled; a loss of
# 230 chunks takes 6 s.
_GIVEN_UP_RATIO: Final = 16
_GIVEN_UP_SECONDS: Final = 0.5
# Turns by which two traces of a loop differ: by 1, a number L - 1 in one would be L in the other.
_TURNS_APART: Final = 3
# Turns of a loop that are traced at least: a first, a last, and some between them that are alike.
_LEAST_TURNS: Final = 5
# A loop is tested with up to this multiple of the turns that were traced.
_TESTED_TURNS_RATIO: Final = 2
# One more test has as many turns as a trace with symbols does in so many seconds. A trace with
# numbers does them in about 2.
_FAR_TEST_SECONDS: Final = 10.0

# The grid.
# It is refined while the error on another shape exceeds this, until time is up.
_GRID_ERROR: Final = 0.01
# Ratio of consecutive numbers of samples in a column, and next to where its lines bend by a
# share. Of 1,000 other shapes of stairs and of an LSTM, none was then more than 0.2 % too low.
_COLUMN_RATIO: Final = 4
_FINE_RATIO: Final = 1.5
_BENT_SHARE: Final = 0.001
# With 8 held-out shapes, the grid of a CTC model with strides was raised by 0.4 %, and was 2.5 %
# too low elsewhere. With 128, 4 of 960 further shapes of an LSTM were 0.2 to 0.6 % too low.
_HELD_OUT: Final = 128
_LEAST_HELD_OUT: Final = 12  # if time is up


@dataclass(slots=True, eq=False)
class Covering:
    """Findings of traces about a step.

    Attributes:
        subject: the step and its batches.
        tracer: of the step.
        room: bytes beyond which no shape matters; infinite: all matter.
        seconds: of computing that a grid may take.
        most_n: samples up to which traces are compared.
        pieces: for shapes that they hold.
        grid: for the others; `None`: there are none.
        probes: the concrete traces.
        empty: bytes that live between steps.
        reason: why there is no symbolic trace of some shapes, if one failed.
    """

    subject: Subject
    tracer: Tracer
    room: float
    seconds: float
    most_n: int = _COMPARED_SAMPLES
    pieces: list[Piece] = field(default_factory=list)
    grid: Grid | None = None
    probes: list[Probe] = field(default_factory=list)
    empty: int = 0
    reason: str = ""
    _recipe: Recipe | None = None  # of the batches, if there is one
    _shapes: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # that are drawn
    _symbolic: dict[Shape, Trace] = field(default_factory=dict)
    _columns: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)
    _concrete: dict[Shape, Trace] = field(default_factory=dict)
    _deadline: float = 0.0
    # The most samples of a size before its traces were given up.
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def cover(self) -> None:
        """Trace until every shape of the domain is held by a piece or in the grid.

        Raises:
            CostError: the step cannot be traced at all.
        """
        self._deadline = time.process_time() + _PIECES_SECONDS
        smallest = self.subject.domain.between(0.0)
        two = self._at((2, *smallest))
        if any(trace.assumed for trace in self._concrete.values()):
            largest = self.subject.domain.occurring((1, *self.subject.domain.between(1.0)))
            self.tracer.with_larger_values(largest)
            self._concrete.clear()
            self.probes.clear()
            two = self._at((2, *smallest))
        if self.room < math.inf:
            fitting = int(self.room) // max(two - self._at((1, *smallest)), 1)
            self.most_n = min(max(fitting, _COMPARED_SAMPLES), _MOST_COMPARED_SAMPLES)
        self.most_n = min(self.most_n, self.subject.most_samples(smallest))
        shapes = self._shapes = self.subject.domain.draw(_DRAWN_SHAPES, self.most_n)
        left = np.ones(len(shapes), bool)
        try:
            self._recipe = Recipe(self.subject.batch, self.subject.domain.recipe_shapes())
            self._cover(left)
        except (UntraceableError, ValueDependentError) as error:  # concrete traces may know
            self.reason = self.reason or str(error)
            if self._recipe is None:
                self.subject.warn(f"shapes are measured one by one, which takes minutes: {error}")
        if not self._is_covered(left):
            self._make_grid(shapes[left])
        trace = next(iter((*self._symbolic.values(), *self._concrete.values())))
        self._note_what_is_left(trace, shapes[0])

    # Symbolic pieces.

    def _cover(self, left: npt.NDArray[np.bool_]) -> None:
        shapes = self._shapes
        logs, poor, longer = np.log(shapes), 0, np.ones(len(shapes))
        sizes = np.unique(shapes[:, 1:], axis=0)
        some = sizes[np.linspace(0, len(sizes) - 1, _SEARCHED_SIZES).astype(int)]
        limit = self.subject.domain.axes * self._limit(self.subject.domain.between(0.0))
        while not self._is_covered(left):
            if len(self.pieces) >= _MOST_PIECES or poor >= _MOST_POOR_PIECES:
                return
            few = left & (longer <= _TESTED_TURNS_RATIO)
            inside = np.flatnonzero(few if few.any() else left)
            # The middle of the remaining shapes: its branches are likely those of many shapes.
            off = np.abs(logs[inside] - np.median(logs[inside], axis=0))
            middle = shapes[inside[off.sum(axis=1).argmin()]]
            shape = _distinct(tuple(middle.tolist()), shapes[inside])
            trace = self._traced(shape, limit)
            with suppress(UntraceableError, ValueDependentError):
                fewer = self._of_fewer_turns(trace, shape, shapes[inside])
                trace, shape = self._traced(fewer), fewer
            columns = [_column_of(size, _SEARCHED_NUMBERS) for size in (*some, shape[1:])]
            row = np.insert(sizes, 0, shape[0], axis=1)
            every = np.concatenate([shapes, row, *columns])
            before = left.copy()
            piece, times = self._continued(trace, shape, every)
            longer = np.maximum(longer, times)
            try:
                piece = self._tested(
                    piece, longer, max(_FAR_TEST_SECONDS / trace.seconds, _TESTED_TURNS_RATIO), left
                )
                held = every[piece.holds(every) != NOT_HELD]
                if len(held):
                    piece = piece.kept(held)
                    piece.in_n(sizes)
                    self.pieces.append(piece)
            except UntraceableError as error:
                self.reason, left[:] = str(error), before
            left[(shapes == middle).all(axis=1)] = False
            gained = int(before.sum()) - int(left.sum())
            poor += gained < _POOR_SHARE * len(shapes)

    def _continued(self, trace: Trace, shape: Shape, every: IntArray) -> tuple[Piece, FloatArray]:
        """The piece of a trace, and how many times as long a trace of each drawn shape is.

        If the step loops, further traces are used to find a piece for any number of turns.
        """
        loops = self._loops(trace)
        # All loops at once; else one of them, with the turns of the others as they are.
        alone = [([one], one) for one in loops] if len(loops) > 1 else []
        for freed, kept in [*(([*loops], one) for one in loops), *alone]:
            with suppress(UntraceableError, ValueDependentError):
                further = self._further(trace, kept, shape)
                one = self._freed(trace, freed, kept, shape)
                other = self._freed(self._traced(further), freed, kept, further)
                piece = continued(one, other, every)
                piece.in_n(np.array([shape[1:]]))
                at, traced_turns = loops[kept]
                [turns] = trace.base.expressions.evaluate(self._shapes, [at])
                return piece, np.maximum(turns / traced_turns, 1)
        return trace.piece(every), np.ones(len(self._shapes))

    def _of_fewer_turns(self, trace: Trace, shape: Shape, shapes: IntArray) -> Shape:
        """A shape of few turns of each loop, which takes less time.

        Raises:
            UntraceableError: there are no loops, or no shape has enough turns.
        """
        nodes = trace.base.nodes
        # A coordinate of 1 is no symbol in a trace: only shapes with the same ones.
        shapes = shapes[((shapes == 1) == (np.array(shape) == 1)).all(axis=1)]
        loops = [at for at, _ in self._loops(trace).values() if nodes[at] != ["symbol", 0]]
        turns = np.array(trace.base.expressions.evaluate(shapes, loops), ndmin=2)
        if not loops:
            raise UntraceableError("there are no loops")
        enough = (turns >= _LEAST_TURNS).all(axis=0)
        return _middle(shapes[enough], turns.sum(axis=0)[enough])

    def _loops(self, trace: Trace) -> dict[Any, tuple[int, int]]:
        """The loops of a trace, by form: the expression of the turns, and how many were traced.

        They are the equalities that fail at other drawn shapes.
        """
        found = trace.equalities
        turns = trace.base.expressions.evaluate(self._shapes, [at for _, at, _ in found.values()])
        pairs = zip(found.items(), turns, strict=True)
        return {form: (at, value) for (form, (_, at, value)), one in pairs if (one != value).any()}

    def _freed(self, trace: Trace, freed: list[Any], kept: Any, shape: Shape) -> Trace:
        """The trace for any number of turns of some loops, but with the turns it has of `kept`."""
        found = trace
        for loop in freed:
            if loop != kept:
                found = joined(found, self._traced(self._further(trace, loop, shape)))
        return found

    def _traced(self, shape: Shape, most_seconds: float = math.inf) -> Trace:
        """A symbolic trace, kept."""
        if shape not in self._symbolic and self._recipe is not None:
            self._symbolic[shape] = self.tracer.symbolic(self._recipe, shape, most_seconds)
            self.subject.advance(1)
        return self._symbolic[shape]

    def _further(self, trace: Trace, loop: Any, shape: Shape) -> Shape:
        """A shape of a few more turns of one loop, and as many of the others.

        Raises:
            UntraceableError: there is none.
        """
        along_n = _column_of(shape[1:], np.arange(1, 4 * shape[0]))
        along_sizes = np.insert(np.unique(self._shapes[:, 1:], axis=0), 0, shape[0], axis=1)
        near = np.concatenate([self._shapes, along_sizes, along_n])
        loops = self._loops(trace)
        turns, traced_turns = zip(*loops.values(), strict=True)
        found = np.array(trace.base.expressions.evaluate(near, turns))
        more = found - np.array(traced_turns)[:, None]
        further = more[[*loops].index(loop)]
        right = (further >= _TURNS_APART) & (np.count_nonzero(more, axis=0) == 1)
        # The fewest further turns; of as many, the shape at which most branches are the same.
        failed = trace.base.failed(near)
        order = further * (1 + len(failed)) + failed.sum(axis=0)
        return _middle(near[right], order[right])

    def _tested(
        self, piece: Piece, longer: FloatArray, far: float, left: npt.NDArray[np.bool_]
    ) -> Piece:
        """Compare a piece with concrete traces, where it holds and where some conditions fail.

        An operation may have other outputs for symbols than for numbers: a decomposition, a copy.
        Many conditions only choose between kernels, or strides, that need the same bytes. Such a
        set of failed ones is harmless, but never one with an equality.

        Args:
            piece: the piece.
            longer: how many times as long each shape's trace takes: loops have more turns there.
            far: up to how many times as long one trace may take.
            left: which of them no piece holds; changed.

        Raises:
            UntraceableError: the bytes differ although all conditions hold.
        """
        shapes = self._shapes
        rows = enumerate(piece.conditions)
        harmful = [{row} for row, at in rows if piece.nodes[at][0] == "Equality"]
        bounds = {*range(shapes.shape[1])}  # that a coordinate is above 1, or that it is 1
        harmless: set[tuple[int, ...]] = set()
        failing = _failing(piece, shapes)
        weights = np.log(shapes).sum(axis=1)
        common = Counter(some for some, out in zip(failing, left, strict=True) if out)
        # First, all conditions hold; then one fails, in most shapes first; then several fail.
        for failed in sorted(common, key=lambda some: (len(some), -common[some])):
            # A set that needs other bytes does so together with further conditions.
            is_harmful = any(some.issubset(failed) for some in harmful)
            if failed and (is_harmful or not self._has_time()):
                continue
            alike = [some == failed and out for some, out in zip(failing, left, strict=True)]
            there = np.flatnonzero(alike)
            there = there[np.argsort(weights[there])]
            of_few = there[longer[there] <= _TESTED_TURNS_RATIO].tolist()
            # One shape is enough to test conditions that are each harmless.
            known = len(failed) > 1 and all((row,) in harmless for row in failed)
            chosen = {*of_few[-1:]}
            if not known and (not failed or not bounds.issuperset(failed)):
                # The smallest shape at which each other sum is the peak.
                tops = piece.tops(shapes[of_few]).tolist()
                smallest = dict(zip(tops[::-1], of_few[::-1], strict=True))
                chosen |= {k for top, k in smallest.items() if top != tops[-1]}
            if failed and not known:
                more = 0 if bounds.issuperset(failed) else len(of_few) // _SHAPES_PER_TEST
                chosen |= {*of_few[:: len(of_few) // (1 + more) or 1]}
            if len(failed) == 1 and of_few:  # late turns of a loop may differ from early ones
                near = there[longer[there] <= far]
                chosen |= {*near[np.lexsort((weights[near], longer[near]))].tolist()[-1:]}
            limited = sorted({self._limited(tuple(shapes[k].tolist())) for k in chosen})
            tested = [shape for shape in limited if _failing(piece, [shape]) == [failed]]
            off = [piece.bytes_at([shape])[0] / self._at(shape) - 1 for shape in tested]
            if any(off) and not failed:
                raise UntraceableError(f"the symbolic trace is off by {max(off, key=abs):+.2%}")
            if failed and (any(off) or not off):
                harmful += [{*failed}] if off else []
                continue
            left[there] = False
            harmless |= {failed} if failed else set()
        return replace(piece, harmless=tuple(sorted(harmless)))

    def _limited(self, shape: Shape) -> Shape:
        """The shape with no more samples than a real batch may have."""
        return (min(shape[0], self.subject.most_samples(shape[1:])), *shape[1:])

    def _at(self, shape: Shape, most_seconds: float = math.inf) -> int:
        """The bytes of a concrete trace; of the next larger shape, if no batch has this one."""
        shape = self.subject.domain.occurring(shape)
        if shape not in self._concrete:
            self._concrete[shape] = self.tracer.concrete(shape, most_seconds)
            peak = self._concrete[shape].peak(shape)
            self.probes.append(Probe(shape[0], shape[1:], peak, held_out=True, how="trace"))
            self.subject.advance(1)
        return self._concrete[shape].peak(shape)

    def _is_covered(self, left: npt.NDArray[np.bool_]) -> bool:
        """Whether all shapes have a piece; of a few of many samples, that of one more will do."""
        some = self._shapes[left]
        one_more = some + np.eye(1, some.shape[1], dtype=np.int64)
        owner, _ = first_held(self.pieces, one_more)
        are_held = (owner < len(self.pieces)) & (some[:, 0] * _POOR_SHARE >= 1)
        return bool(are_held.all()) and len(some) < _POOR_SHARE * len(left)

    # The grid.

    def _make_grid(self, left: IntArray) -> None:
        """Trace columns of some sizes, and of each drawn shape that is off, until none is."""
        self._deadline = time.process_time() + self.seconds
        domain, rng = self.subject.domain, np.random.default_rng(2)
        # If only some sizes have no piece, few shapes are left: add other numbers of samples.
        others = [np.insert(left[:, 1:], 0, rng.permutation(left[:, 0]), axis=1) for _ in range(8)]
        others = [one[first_held(self.pieces, one)[0] == len(self.pieces)] for one in others]
        left = rng.permutation(np.unique(np.concatenate([left, *others]), axis=0))
        sizes = domain.nodes(3 if domain.axes < 3 else 2)
        while (off := self._hold_out(sizes, left[:_HELD_OUT])) is not None:
            self._column(off[1:], off[0])  # it would raise other shapes, too, so it becomes a node
            sizes = [sorted({*one, new}) for one, new in zip(sizes, off[1:], strict=True)]

    def _halfway(self, sizes: list[list[int]]) -> IntArray:
        """A shape of many samples halfway between each two neighbours of a grid: do bytes jump?"""
        found = []
        for axis, known in enumerate(sizes):
            for low, high in pairwise(known):
                halfway = self.subject.domain.on_axis(axis, (low * high) ** 0.5)
                for size in product(*sizes[:axis], [high], *sizes[axis + 1 :]):
                    n = [*self._columns[size]][-2]
                    found.append((n, *size[:axis], halfway, *size[axis + 1 :]))
        return np.array(found, np.int64).reshape(-1, 1 + len(sizes))

    def _with_jumps(self, grid: Grid) -> Grid:
        """The grid with jumps where a trace is off and nearer to the bytes of the next size.

        Traces between sizes on one axis alone come first: they show on which axis bytes jump.
        """
        shapes = np.array([(probe.n, *probe.size) for probe in self.probes])
        real = np.array([probe.peak_bytes for probe in self.probes])
        in_grid = first_held(self.pieces, shapes)[0] == len(self.pieces)
        every, grid = replace(grid, jumps=grid.sizes), replace(grid, jumps=((),) * len(grid.sizes))
        above = every.with_jumps(shapes[:, 1:])
        between = shapes[:, 1:] < above
        for count in range(1, 1 + len(grid.sizes)):
            off, off_above = (abs(one.bytes_at(shapes) / real - 1) for one in (grid, every))
            shown = in_grid & (off > _GRID_ERROR) & (off_above < off)
            shown &= between.sum(axis=1) == count
            each = zip(grid.jumps, above.T, between.T & shown, strict=True)
            jumps = tuple((*{*known, *sizes[jump].tolist()},) for known, sizes, jump in each)
            grid = replace(grid, jumps=jumps)
        return grid

    def _limit(self, size: tuple[int, ...]) -> float:
        """The most seconds of a trace, by those of two samples of a size."""
        two = self._concrete.get((2, *size))
        return math.inf if two is None else _GIVEN_UP_RATIO * max(two.seconds, _GIVEN_UP_SECONDS)

    def _has_time(self) -> bool:
        return time.process_time() < self._deadline

    def _grid_of(self, sizes: list[list[int]]) -> Grid:
        every = list(product(*sizes))
        for size in reversed(every):  # the largest first: time may run out
            self._column(size)
        columns = [self._columns[size] for size in every]
        numbers = tuple(tuple(column) for column in columns)
        values = tuple(tuple(column.values()) for column in columns)
        ends = tuple(self._ends.get(size, self.most_n) for size in every)
        return Grid(tuple(map(tuple, sizes)), numbers, values, ends)

    def _column(self, size: tuple[int, ...], also: int = 1) -> dict[int, int]:
        """Bytes of a size at some numbers of samples.

        Args:
            size: of the samples.
            also: a number that is one of them.
        """
        known = self._columns.setdefault(size, {})
        if also not in known:
            known.update({n: self._at((n, *size)) for n in (1, 2, also)})
            low, n = 1, 2
            most = min(self._ends.get(size, self.most_n), self.subject.most_samples(size))
            while known[n] < self.room and n < most:
                each = max((known[n] - known[low]) / (n - low), 1)  # not far beyond the room
                low, n = n, int(min(_COLUMN_RATIO * n, n + 1 + (self.room - known[n]) / each, most))
                try:
                    known[n] = self._at((n, *size), self._limit(size))
                except UntraceableError:  # it loops over samples, or over their parts
                    self._ends[size] = low
                    break
            while self._has_time() and (bent := _bent(known)):
                known.update({n: self._at((n, *size)) for n in bent})
            self._columns[size] = dict(sorted(known.items()))
        return self._columns[size]

    def _hold_out(self, sizes: list[list[int]], left: IntArray) -> Shape | None:
        """Make the grid, and raise it for the largest error on other shapes.

        Returns:
            A shape that is too far off, while there is time to trace further columns.
        """
        grid = self._with_jumps(self._grid_of(sizes))
        left = np.concatenate([self._halfway(sizes), left])
        are_known = left[:, 0] <= grid.known_at(left[:, 1:])
        # Bytes that are too high count as well.
        left = left[are_known & (grid.bytes_at(left) <= 2 * self.room)]
        shapes: list[Shape] = []
        for drawn in left.tolist():
            late = time.process_time() > self._deadline + self.seconds / 2
            if late and len(shapes) >= _LEAST_HELD_OUT:
                break
            shape = self._limited(tuple(drawn))
            found, real = float(grid.bytes_at([shape])[0]), self._at(shape)
            if abs(found / real - 1) > _GRID_ERROR:
                grid = self._with_jumps(grid)
                found = float(grid.bytes_at([shape])[0])
            off = abs(found / real - 1) > _GRID_ERROR and min(found, real) <= self.room
            if off and self._has_time():
                return shape
            shapes.append(shape)
        every = np.array([self._at(shape) for shape in shapes], float)
        guessed = grid.bytes_at(shapes) if shapes else every
        pairs = (guessed / every, every / guessed)
        high, low = (float((one - 1).max(initial=0.0)) for one in pairs)
        # Shapes that were not drawn may be further off, so up to 1 % more.
        self.grid = replace(grid, raised=low + min(low, _GRID_ERROR))
        why = self.reason and f" ({self.reason})"
        known = f"up to {max(grid.ends):,} samples"
        if self._ends:
            known += f", traced up to {min(self._ends.values()):,} of some sizes"
        self.subject.notes.append(
            f"interpolated between shapes that no symbolic trace covers{why}, for batches of "
            f"{known}; {len(shapes)} other shapes were up to {low:.2%} too low, for which "
            f"{self.grid.raised:.2%} are added, and up to {high:.2%} too high"
        )
        return None

    def _note_what_is_left(self, trace: Trace, shape: IntArray) -> None:
        living = trace.living(shape)[:, 0]
        before, self.empty = (int(living[end - 1]) for end in trace.starts)
        if self.empty > before:
            self.subject.warn(
                f"a step leaves up to {format_bytes(self.empty - before)} allocated: does it keep "
                "losses or outputs?"
            )
        if trace.assumed:
            taken = self.tracer.values
            self.subject.notes.append(
                f"the step reads {trace.assumed} values of tensors, as to log or to branch; in the "
                f"trace a bool is {taken[0]} and a float {taken[1]}, with which it takes no less"
            )


def _failing(piece: Piece, shapes: npt.ArrayLike) -> list[tuple[int, ...]]:
    """The conditions of a piece that fail at each shape, as rows of `failed`."""
    return [tuple(np.flatnonzero(column).tolist()) for column in piece.failed(shapes).T]


def _bent(column: dict[int, int]) -> set[int]:
    """Numbers of samples halfway between two of a column, next to which its lines bend."""
    found, known = set(), sorted(column)
    for low, n, high in zip(known, known[1:], known[2:], strict=False):
        line = column[low] + (column[high] - column[low]) * (n - low) / (high - low)
        if abs(line / column[n] - 1) > _BENT_SHARE:
            pairs = ((low, n), (n, high))
            found |= {math.isqrt(a * b) for a, b in pairs if b > _FINE_RATIO * a}
    return found - column.keys()


def _column_of(size: tuple[int, ...], numbers: IntArray) -> IntArray:
    """The shapes of some numbers of samples of one size."""
    return np.column_stack([numbers, np.tile(size, (len(numbers), 1))])


def _middle(shapes: IntArray, order: IntArray) -> Shape:
    """The shape in the middle of the first ones: its last slices are likely neither 1 nor whole.

    Raises:
        UntraceableError: there are no shapes.
    """
    if not len(shapes):
        raise UntraceableError("no shape has so many turns of the loop")
    shapes = shapes[order == order.min()]
    middle = np.sqrt(shapes.min(axis=0) * shapes.max(axis=0)).astype(int)
    return _distinct((*middle.tolist(),), shapes)


def _distinct(shape: Shape, others: IntArray) -> Shape:
    """The nearest of other shapes of the fewest coordinates that are equal or 1: conditions."""
    ordered = np.sort(others, axis=1)
    bad = (ordered == 1).sum(axis=1) + (np.diff(ordered, axis=1) == 0).sum(axis=1)
    far = np.abs(np.log(others / np.array(shape))).sum(axis=1)
    found = tuple(others[np.lexsort((far, bad))[0]].tolist())
    if len(set(found)) < len(found) and found[0] > 2:
        found = (found[0] - 1, *found[1:])
    return found
