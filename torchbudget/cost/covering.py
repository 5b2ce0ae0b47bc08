"""Traces that cover a domain: symbolic pieces, checked by concrete ones, and a grid elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.batch_recipe import Recipe, Shape
from torchbudget.cost.expressions import UntraceableError
from torchbudget.cost.pieces import NOT_HELD, Grid, Piece, Probe
from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.cost.subject import Subject
from torchbudget.cost.tracing import Trace, Tracer, ValueDependentError
from torchbudget.units import format_bytes

# Shapes that are drawn to see what pieces hold.
_DRAWN: Final = 400
# Pieces that each hold so little of the domain are given up after so many: loops and chunks.
_POOR: Final = 0.03
_MOST_POOR: Final = 3
_MOST_PIECES: Final = 8
# The first pieces are compared with concrete traces.
_VERIFIED: Final = 2
# A grid is refined while the middle of a cell is further off, and until there are so many traces.
_OVER: Final = 0.02
_UNDER: Final = 0.002
_MOST_TRACES: Final = 60
_MOST_SECONDS: Final = 120.0
# Of a CTC model with strides, 8 held-out shapes showed 0.4 % of the 2.5 % that others were too low.
_HELD_OUT: Final = 24
# Beyond these the kept sums are looked for, too: of many samples others are the peak.
_MANY: Final = 2**20


@dataclass(slots=True, eq=False)
class Covering:
    """Findings of traces about a step.

    Attributes:
        subject: the step and its batches.
        tracer: of the step.
        most_n: samples up to which traces are compared.
        room: bytes beyond which no shape matters; `None`: all matter.
        pieces: for shapes that they hold.
        grid: for the others; `None`: there are none.
        raised: the share by which the grid's bytes are raised, the largest error found.
        probes: the concrete traces.
        empty: bytes that live between steps.
        reason: why no piece holds everywhere.
    """

    subject: Subject
    tracer: Tracer
    most_n: int
    room: int | None = None
    pieces: list[Piece] = field(default_factory=list)
    grid: Grid | None = None
    raised: float = 0.0
    probes: list[Probe] = field(default_factory=list)
    empty: int = 0
    reason: str = ""
    _traces: list[Trace] = field(default_factory=list)
    _harmless: list[set[tuple[int, ...]]] = field(default_factory=list)
    _columns: dict[tuple[int, ...], Trace | None] = field(default_factory=dict)
    _concrete: dict[Shape, Trace] = field(default_factory=dict)
    _deadline: float = 0.0

    def cover(self) -> None:
        """Trace until every shape of the domain is held by a piece or in the grid.

        Raises:
            CostError: the step cannot be traced at all.
        """
        self._deadline = time.process_time() + _MOST_SECONDS
        shapes = self.subject.domain.draw(_DRAWN, self.most_n)
        left = np.ones(len(shapes), bool)
        recipe = None
        try:
            recipe = Recipe(self.subject.batch, self.subject.domain.recipe_shapes())
            self._cover(recipe, shapes, left)
        except UntraceableError as error:
            self.reason = self.reason or str(error)
        if left.any():
            self._make_grid(recipe, shapes[left])
        many = self.subject.domain.draw(_DRAWN // 4, _MANY, seed=1)
        for trace, harmless in zip(self._traces, self._harmless, strict=True):
            piece = trace.piece(shapes, harmless)
            every = np.concatenate([shapes, many])
            held = every[piece.holds(every) != NOT_HELD]
            if len(held):
                self.pieces.append(trace.piece(held, harmless))
        traces = [*self._traces, *self._concrete.values()]
        first = traces[0]
        self.empty = int(first.living(shapes[:1])[first.starts[1] - 1, 0])
        self._note_what_is_left(first)

    # Symbolic pieces.

    def _cover(self, recipe: Recipe, shapes: IntArray, left: npt.NDArray[np.bool_]) -> None:
        weights, poor = np.log(shapes).sum(axis=1), 0
        while left.any() and len(self._traces) < _MOST_PIECES and poor < _MOST_POOR:
            if self._traces and time.process_time() > self._deadline - _MOST_SECONDS / 2:
                return
            inside = np.flatnonzero(left)
            # The middle of what is left: its branches are likely those of many shapes.
            middle = shapes[inside[np.argsort(weights[inside])[len(inside) // 2]]]
            trace = self._piece_at(recipe, _distinct(tuple(middle.tolist()), shapes[inside]))
            if trace is None:
                return
            before = int(left.sum())
            failed = trace.failed(shapes)
            left &= failed.any(axis=0)
            self._test(trace, shapes, failed, left)
            left[(shapes == middle).all(axis=1)] = False
            gained = before - int(left.sum())
            poor += gained < _POOR * len(shapes)
            if 0 in self._specialised(trace):  # another trace for every number of samples
                return
            if left.any():
                self.reason = trace.why(tuple(shapes[np.flatnonzero(left)[-1]].tolist()))

    def _piece_at(self, recipe: Recipe, shape: Shape) -> Trace | None:
        try:
            trace = self.tracer.symbolic(recipe, shape)
            trace.failed([shape])
            trace.piece([shape], []).in_n(np.array([shape[1:]]))
            if len(self._traces) < _VERIFIED:
                self._verify(trace)
        except (UntraceableError, ValueDependentError) as error:  # concrete traces may know
            self.reason = str(error)
            return None
        self._traces.append(trace)
        self._harmless.append(set())
        self.subject.advance(1)
        return trace

    def _specialised(self, trace: Trace) -> set[int]:
        """The coordinates that the step turned into a number."""
        nodes = trace.expressions.nodes
        equal = [nodes[at] for at, _ in trace.conditions if nodes[at][0] == "Equality"]
        pairs = [[nodes[one] for one in node[1:]] for node in equal]
        return {
            one[1] for a, b in pairs for one, other in ((a, b), (b, a))
            if one[0] == "symbol" and other[0] == "int"
        }  # fmt: skip

    def _verify(self, trace: Trace) -> None:
        """Compare with concrete traces at the largest and the middle of the shapes that it holds.

        An operation may have other outputs for symbols than for numbers: a decomposition, a copy.
        """
        shapes = self.subject.domain.draw(_DRAWN, self.most_n)
        shapes = shapes[~trace.failed(shapes).any(axis=0)]
        order = np.argsort(np.log(shapes).sum(axis=1))
        for index in dict.fromkeys([-1, len(order) // 2] if len(order) else []):
            shape = self._limited(tuple(shapes[order[index]].tolist()), trace)
            real, found = self._at(shape), int(trace.peaks([shape])[0])
            if found != real:
                raise UntraceableError(
                    f"the symbolic trace is off by {found / real - 1:+.2%} at {shape}"
                )

    def _test(
        self,
        trace: Trace,
        shapes: IntArray,
        failed: npt.NDArray[np.bool_],
        left: npt.NDArray[np.bool_],
    ) -> None:
        """Find sets of failed conditions that do not matter: concrete traces have the same peaks.

        Many conditions only choose between kernels, or strides, that need the same bytes. Sets
        with an equality are never taken: a loop's count.
        """
        equalities = set(trace.equalities)
        sets = [tuple(np.flatnonzero(column).tolist()) for column in failed.T]
        weights = np.log(shapes).sum(axis=1)
        common = Counter(one for one, out in zip(sets, left, strict=True) if out)
        for one in sorted(common, key=lambda one: (len(one), -common[one])):
            if equalities & set(one) or time.process_time() > self._deadline:
                continue
            mine = np.flatnonzero([s == one and out for s, out in zip(sets, left, strict=True)])
            mine = mine[np.argsort(weights[mine])]
            # Of conditions that are each harmless, one shape is enough.
            known = len(one) > 1 and all((k,) in self._harmless[-1] for k in one)
            chosen = dict.fromkeys(mine[[-1] if known else [-1, 0]].tolist())
            tested = {self._limited(tuple(shapes[k].tolist())) for k in chosen}
            rows = trace.failed(sorted(tested))
            same = [tuple(np.flatnonzero(column).tolist()) == one for column in rows.T]
            if all(same) and all(self._at(s) == trace.peaks([s])[0] for s in sorted(tested)):
                self._harmless[-1].add(one)
                left[mine] = False

    def _limited(self, shape: Shape, trace: Trace | None = None) -> Shape:
        """The shape with no more samples than a real batch may have."""
        n = min(shape[0], self.subject.most_samples(shape[1:]))
        limited = (n, *shape[1:])
        return shape if trace is not None and trace.failed([limited]).any() else limited

    def _at(self, shape: Shape) -> int:
        """The bytes of a concrete trace."""
        if shape not in self._concrete:
            self._concrete[shape] = self.tracer.concrete(shape)
            peak = int(self._concrete[shape].peaks([shape])[0])
            self.probes.append(Probe(shape[0], shape[1:], peak, held_out=True, how="trace"))
            self.subject.advance(1)
        return int(self._concrete[shape].peaks([shape])[0])

    # The grid.

    def _make_grid(self, recipe: Recipe | None, left: IntArray) -> None:
        """Trace nodes, and more of them where the middle between two is predicted badly."""
        domain = self.subject.domain
        columns = recipe is not None and self._has_columns(recipe, left)
        if columns:
            numbers = [2**k for k in range(int(self.most_n).bit_length())]
        else:
            numbers = sorted({1, *np.rint(np.geomspace(2, self.most_n, 4)).astype(int).tolist()})
        count = {1: 5, 2: 3}.get(domain.axes, 2)
        sizes = [
            sorted({domain.between(share)[axis] for share in np.linspace(0, 1, count)})
            for axis in range(domain.axes)
        ]
        done: set[tuple[Any, ...]] = set()
        while True:
            value = partial(self._bytes_of, numbers=numbers, recipe=recipe if columns else None)
            self.grid = self._grid_of(numbers, sizes, value)
            worst, at = 1.0, None
            for axis, nodes in enumerate(sizes):
                for low, high in pairwise(nodes):
                    middle = self._middle(axis, low, high)
                    if middle is None or (axis, low, high) in done or not self._has_time():
                        continue
                    others = [one[-1] for one in sizes]
                    others[axis] = middle
                    size = tuple(others)
                    real, found = value(size), self.grid.at(np.array([size]))[:, 0]
                    off = self._off(found / real - 1, real)
                    if off <= 1:
                        done.add((axis, low, high))
                    if off > worst:
                        worst, at = off, (axis, middle)
            if at is not None and self._has_time():
                sizes[at[0]] = sorted({*sizes[at[0]], at[1]})
                continue
            worst_shape = self._hold_out(self.grid, left)
            if self.raised <= _OVER or not self._has_time(2 * _MOST_TRACES):
                break
            # One outlier raises all shapes: its n and its sizes become nodes.
            n, *outlier = worst_shape
            numbers = sorted({*numbers, n})
            sizes = [sorted({*one, new}) for one, new in zip(sizes, outlier, strict=True)]

    def _off(self, errors: FloatArray, real: FloatArray) -> float:
        """The largest error of shapes that fit the budget, as a multiple of what is allowed."""
        if self.room is not None and (real < self.room).any():
            errors = errors[real < self.room]
        return float(np.maximum(errors / _OVER, -errors / _UNDER).max())

    def _has_time(self, most: int = _MOST_TRACES) -> bool:
        traces = self.tracer.num_symbolic + self.tracer.num_concrete
        return traces < most and time.process_time() < self._deadline

    def _middle(self, axis: int, low: int, high: int) -> int | None:
        """A size between two on an axis, on a logarithmic scale; of known ones, one of them."""
        domain = self.subject.domain
        wanted = (low * high) ** 0.5
        if domain.known is not None:
            known = np.unique(domain.known[:, axis])
            inside = known[(known > low) & (known < high)]
            return int(inside[np.abs(np.log(inside / wanted)).argmin()]) if len(inside) else None
        middle = -(-round(wanted) // domain.multiple) * domain.multiple
        return middle if low < middle < high else None

    def _grid_of(
        self,
        numbers: list[int],
        sizes: list[list[int]],
        value: Callable[[tuple[int, ...]], FloatArray],
    ) -> Grid:
        shape = (len(numbers), *map(len, sizes))
        at: Any
        values = np.zeros(shape)
        for at in product(*(range(len(one)) for one in sizes)):
            size = tuple(one[k] for one, k in zip(sizes, at, strict=True))
            values[(slice(None), *at)] = value(size)
        return Grid(tuple(numbers), tuple(map(tuple, sizes)), values, float(values.min()))

    def _has_columns(self, recipe: Recipe, left: IntArray) -> bool:
        """Whether a symbolic trace at one size holds for several numbers of samples."""
        if 0 in {k for trace in self._traces for k in self._specialised(trace)}:
            return False
        return self._column_of(recipe, tuple(left[len(left) // 2][1:].tolist())) is not None

    def _column_of(self, recipe: Recipe, size: tuple[int, ...]) -> Trace | None:
        if size not in self._columns:
            n = next(one for one in (11, 13, 17, 19) if one not in size)
            try:
                trace = self.tracer.symbolic(recipe, (n, *size))
                held = ~trace.failed([(2 * n + 1, *size), (n, *size)]).any(axis=0)
                self._columns[size] = trace if held.all() else None
            except (UntraceableError, ValueDependentError) as error:
                self.reason = str(error)
                self._columns[size] = None
            self.subject.advance(1)
        return self._columns[size]

    def _bytes_of(
        self, size: tuple[int, ...], numbers: list[int], recipe: Recipe | None
    ) -> FloatArray:
        """Bytes of a size for all numbers, with n as a symbol or by a concrete trace of each.

        Beyond the budget, and beyond what a batch may have, concrete ones go on as a line.
        """
        trace = None if recipe is None else self._column_of(recipe, size)
        if trace is not None:
            shapes = np.array([(n, *size) for n in numbers])
            values = trace.peaks(shapes).astype(float)
            # Other conditions on n are rare: held-out shapes show them.
            if trace.failed(shapes[:1]).any():
                values[0] = self._at((numbers[0], *size))
            return values
        most = self.subject.most_samples(size)
        values = np.zeros(len(numbers))
        for k, n in enumerate(numbers):
            over = k > 1 and self.room is not None and values[k - 1] > self.room
            if k > 1 and (over or n > most):
                slope = (values[k - 1] - values[k - 2]) / (numbers[k - 1] - numbers[k - 2])
                values[k] = values[k - 1] + slope * (n - numbers[k - 1])
            else:
                values[k] = self._at((n, *size))
        return values

    def _hold_out(self, grid: Grid, left: IntArray) -> Shape:
        """Raise the grid by the largest error on shapes that are no nodes; return that shape."""
        for shape in np.random.default_rng(2).permutation(left)[:_HELD_OUT].tolist():
            if time.process_time() > self._deadline + _MOST_SECONDS / 2:
                break
            self._at(self._limited(tuple(shape)))
        shapes = np.array([(probe.n, *probe.size) for probe in self.probes])
        found = grid.bytes_at(shapes)
        errors = np.array([probe.peak_bytes for probe in self.probes]) / found - 1
        counts = np.ones(len(shapes), bool) if self.room is None else found < 2 * self.room
        for trace in self._traces:
            counts &= trace.failed(shapes).any(axis=0)
        errors[~counts] = 0.0
        self.raised = float(errors.max(initial=0.0))
        return tuple(shapes[errors.argmax()].tolist())

    def _note_what_is_left(self, trace: Trace) -> None:
        shape = tuple(self.subject.domain.draw(1, self.most_n)[0].tolist())
        left = trace.left_at(shape)
        if left > 0:
            self.subject.warn(
                f"a step leaves up to {format_bytes(left)} allocated when it ends: a leak?"
            )
        if trace.assumed:
            self.subject.notes.append(
                f"the step asked tensors for {trace.assumed} truth values; the trace assumes that "
                "all of them are False"
            )
        if self.grid is not None:
            why = self.reason and f" ({self.reason})"
            self.subject.notes.append(
                f"interpolated where no expression holds{why}; the largest error on other shapes, "
                f"{self.raised:.2%}, is added there"
            )


def _distinct(shape: Shape, others: IntArray) -> Shape:
    """The nearest of other shapes without equal numbers, which would become a condition, or 1."""
    ordered = np.sort(others, axis=1)
    bad = (ordered == 1).sum(axis=1) + (np.diff(ordered, axis=1) == 0).sum(axis=1)
    far = np.abs(np.log(others / np.array(shape))).sum(axis=1)
    found = tuple(others[np.lexsort((far, bad))[0]].tolist())
    if len(set(found)) < len(found) and found[0] > 2:
        found = (found[0] - 1, *found[1:])
    return found
