"""A cost that was measured on a training step, what training shows of it, and its report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torchbudget.cost.batch_recipe import Place, ShapeReader
from torchbudget.cost.padded import PackedCost
from torchbudget.cost.pieces import EXACT, TESTED, Grid, Piece, Probe, first_held
from torchbudget.cost.protocol import ArrayLike, CostModel, IntArray, axes_last
from torchbudget.cost.surface import Surface, levels_of, moved
from torchbudget.display import new_figure
from torchbudget.errors import CostError, MeasureWarning, warn
from torchbudget.files import write_whole
from torchbudget.machine.allocators import settle_malloc
from torchbudget.machine.peaks import Peak
from torchbudget.units import MAX_BYTES, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# With a larger margin a prediction is useless, and its bytes would not fit 64 bits.
MOST_MARGIN: Final = 1000
# Added to the margin if an allocation failed, and again after each `replan` until none fails.
_FAILED: Final = 0.02
_FORMAT: Final = 10  # of files
_ROW: Final = "{:>8}  {:>12}  {:>12}  {:>12}  {:>8}  {:>12}  {:>8}  {}"  # of reports
_MOST_AXES: Final = 2  # of a packed cost by runs: of up to 160 runs every three are tried
_PARALLEL: Final = 1e-9  # of sums of sizes as shares of the largest: below it, rounding decides
# Bytes of a packed sample that is longer than all measured ones: more than any device has, but few
# enough that the sum over a window does not wrap.
_BEYOND_BYTES: Final = 2**45


@dataclass(slots=True, eq=False)
class _Observations:
    """Findings of `observe`: the one mutable part of a cost.

    Attributes:
        margin: the least that covers every step.
        largest_bytes: the largest prediction so far, since CUDA's allocator keeps what it reserved.
        planned_margin: the margin of the cost that batches are planned with by now.
        retries: allocations that succeeded only after the cache was flushed.
    """

    margin: float = 0.0
    largest_bytes: int = 0
    planned_margin: float = 0.0
    retries: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredCost:
    """Peak bytes of a training step, as `measure_cost` measured them.

    The bytes of a shape are `offset + scale · traced`, with the margin on top. Shapes that are not
    known, and samples longer than `largest`, cost `MAX_BYTES`. `batch_bytes` is monotone: at least
    these bytes of every batch that is not larger.

    Attributes:
        pieces: expressions of the traced bytes, and the shapes at which each holds.
        grid: bytes that are interpolated for other shapes; `None`: there are none.
        smallest: the smallest size on every axis; shorter samples cost as much.
        largest: the largest size on every axis; longer samples cost `MAX_BYTES`.
        multiple: measured sizes are multiples of it.
        median: median of the data set's sizes on each axis; `None`: no sizes were given.
        empty: traced bytes of a batch without samples.
        margin: the share by which every prediction is raised.
        offset: bytes that real steps needed besides the traced ones.
        scale: bytes that real steps needed for each traced byte.
        seconds: coefficients of the time of a step without its optimizer's, for 1, n, for each
            axis' size L and n·L, for floating-point operations, for traced bytes beside an empty
            batch's, and for those above `knee`; `None`: no step was timed.
        knee: traced bytes, beside an empty batch's, above which each takes longer.
        parts: traced bytes of parameters, gradients and optimizer state, by name.
        room: the budget of the measurement in bytes; `None`: there was none.
        probes: the measured batches.
        measured_on: model, device, torch version and more, by name.
        notes: remarks on how the cost was measured.
        caution: a warning that a sampler gives once if it plans with this cost; empty: none.
        keeps_gradients: whether gradients of earlier micro-batches are in the bytes.
    """

    pieces: tuple[Piece, ...]
    grid: Grid | None
    smallest: tuple[int, ...]
    largest: tuple[int, ...]
    multiple: int = 1
    median: tuple[int, ...] | None = None
    empty: int = 0
    margin: float = 0.0
    offset: float = 0.0
    scale: float = 1.0
    seconds: tuple[float, ...] | None = None
    knee: int = 0
    parts: Mapping[str, int] = field(default_factory=dict)
    room: int | None = None
    probes: tuple[Probe, ...] = ()
    measured_on: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    caution: str = ""
    keeps_gradients: bool = True
    _observed: _Observations = field(default_factory=_Observations, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.margin <= MOST_MARGIN:
            raise CostError(f"margin must be 0 to {MOST_MARGIN}, got {self.margin!r}")

    def __getstate__(self) -> dict[str, Any]:
        """Without the tables, which are made again."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.largest)

    @cached_property
    def _surface(self) -> Surface:
        raised = 1 + self.margin
        return Surface.of(
            self._levels(), self.pieces, self.grid, empty=self.empty,
            offset=raised * self.offset, scale=raised * self.scale,
        )  # fmt: skip

    def _levels(self) -> list[IntArray]:
        ends = zip(self.smallest, self.largest, strict=True)
        return [levels_of(low, high, self.multiple, self.axes) for low, high in ends]

    @cached_property
    def time(self) -> CostModel:
        """A cost model of a micro-batch's nanoseconds: those of a step without its optimizer's.

        They are `a + b·n + Σ (c·L + d·n·L)` over the ragged axes, of size L, and a share of each
        floating-point operation and of each traced byte, larger for bytes above a knee. No
        coefficient is negative; they are fitted to steps that were timed for this. Kernels that
        take turns along an axis, as recurrent ones do, and those whose operations cannot be
        counted, have their time in the terms with L.

        Raises:
            CostError: no step was timed.
        """
        if self.seconds is None:
            raise CostError(
                "this cost has no time: its steps were traced, not run, or time=False, or they are "
                "a forward of so few samples that timing would not pay; measure it with "
                "method='auto' or 'run'"
            )
        fixed, each, *by_axis, flop, byte, above = (1e9 * one for one in self.seconds)
        knee = self.knee + self.empty
        pieces = [one.weighted(flop, byte, above, knee) for one in self.pieces]
        grid = None if self.grid is None else self.grid.weighted(byte, above, knee)
        offset = -byte * self.empty
        surface = Surface.of(self._levels(), pieces, grid, empty=0, offset=offset, scale=1.0)
        return surface.plus((fixed, *by_axis[::2]), (each, *by_axis[1::2]))

    @property
    def chosen(self) -> Any:
        """The model of bytes of batches in their chosen way: this cost, which has only one."""
        return self

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `MAX_BYTES` for unknown shapes, and from 2⁶² bytes on."""
        return self._surface.batch_bytes(n, padded_size)

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        return self._surface.capacity(padded_size, budget_bytes)

    def traced_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """Return traced bytes, without offset, scale and margin.

        They are exact, or interpolated in the grid; `MAX_BYTES` for shapes that are not known.
        """
        shapes, shape = self._shapes(n, padded_size)
        owner, _ = first_held(self.pieces, shapes)
        total = np.full(len(shapes), MAX_BYTES)
        for at, piece in enumerate(self.pieces):
            mine = owner == at
            total[mine] = piece.bytes_at(shapes[mine])
        if self.grid is not None:
            found = np.ceil(self.grid.bytes_at(shapes))
            # As a float, `MAX_BYTES` would be 2**63.
            mine = (owner == len(self.pieces)) & (found < 2.0**62)
            total[mine] = found[mine]
        return total.reshape(shape)

    def label(self, n: int, padded_size: int | Sequence[int]) -> str:
        """Return how well the bytes of a shape are known.

        Returns:
            "exact" if the shape takes the same branches as a trace; "tested" if it takes another
            branch, or more turns of a loop, but concrete traces had the same bytes; "interpolated"
            in the grid; "raised" to the bytes of a larger shape, or to `MAX_BYTES`, elsewhere.
        """
        shapes, _ = self._shapes(n, padded_size)
        if (shapes[0, 1:] < self.smallest).any() or (shapes[0, 1:] > self.largest).any():
            return "raised"
        _, how = first_held(self.pieces, shapes)
        elsewhere = "raised" if self.grid is None else "interpolated"
        return {EXACT: "exact", TESTED: "tested"}.get(how[0], elsewhere)

    def _shapes(self, n: ArrayLike, padded_size: ArrayLike) -> tuple[IntArray, tuple[int, ...]]:
        number, size = np.asarray(n, np.int64)[..., None], axes_last(padded_size, self.axes)
        shape = np.broadcast_shapes(number.shape[:-1], size.shape[:-1])
        both = [np.broadcast_to(one, (*shape, one.shape[-1])) for one in (number, size)]
        return np.concatenate(both, axis=-1, dtype=np.int64).reshape(-1, 1 + self.axes), shape

    def packed(self, *, no_padding: bool = False) -> PackedCost:
        """Return this cost as a `PackedCost`, if `make_batch` made packed batches.

        The measured batches had n samples of one size. In the packed cost each sample costs by its
        own size. It has no time: pass `time=PackedCost(…)` to balance ranks by work. The margin is
        included. Samples shorter than `smallest` cost as much as it, so measure with `sizes` or
        `min_size`. Samples longer than `largest` exceed every budget.

        Args:
            no_padding: states that the step pads no sample to the size of another one. Only a step
                that was run and not traced, with sizes of up to two axes, needs it. Its cost is a
                plane over the sums of the sizes, `fixed_bytes` and `unit_bytes`: the lowest one
                that no run is above. A mask over the whole row takes the square of its length; then
                `unit_bytes` are those of the longest rows that were run. Whatever the budget, no
                row gets more bytes than a run has reached.

        Raises:
            CostError: the bytes are not a constant plus a sum over the samples; or the step was
                only run, on samples of one size, which do not show whether it pads.
        """
        by_runs = {one.how for one in self.probes} == {"run"}
        if no_padding and by_runs and self.grid is not None and self.axes <= _MOST_AXES:
            return self._above_runs(self.grid)
        surface = self._surface
        pairs = zip(surface.rows, surface.starts.tolist(), strict=True)
        rows = np.stack([moved(row, -start) for row, start in pairs], axis=1)
        constant, each, square = rows
        is_constant = np.ptp(constant, axis=1).max() <= 2  # but for rounding
        if self.grid is not None or (surface.starts > 2).any() or square.any() or not is_constant:
            raise CostError(
                "a packed cost must be a constant plus a share of each sample, but this step was "
                "interpolated, or has terms in n², or others of the size without n: pass a "
                "make_batch(n, size) that concatenates n samples of one size, if the measured one "
                "did not; else state a PackedCost. loader(packed=False) plans for padding. If the "
                "step was only run, packed(no_padding=True), or loader(packed=True), states that "
                "it does not pad, which samples of one size cannot show"
            )
        shares = np.ceil(each.max(axis=0)).astype(np.int64)
        unit: Any = (1,) * self.axes  # of several axes, only how many there are
        if self.axes == 1:  # what a position of padding costs at most
            unit = math.ceil((np.diff(shares) / np.diff(surface.levels[0])).max(initial=1))
        return _PackedMeasuredCost(
            fixed_bytes=constant.max(), sample_bytes=1, unit_bytes=unit, shares=shares,
            surface=replace(surface, rows=surface.rows[:0]), keeps_gradients=self.keeps_gradients,
        )  # fmt: skip

    def _above_runs(self, grid: Grid) -> PackedCost:
        """The lowest plane over the sums of the sizes of a row that no run is above."""
        sums = np.array([[1, *(one.n * size for size in one.size)] for one in self.probes], float)
        peaks = np.array([one.peak_bytes for one in self.probes], float)
        most = sums.max(axis=0)
        if np.linalg.matrix_rank(sums / most, _PARALLEL) < len(most):
            raise CostError(
                "the bytes of each axis cannot be told apart, since all sizes that were run have "
                "one ratio: measure with sizes= of samples whose axes differ, or a larger budget"
            )
        # The lowest plane passes through as many runs as it has coefficients; or fewer, if some of
        # these are 0. Which plane is the lowest is decided where rows are large.
        rows = np.concatenate([sums / most, np.eye(len(most))])
        least = np.append(peaks, np.zeros(len(most)))
        some = np.array([*combinations(range(len(rows)), len(most))])
        some = some[np.abs(np.linalg.det(rows[some])) > _PARALLEL]
        planes = np.linalg.solve(rows[some], least[some][..., None])[..., 0]
        planes = planes[(planes @ rows.T >= least - 1).all(axis=1)]  # a byte for rounding
        weights = (peaks - peaks.min()) @ sums / most
        fixed, *slopes = np.maximum(planes[(planes @ weights).argmin()] / most, 0).tolist()
        raised = 1 + self.margin
        units = [raised * slope for slope in slopes]
        return _PackedByRuns(
            fixed_bytes=raised * (fixed + self.offset),
            unit_bytes=units if self.axes > 1 else units[0],
            most_bytes=int(raised * (grid.reached + self.offset)),
            smallest=self.smallest,
            largest=self.largest,
            keeps_gradients=self.keeps_gradients,
        )

    def observe(self, n: int, size: int | Sequence[int], peak: Peak | int | None) -> None:
        """Compare the real peak of a step with its prediction.

        The cost itself does not change. `with_observed_margin` returns a cost with the larger
        margin, and `MemoryBudgetBatchSampler.replan` plans with it.

        Args:
            n: number of samples in the batch.
            size: padded size of the batch.
            peak: the result of `peak_memory` around the step, or bytes; `None`: the step ran out of
                memory. CUDA's allocator keeps memory that it has reserved, so there the peak is
                compared with the largest prediction so far, and only if the step reserved more
                memory. An allocation that succeeded at the second attempt is no failure; `report`
                counts those.

        Warns:
            MeasureWarning: for the first step that needed more than predicted, or in which an
                allocation on CUDA failed.
        """
        if self.axes == 1 and isinstance(size, Sequence):
            [size] = size
        if peak is None:
            peak = Peak(failures=1)
        elif not isinstance(peak, Peak):
            peak = Peak(bytes=peak)
        observed = self._observed
        observed.retries += peak.retries
        reserved_for = observed.largest_bytes if peak.allocated_bytes else 0
        predicted = max(int(self.chosen.batch_bytes(n, size)), reserved_for)
        # Without a prediction of the batch, only its peak is known.
        known = predicted if predicted < MAX_BYTES else max(reserved_for, peak.bytes)
        observed.largest_bytes = known
        # Memory that was reserved before the step, and sufficed, does not show what the step needs.
        enough = 0 < peak.reserved_bytes <= peak.reserved_before_bytes
        if (peak.bytes <= predicted or enough) and not peak.failures:
            return
        first = observed.margin <= self.margin
        margin = (1 + self.margin) * peak.bytes / predicted - 1
        if peak.failures:  # its need is unknown, but more than there was
            margin = max(margin, max(self.margin, observed.planned_margin) + _FAILED)
        observed.margin = max(observed.margin, margin)
        if first:
            needed = f"needed {format_bytes(peak.bytes)}"
            if peak.failures:
                needed = "ran out of memory"
            warn(
                f"a step on {n} samples of size {size} {needed}, but {format_bytes(predicted)} "
                "were predicted; sampler.replan() plans later batches with a larger margin, "
                "cost.with_observed_margin() returns the cost with it",
                MeasureWarning,
            )

    def with_observed_margin(self) -> MeasuredCost:
        """Return this cost with a margin that covers every step that `observe` has seen.

        The margin is at least the one that batches are planned with now, which `replan` has found
        on all ranks, or which came with a sampler's loaded state.
        """
        observed = self._observed
        margin = observed.margin + 1e-3 if observed.margin > self.margin else self.margin
        margin = min(max(margin, observed.planned_margin), MOST_MARGIN)
        if margin <= self.margin:
            return self
        note = f"the margin was {self.margin:.2%} before training steps were observed"
        notes = (*self.notes, note)
        return replace(self.with_margin(margin), notes=notes, _observed=_Observations())

    def planned_with(self, margin: float) -> MeasuredCost:
        """This cost with the margin that batches are planned with from now on."""
        self._observed.planned_margin = margin
        return self.with_margin(margin)

    def with_margin(self, margin: float) -> MeasuredCost:
        """This cost with another margin; both share what they observe."""
        return replace(self, margin=margin)

    def save(self, path: str | Path, *, beside: Sequence[MeasuredCost] = ()) -> None:
        """Write the cost as JSON, with a description of its step; `load_cost` reads it.

        The saved margin covers observed steps: see `with_observed_margin`. The file is replaced as
        a whole, even if several processes write it.

        Args:
            path: path of the file.
            beside: other costs that the file keeps; it is then a list of costs.
        """
        costs = [one.with_observed_margin() for one in (*beside, self)]
        written = [{"format": _FORMAT, **_plain(one)} for one in costs]
        text = json.dumps(written if beside else written[0], default=_plain) + "\n"
        write_whole(Path(path), lambda file: file.write(text.encode()), by_several=True)

    def errors(self) -> list[float]:
        """Predicted / measured − 1 of each probe, before the margin; traced bytes for a trace.

        Infinite where nothing is predicted, beyond the most bytes that runs have reached.
        """
        surface, found = self._surface, []
        for probe in self.probes:
            whole = int(surface.batch_bytes(probe.n, probe.asked))
            predicted = whole / (1 + self.margin) if whole < MAX_BYTES else math.inf
            if probe.how == "trace":
                predicted = (predicted - self.offset) / self.scale
            found.append(predicted / probe.peak_bytes - 1)
        return found

    def __repr__(self) -> str:
        return f"<MeasuredCost: {self}>"

    def __str__(self) -> str:
        """Return its basis, the largest error of its runs and its margin; `report` has all."""
        pairs = zip(self.probes, self.errors(), strict=True)
        known = [abs(e) for probe, e in pairs if probe.how == "run" and e < math.inf]
        worst = max(known, default=0.0)
        return f"{self._rests_on()}; runs off by {worst:.1%} at most, margin {self.margin:.1%}"

    def report(self) -> str:
        """Report the measured batches with their errors, and how many samples a budget holds."""
        titles = "samples", "size", "measured", "predicted", "error", "known as", "seconds", "probe"
        lines = [_ROW.format(*titles)]
        worst: dict[str, float] = {}
        for probe, error in zip(self.probes, self.errors(), strict=True):
            label, is_known = self.label(probe.n, probe.asked), error < math.inf
            if is_known:
                worst[label] = max(worst.get(label, 0.0), error, key=abs)
            lines.append(
                _ROW.format(
                    f"{probe.n:,}",
                    " × ".join(map(str, probe.size)),
                    format_bytes(probe.peak_bytes),
                    format_bytes(round(probe.peak_bytes * (1 + error))) if is_known else "unknown",
                    f"{error:+.3%}" if is_known else "",
                    label,
                    "" if probe.seconds is None else f"{probe.seconds:.3f}",
                    f"{probe.how}, held out" if probe.held_out else probe.how,
                )
            )
        lines.append(f"rests on: {self._rests_on()}")
        lines += [f"largest error, {label}: {error:+.3%}" for label, error in worst.items()]
        parts = [f"{format_bytes(size)} of {name}" for name, size in self.parts.items() if size]
        if self.offset:
            parts.append(f"{format_bytes(round(self.offset))} outside tensors")
        if parts:
            lines.append(f"in every peak: {', '.join(parts)}; the rest is the batch's activations")
        if self.scale > 1:
            lines.append(f"scale: {self.scale:.3f} bytes in use for each traced byte")
        lines.append(f"margin: {self.margin:.3%}")
        lines.append(f"sizes: up to {' × '.join(map(str, self.largest))}")
        if self.room is not None:
            counts = [
                f"{name} sample ({' × '.join(map(str, size))}): "
                f"{int(self.capacity(size if self.axes > 1 else size[0], self.room)):,} at once"
                for name, size in (("longest", self.largest), ("median", self.median))
                if size is not None
            ]
            lines.append(f"under {format_bytes(self.room)}: {'; '.join(counts)}")
        lines += [f"{name}: {value}" for name, value in self.measured_on.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join([*lines, *self._retries()])

    def _retries(self) -> list[str]:
        """A line of the report on allocations that did not succeed at once, if there were any."""
        if not self._observed.retries:
            return []
        note = (
            f"note: in training, {self._observed.retries:,} allocations succeeded only after the "
            "allocator's cache was flushed, which takes time; call configure_allocators() for "
            "expandable segments, or lower the budget"
        )
        return [note]

    def _rests_on(self) -> str:
        found = []
        if self.pieces:
            found.append(f"{len(self.pieces)} symbolic trace{'s' * (len(self.pieces) > 1)}")
        if self.grid is not None:
            found.append(f"a grid of {sum(map(len, self.grid.values))} shapes, interpolated")
        runs = sum(probe.how == "run" for probe in self.probes)
        return ", ".join([*found, *([f"{runs} run{'s' * (runs > 1)}"] if runs else [])])

    def plot(self) -> Figure:
        """Draw measured against predicted bytes, and the errors, as a matplotlib figure.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        figure, (left, right) = new_figure(2, width=9)
        measured = np.array([probe.peak_bytes for probe in self.probes]) / 2**20
        errors = np.array(self.errors())
        held_out = np.array([probe.held_out for probe in self.probes])
        ends = [measured.min(), measured.max()]
        left.plot(ends, ends, color="0.7")
        for mask, label, marker in ((~held_out, "fitted", "ko"), (held_out, "held out", "kx")):
            left.plot(measured[mask], measured[mask] * (1 + errors[mask]), marker, label=label)
            right.plot(measured[mask], 100 * errors[mask], marker, label=label)
        right.axhline(-100 * self.margin, color="0.7")
        left.set(xlabel="measured, MiB", ylabel="predicted, MiB", xscale="log", yscale="log")
        right.set(xlabel="measured, MiB", ylabel="error, %", xscale="log")
        left.legend()
        return figure


