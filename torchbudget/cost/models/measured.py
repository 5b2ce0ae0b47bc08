"""A cost that was measured on a training step, what training shows of it, and its report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from torchbudget.cost.models.form import Form
from torchbudget.cost.models.observations import Observations
from torchbudget.cost.models.packed import PackedMeasuredCost, is_beyond, warn_of_other_budget
from torchbudget.cost.models.padded import PackedCost, PaddedCost, additive_bound
from torchbudget.cost.models.polynomials import Polynomials
from torchbudget.cost.models.probe import Probe
from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.cost.models.table import TableCost
from torchbudget.cost.models.vouched import VouchedRange
from torchbudget.errors import CostError, CostOverflowError, MeasureWarning
from torchbudget.files import write_whole
from torchbudget.machine.peaks import Peak
from torchbudget.plotting import new_figure
from torchbudget.units import MAX_BYTES, format_bytes
from torchbudget.warn import warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A margin is counted in parts of this: integer arithmetic, exact in both directions.
_PARTS: Final = 2**14
# Beyond it a prediction says nothing, and its bytes would not fit 64 bits.
MOST_MARGIN: Final = 1000
# What a margin grows by when an allocation failed.
_FAILED: Final = 0.02
FORMAT: Final = 3  # of files
_ROW: Final = "{:>8}  {:>12}  {:>12}  {:>12}  {:>8}  {:>8}  {}"  # of reports


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredCost:
    """Peak bytes of a training step, as `measure_cost` measured them.

    The largest of the forms, with the margin; `MAX_BYTES` where that was measured nowhere near, and
    for longer samples; and no more than the table, where there is one.

    Attributes:
        forms: formulas whose maximum counts.
        margin: what is added to every prediction, as a share of it.
        largest: the largest size on every axis; beyond it nothing is predicted. `None`: unlimited.
        vouched: how far the forms may be used; `None`: everywhere, since each moment of the step
            was seen and fitted.
        table: measured batches, where no formula fits well: at each shape the smaller one counts.
        time_form: see `time`; `None` where no step was timed.
        probes: what was measured.
        measured_on: model, device, torch and more, by name.
        notes: what the user should know of how it was measured.
        predicted_for: the budget for whose batches an allocator's gaps were predicted, in bytes;
            `None`: nothing of this cost depends on a budget.
    """

    forms: tuple[Form, ...]
    margin: float
    largest: tuple[int, ...] | None = None
    vouched: VouchedRange | None = None
    table: TableCost | None = None
    time_form: PaddedCost | None = None
    probes: tuple[Probe, ...] = ()
    measured_on: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    predicted_for: int | None = None
    _observed: Observations = field(default_factory=Observations, repr=False)
    _polynomials: Polynomials = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if len({form.axes for form in self.forms}) != 1:
            raise CostError("a measured cost needs forms, all of the same number of axes")
        terms = [form.terms for form in self.forms]
        object.__setattr__(self, "_polynomials", Polynomials(terms))
        if not 0 <= self.margin <= MOST_MARGIN:
            raise CostError(f"margin must be 0 to {MOST_MARGIN}, got {self.margin!r}")

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return self.forms[0].axes

    @property
    def time(self) -> PaddedCost:
        """Nanoseconds of a step, as a cost model.

        Fitted to the seconds of the probes: the second of two steps on each shape.

        Raises:
            CostError: no step was timed, since none was run.
        """
        if self.time_form is None:
            raise CostError(
                "this cost has no time: its steps were traced, not run; measure it with "
                "method='auto' or 'run'"
            )
        return self.time_form

    @property
    def _parts(self) -> int:
        return math.ceil(self.margin * _PARTS)

    def fitted_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """The largest of the forms, without the margin; see `CostModel.batch_bytes`."""
        return self._polynomials.batch_bytes(n, padded_size)

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `MAX_BYTES` where nothing vouches for a prediction.

        Raises:
            CostOverflowError: what is predicted is 2⁶³ bytes or more.
        """
        if self.vouched is None:
            fitted = self.fitted_bytes(n, padded_size)
        else:
            fitted = self.vouched.batch_bytes(self.fitted_bytes, n, padded_size)
        beyond = fitted == MAX_BYTES
        known = np.where(beyond, 0, fitted)
        if (known // _PARTS).max(initial=0) >= MAX_BYTES // (_PARTS + self._parts):
            raise CostOverflowError("this batch costs 2**63 bytes or more, with the margin")
        total: IntArray = known + (known // _PARTS + 1) * self._parts
        total = np.where(beyond, MAX_BYTES, total)
        if self.table is not None:
            total = np.minimum(total, self.table.batch_bytes(n, padded_size))
        return np.where(is_beyond(padded_size, self.largest), MAX_BYTES, total)

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        # The inverse of adding the margin: whole parts first, then the rest of one.
        budget = np.asarray(budget_bytes, np.int64) - self._parts
        whole = budget // (_PARTS + self._parts)
        rest = np.minimum(budget - whole * (_PARTS + self._parts), _PARTS - 1)
        fitted = whole * _PARTS + rest
        if self.vouched is None:
            n = self._polynomials.capacity(padded_size, fitted)
        else:
            n = self.vouched.capacity(self._polynomials.capacity, padded_size, fitted)
        if self.table is not None:
            n = np.maximum(n, self.table.capacity(padded_size, budget_bytes))
        return np.where(is_beyond(padded_size, self.largest), 0, n)

    def check_budget(self, budget_bytes: int) -> None:
        """See `MadeForBudget`.

        Warns:
            MeasureWarning: batches that fill it are of other sizes than those whose gaps were
                predicted.
        """
        warn_of_other_budget(self.predicted_for, budget_bytes)

    def packed(self) -> PackedCost:
        """This cost for batches without padding, where `make_batch` made such ones.

        Their probes have n samples of one size; in a packed batch each sample costs by its own
        size. The margin is included. It is additive, hence above every form that was fitted; and
        samples beyond `largest` are over every budget, as they are of this cost.

        Raises:
            CostError: what a sample costs depends on the others (a table, terms in n²), or not
                only on the samples (terms without n).
        """
        if self.table is not None:
            raise CostError("measured batches without a formula do not show what each sample costs")
        if self.vouched is not None:
            raise CostError(
                "this cost only holds as far as measured batches have reached, which is unknown of "
                "packed ones; its notes say why not every moment of the step was fitted"
            )
        options = additive_bound(self.forms, 1 + self._parts / _PARTS, self._parts)
        return PackedMeasuredCost(**options, largest=self.largest, predicted_for=self.predicted_for)

    def observe(self, n: int, size: int | Sequence[int], peak: Peak | int | None) -> None:
        """Compare what a step really needed with what was predicted.

        The cost itself does not change, as plans are functions of it; `with_observed_margin`
        returns one with the larger margin, and `MemoryBudgetBatchSampler.replan` goes on with it.

        Args:
            n: samples of the batch.
            size: its padded size.
            peak: what `peak_memory` measured around its step, or its bytes. CUDA's allocator keeps
                what it has reserved, so there it is compared with the largest step so far, and
                only where more was reserved than before. `None`: the step ran out of memory. An
                allocation that succeeded at the second attempt is no failure: `report` counts them.

        Warns:
            MeasureWarning: the first time that a step needed more than was predicted, or that an
                allocation of CUDA's failed.
        """
        if self.axes == 1 and isinstance(size, Sequence):
            [size] = size
        if peak is None:
            peak = Peak(failures=1)
        elif not isinstance(peak, Peak):
            peak = Peak(bytes=peak)
        observed = self._observed
        observed.steps += 1
        observed.retries += peak.retries
        reserved_for = observed.largest_bytes if peak.allocated_bytes else 0
        predicted = max(int(self.batch_bytes(n, size)), reserved_for)
        # Of a batch that nothing vouches for, what it took is all that is known.
        known = predicted if predicted < MAX_BYTES else max(reserved_for, peak.bytes)
        observed.largest_bytes = known
        # What was reserved before the step, and was enough for it, does not show what it needs.
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
                needed = "did not get the memory that it asked for"
            warn(
                f"a step on {n} samples of size {size} {needed}, but {format_bytes(predicted)} "
                "were predicted; sampler.replan() plans later batches with a larger margin, "
                "cost.with_observed_margin() returns the cost with it",
                MeasureWarning,
            )

    @property
    def was_observed(self) -> bool:
        """Whether `observe` has seen a step."""
        return self._observed.steps > 0

    def with_observed_margin(self) -> MeasuredCost:
        """This cost with a margin that covers every step that `observe` has seen.

        At least that which batches are planned with by now: after `replan`, of all ranks' steps;
        after a sampler's state was loaded, of those before.
        """
        observed = self._observed
        margin = observed.margin + 1e-3 if observed.margin > self.margin else self.margin
        margin = min(max(margin, observed.planned_margin), MOST_MARGIN)
        if margin <= self.margin:
            return self
        note = f"the margin was {self.margin:.2%} before steps of training were observed"
        notes = (*self.notes, note)
        return replace(self.with_margin(margin), notes=notes, _observed=Observations())

    def planned_with(self, margin: float) -> MeasuredCost:
        """This cost with the margin that batches are planned with from now on."""
        self._observed.planned_margin = margin
        return self.with_margin(margin)

    def with_margin(self, margin: float) -> MeasuredCost:
        """This cost with another margin; both share what they observe."""
        table = self.table
        if table is not None:  # which is as far off as the rest
            factor = (1 + margin) / (1 + self.margin)
            table = replace(
                table, peak_bytes=tuple(math.ceil(factor * b) for b in table.peak_bytes)
            )
        return replace(self, margin=margin, table=table)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with what it was measured on; `load_cost` reads it.

        With the margin that covers what was observed: see `with_observed_margin`. The file is there
        as a whole or as it was before, also where several processes write it.
        """
        kept = asdict(self.with_observed_margin())
        attributes = {k: value for k, value in kept.items() if not k.startswith("_")}
        written = {"format": FORMAT, **attributes}
        text = json.dumps(written, indent=2) + "\n"
        write_whole(Path(path), lambda file: file.write(text.encode()), by_several=True)

    def errors(self) -> list[float]:
        """Fitted / measured − 1 of each probe, without the margin."""
        return [
            int(self.fitted_bytes(p.n, p.size if self.axes > 1 else p.size[0])) / p.peak_bytes - 1
            for p in self.probes
        ]

    def report(self) -> str:
        """A table of the probes, what was fitted and its errors."""
        lines = [_ROW.format("samples", "size", "measured", "fitted", "error", "seconds", "probe")]
        for probe, error in zip(self.probes, self.errors(), strict=True):
            lines.append(
                _ROW.format(
                    f"{probe.n:,}",
                    " × ".join(map(str, probe.size)),
                    format_bytes(probe.peak_bytes),
                    format_bytes(round(probe.peak_bytes * (1 + error))),
                    f"{error:+.3%}",
                    "" if probe.seconds is None else f"{probe.seconds:.3f}",
                    f"{probe.how}, held out" if probe.held_out else probe.how,
                )
            )
        lines += [f"form: {form}" for form in self.forms]
        lines.append(f"margin: {self.margin:.3%}")
        if self.largest is not None:
            lines.append(f"sizes: up to {' × '.join(map(str, self.largest))}")
        if self.vouched is not None:
            most = format_bytes(max(self.vouched.peak_bytes))
            lines.append(
                f"vouched for: sizes up to {max(self.vouched.sizes)}, and where the batches of a "
                f"shorter and a longer size took as much; at most {most}"
            )
        if self.table is not None:
            lines.append("table: at each shape the cheapest measured batch of at least that size")
        lines += [f"{name}: {value}" for name, value in self.measured_on.items()]
        lines += [f"note: {note}" for note in self.notes]
        if self._observed.retries:
            lines.append(
                f"note: in training, {self._observed.retries:,} allocations succeeded only after "
                "the allocator's cache was flushed, which takes time; expandable segments, as of "
                "configure_allocators(), or a smaller budget make them rare"
            )
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Measured against fitted bytes, and the errors, as a matplotlib figure.

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
        left.set(xlabel="measured, MiB", ylabel="fitted, MiB", xscale="log", yscale="log")
        right.set(xlabel="measured, MiB", ylabel="error, %", xscale="log")
        left.legend()
        return figure