@dataclass(frozen=True, kw_only=True, eq=False)
class WaysCost(MeasuredCost):
    """The cost of a step that is made in several ways: see `torchbudget.alternatives`.

    Its bytes are the least of its ways', and its capacity the greatest. Its time is that of the
    fastest way that fits the budget. Where steps were not timed, as forwards of few samples, the
    first way that fits counts as the fastest.

    Attributes:
        ways: costs of the ways, all with one margin.
        reader: reads the shape of a batch.
        room: the budget that a chosen way must fit: that of the measurement, or of a plan.
    """

    ways: tuple[MeasuredCost, ...]
    reader: ShapeReader

    @classmethod
    def of(cls, ways: Sequence[MeasuredCost], reader: ShapeReader) -> WaysCost:
        """The cost of ways that were measured on the same data and under the same budget."""
        first, margin = ways[0], max(one.margin for one in ways)
        same = ("smallest", "multiple", "median", "parts", "room", "caution")
        return cls(
            pieces=(),
            grid=None,
            largest=tuple(map(max, zip(*(one.largest for one in ways), strict=True))),
            empty=min(one.empty for one in ways),
            margin=margin,
            seconds=first.seconds if all(one.seconds for one in ways) else None,
            probes=tuple(probe for one in ways for probe in one.probes),
            ways=tuple(one.with_margin(margin) for one in ways),
            reader=reader,
            keeps_gradients=all(one.keeps_gradients for one in ways),
            **{name: getattr(first, name) for name in same},
        )

    def way(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """The number of the fastest way that fits; if none does, of the one of the least bytes.

        A way must fit with the margin that batches are planned with by now: see `replan`.
        """
        needed = np.stack([one.batch_bytes(n, padded_size) for one in self.ways])
        margin = max(self._observed.planned_margin, self.margin)
        fits = needed * ((1 + margin) / (1 + self.margin)) <= (self.room or 0)
        # Without times, the first way counts as the fastest.
        times = np.arange(len(self.ways)).reshape(-1, *[1] * (needed.ndim - 1))
        if self.seconds is not None:
            times = np.stack([one.time.batch_bytes(n, padded_size) for one in self.ways])
        fastest: IntArray = np.where(fits, times, MAX_BYTES).argmin(axis=0)
        smallest = len(needed) - 1 - needed[::-1].argmin(axis=0)
        return np.where(fits.any(axis=0), fastest, smallest)

    def way_of(self, batch: Any) -> int:
        """The number of the way that a batch is made in, by the lengths of its tensors.

        Raises:
            BatchError: it has other numbers of tensors, or of axes, than `make_batch` made.
        """
        n, *size = self.reader.shape_of(batch)
        return int(self.way(n, size if self.axes > 1 else size[0]))

    @cached_property
    def time(self) -> CostModel:
        """A cost model of a micro-batch's nanoseconds, in the fastest way that fits.

        Raises:
            CostError: the steps of a way were not timed.
        """
        return OfWays(self, tuple(one.time for one in self.ways))

    @cached_property
    def chosen(self) -> OfWays:
        """The model of bytes of batches in their chosen way; a larger batch may have fewer."""
        return OfWays(self, self.ways)

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `MeasuredCost.batch_bytes`: the least of any way."""
        every = [one.batch_bytes(n, padded_size) for one in self.ways]
        least: IntArray = np.min(every, axis=0)
        return least

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `MeasuredCost.capacity`: the greatest of any way."""
        every = [one.capacity(padded_size, budget_bytes) for one in self.ways]
        most: IntArray = np.max(every, axis=0)
        return most

    def traced_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `MeasuredCost.traced_bytes`: the least of any way."""
        every = [one.traced_bytes(n, padded_size) for one in self.ways]
        least: IntArray = np.min(every, axis=0)
        return least

    def label(self, n: int, padded_size: int | Sequence[int]) -> str:
        """See `MeasuredCost.label`: of the way that the batch is made in."""
        return self.ways[int(self.way(n, padded_size))].label(n, padded_size)

    def with_margin(self, margin: float) -> WaysCost:
        """See `MeasuredCost.with_margin`."""
        ways = tuple(one.with_margin(margin) for one in self.ways)
        return replace(self, margin=margin, ways=ways)

    def packed(self, *, no_padding: bool = False) -> PackedCost:
        """Refuse: a minimum over ways is no sum over samples."""
        raise CostError("alternatives are for padded batches: packed ones are as full as fits")

    def errors(self) -> list[float]:
        """See `MeasuredCost.errors`: way after way."""
        return [error for one in self.ways for error in one.errors()]

    def __str__(self) -> str:
        """Return what `MeasuredCost` does, for each way."""
        return "; ".join(f"way {number}: {one}" for number, one in enumerate(self.ways))

    def report(self) -> str:
        """Report each way as `MeasuredCost.report` does."""
        each = (f"way {k}\n{one.report()}" for k, one in enumerate(self.ways))
        own = [*(f"note: {note}" for note in self.notes), *self._retries()]
        return "\n\n".join([*each, *own])


@dataclass(frozen=True, slots=True, eq=False)
class OfWays:
    """A model of bytes or of nanoseconds that asks, for each batch, the model of its chosen way.

    Attributes:
        cost: chooses the ways.
        models: one for each way.
    """

    cost: WaysCost
    models: tuple[CostModel, ...]

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`."""
        each = np.stack([one.batch_bytes(n, padded_size) for one in self.models])
        way = self.cost.way(n, padded_size)
        chosen: IntArray = np.take_along_axis(each, way[None], axis=0)[0]
        return chosen

    def capacity(self, padded_size: ArrayLike, amount: ArrayLike) -> IntArray:
        """See `CostModel.capacity`: the greatest of any way, as far as its bytes fit the budget."""
        fitting = [one.capacity(padded_size, self.cost.room or 0) for one in self.cost.ways]
        within = [one.capacity(padded_size, amount) for one in self.models]
        most: IntArray = np.minimum(fitting, within).max(axis=0)
        return most


def load_cost(path: str | Path, measured_on: Mapping[str, str] | None = None) -> MeasuredCost:
    """Read a cost that `MeasuredCost.save` wrote, or one of a `cost_cache` of `loader`.

    If it was measured on the CPU, malloc is set as `measure_cost` sets it: see `trim_malloc`.

    Args:
        path: path of the file. Of several costs, the one whose description differs least is read;
            without `measured_on`, the one that was written last.
        measured_on: description of the step that you will train with, from `describe_step(step)`.

    Raises:
        CostError: the file is not a saved cost, has another format, or has an unknown operation.

    Warns:
        MeasureWarning: it was measured on something else; the warning names the differences. Or
            it was measured on the CPU, and torch's tensors are not made by glibc's malloc.
    """
    described = dict(measured_on or {})
    cost, *_ = saved_costs(path, described)
    if cost.measured_on.get("device", "").startswith("cpu"):
        described["allocator"] = settle_malloc()
    if differs := differing(cost, described):
        warn(f"{path} was measured on something else: {'; '.join(differs)}", MeasureWarning)
    return cost


def saved_costs(path: str | Path, measured_on: Mapping[str, str]) -> list[MeasuredCost]:
    """Read the costs in a file, at least one: the one whose description differs least, first.

    Raises:
        CostError: see `load_cost`.
    """
    try:
        read = _tuples(json.loads(Path(path).read_text("utf-8")))
        several = read if isinstance(read, tuple) and read else (read,)
        for one in several:
            if one["format"] != _FORMAT:
                raise ValueError(f"format {one['format']!r} is not {_FORMAT}; measure again")
        costs = [_from_file(one) for one in reversed(several)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CostError(f"{path} is not a saved cost: {type(error).__name__}: {error}") from error
    return sorted(costs, key=lambda cost: len(differing(cost, measured_on)))


def differing(cost: MeasuredCost, measured_on: Mapping[str, str]) -> list[str]:
    """The entries of a description that were others when a cost was measured."""
    before = cost.measured_on
    return [
        f"{name}: {before.get(name)!r} then, {now!r} now"
        for name, now in measured_on.items()
        if before.get(name) != now
    ]


def _plain(value: Any) -> Any:
    """A dataclass as JSON has it."""
    names = [one.name for one in fields(value) if one.init and not one.name.startswith("_")]
    return {name: getattr(value, name) for name in names}


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(one) for key, one in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _from_file(read: dict[str, Any]) -> MeasuredCost:
    parts: dict[str, Any] = {
        "grid": None if read["grid"] is None else Grid(**read["grid"]),
        "pieces": tuple(Piece(**one) for one in read["pieces"]),
        "probes": tuple(Probe(**one) for one in read["probes"]),
    }
    kind: type[MeasuredCost] = MeasuredCost
    if "ways" in read:
        dims, places = read["reader"]
        reader = ShapeReader(dims, tuple(Place(*one) for one in places))
        kind, ways = WaysCost, tuple(map(_from_file, read["ways"]))
        parts |= {"ways": ways, "reader": reader}
    return kind(**{k: one for k, one in read.items() if k != "format"} | parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PackedMeasuredCost(PackedCost):
    """A `PackedCost` whose samples cost what a table says.

    Its `unit_bytes` are those of padding. Its `sample_bytes` only say that samples have bytes of
    their own, so that rows keep room for the most padding.

    Attributes:
        surface: the table's sizes.
        shares: bytes of a sample of each size.
        keeps_gradients: see `MeasuredCost`.
    """

    surface: Surface = field(repr=False)
    shares: IntArray = field(repr=False)
    keeps_gradients: bool

    def item_bytes(self, sizes: ArrayLike) -> IntArray:
        """See `AdditiveCost.item_bytes`; beyond what was measured, more than any device has."""
        column, beyond = self.surface.place(sizes)
        return np.where(beyond, _BEYOND_BYTES, self.shares[column])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PackedByRuns(PackedCost):
    """A `PackedCost` that was fitted to runs.

    Attributes:
        most_bytes: bytes that runs have reached, beyond which nothing is known.
        smallest: the smallest size on every axis that was run; shorter samples cost as much.
        largest: the largest one; longer samples cost more than any device has.
        keeps_gradients: see `MeasuredCost`.
    """

    most_bytes: int
    smallest: tuple[int, ...]
    largest: tuple[int, ...]
    keeps_gradients: bool

    def item_bytes(self, sizes: ArrayLike) -> IntArray:
        """See `AdditiveCost.item_bytes`."""
        each = axes_last(sizes, self.axes)
        known = np.clip(each, self.smallest, self.largest)
        items = super(_PackedByRuns, self).item_bytes(known if self.axes > 1 else known[..., 0])
        return np.where((each > self.largest).any(axis=-1), _BEYOND_BYTES, items)

    def room_bytes(self, budget_bytes: int) -> int:
        """See `AdditiveCost.room_bytes`: no row is larger than the runs."""
        return super(_PackedByRuns, self).room_bytes(min(budget_bytes, self.most_bytes))

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`: no row is larger than the runs."""
        known = np.minimum(budget_bytes, self.most_bytes)
        return super(_PackedByRuns, self).capacity(padded_size, known)
