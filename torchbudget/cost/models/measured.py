"""A cost that was measured on a training step, what it was measured on, and how well it fits."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np

from torchbudget.cost.measuring.fitting import additive_bound, fit_peaks
from torchbudget.cost.models.padded import UNLIMITED, PackedCost, PaddedCost
from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.cost.models.table import TableCost
from torchbudget.errors import CostError, MeasureWarning, MissingExtraError
from torchbudget.machine.peaks import Peak
from torchbudget.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Form: TypeAlias = PaddedCost | TableCost

_FORMAT: Final = 1
# A margin is counted in parts of this: integer arithmetic, exact in both directions.
_PARTS: Final = 2**14
# Beyond it a prediction says nothing, and its bytes would not fit 64 bits.
_MOST_MARGIN: Final = 1000
# What a margin grows by when an allocation had to be tried again.
_RETRIED: Final = 0.02

_Bytes = TypeVar("_Bytes", int, IntArray)


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured batch.

    Attributes:
        n: samples.
        size: padded size, one int per axis.
        peak_bytes: what its step needed.
        held_out: whether it only judged the fit.
        how: "trace" or "run".
        seconds: that the step took; `None` where it was traced.
    """

    n: int
    size: tuple[int, ...]
    peak_bytes: int
    held_out: bool
    how: str
    seconds: float | None = None


def columns(probes: Sequence[Probe]) -> tuple[list[int], list[tuple[int, ...]], list[int]]:
    """Samples, sizes and peaks of probes."""
    return [p.n for p in probes], [p.size for p in probes], [p.peak_bytes for p in probes]


@dataclass(slots=True, eq=False)
class _Seen:
    """What training told about a cost: the one thing here that changes."""

    worst: float = 0.0
    steps: int = 0
    largest_bytes: int = 0
    granted: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredCost:
    """Peak bytes of a training step, as `measure_cost` found them.

    Attributes:
        forms: formulas of which the largest counts, or a single table.
        margin: what is added to every prediction, as a share of it.
        probes: what was measured.
        measured_on: model, device, torch and more, by name.
        notes: what the user should know of how it was measured.
    """

    forms: tuple[Form, ...]
    margin: float
    probes: tuple[Probe, ...] = ()
    measured_on: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    _seen: _Seen = field(default_factory=_Seen, repr=False)

    def __post_init__(self) -> None:
        if not self.forms:
            raise CostError("a measured cost needs at least one form")
        if not 0 <= self.margin <= _MOST_MARGIN:
            raise CostError(f"margin must be 0 to {_MOST_MARGIN}, got {self.margin!r}")

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return self.forms[0].axes

    @property
    def time(self) -> PaddedCost | None:
        """Nanoseconds of a step, as a cost model; `None` where nothing was run.

        Fitted to the seconds of the probes: the second of two steps on each shape.
        """
        ran = [probe for probe in self.probes if probe.seconds is not None]
        if not ran:
            return None
        n, sizes, _ = columns(ran)
        [fitted] = fit_peaks(n, sizes, [round(1e9 * (probe.seconds or 0)) for probe in ran])
        return fitted

    @property
    def _parts(self) -> int:
        return math.ceil(self.margin * _PARTS)

    def fitted_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """What was fitted, without the margin; see `CostModel.batch_bytes`."""
        total = self.forms[0].batch_bytes(n, padded_size)
        for form in self.forms[1:]:
            total = np.maximum(total, form.batch_bytes(n, padded_size))
        return total

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; the margin is in it."""
        return self._with_margin(self.fitted_bytes(n, padded_size))

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        # The inverse of what the margin adds: whole parts first, then what is left of one.
        budget = np.asarray(budget_bytes, np.int64) - self._parts
        whole = budget // (_PARTS + self._parts)
        rest = np.minimum(budget - whole * (_PARTS + self._parts), _PARTS - 1)
        fitted = whole * _PARTS + rest
        n = np.full(np.broadcast_shapes(fitted.shape, self._shape(padded_size)), UNLIMITED)
        for form in self.forms:
            n = np.minimum(n, form.capacity(padded_size, fitted))
        return n

    def _with_margin(self, fitted: _Bytes) -> _Bytes:
        return fitted + (fitted // _PARTS + 1) * self._parts

    def _shape(self, padded_size: ArrayLike) -> tuple[int, ...]:
        shape = np.shape(padded_size)
        return shape if self.axes == 1 else shape[:-1]

    def packed(self) -> PackedCost:
        """This cost for batches without padding, where `make_batch` made such ones.

        Their probes hold n samples of one size; in a packed batch each sample costs by its own. The
        margin is in it. It is additive, hence above every form that was fitted, the floor too.

        Raises:
            CostError: no formula fitted: what a sample costs is not its own alone, as where packed
                samples are attended to under one mask.
        """
        formulas = [form for form in self.forms if isinstance(form, PaddedCost)]
        if len(formulas) < len(self.forms):
            raise CostError("a table of batches does not tell what each sample costs")
        return additive_bound(formulas, 1 + self.margin)

    # ------------------------------------------------------------------ while training

    def observe(self, n: int, size: int | Sequence[int], peak: Peak | int | None) -> None:
        """Compare what a step really needed with what was predicted.

        The cost itself stays as it is, as plans are functions of it; `corrected` gives one with the
        larger margin, and `MemoryBudgetBatchSampler.replan` goes on with that one.

        Args:
            n: samples of the batch.
            size: its padded size.
            peak: what `peak_memory` found around its step, or its bytes. On CUDA the allocator
                keeps what it reserved once, so that it is compared with the largest step so far.
                `None`: it ran out of memory.

        Warns:
            MeasureWarning: the first time that a step needed more than was predicted, or that
                CUDA's allocator had to try an allocation again.
        """
        if self.axes == 1 and isinstance(size, Sequence):
            [size] = size
        if peak is None:
            peak = Peak(retries=1)
        told = peak if isinstance(peak, Peak) else Peak(bytes=peak)
        seen = self._seen
        seen.steps += 1
        kept = seen.largest_bytes if told.allocated_bytes else 0
        seen.largest_bytes = fitted = max(int(self.fitted_bytes(n, size)), kept)
        predicted = self._with_margin(fitted)
        if told.bytes <= predicted and not told.retries:
            return
        first, worst = seen.worst <= self.margin, told.bytes / fitted - 1
        if told.retries:  # what it needed is not known, only that there was less
            worst = max(worst, self.margin + _RETRIED, seen.granted + _RETRIED)
        seen.worst = max(seen.worst, worst)
        if first:
            needed = f"needed {format_bytes(told.bytes)}"
            if told.retries:
                needed = "did not find the memory that it asked for"
            warnings.warn(
                f"a step on {n} samples of size {size} {needed}; predicted were "
                f"{format_bytes(predicted)}; sampler.replan() plans what is to come with a "
                "larger margin, cost.corrected() has it",
                MeasureWarning,
                stacklevel=2,
            )

    def corrected(self) -> MeasuredCost:
        """This cost, with a margin that covers all that `observe` was told."""
        if self._seen.worst <= self.margin:
            return self
        note = f"the margin was {self.margin:.2%} before {self._seen.steps:,} steps were observed"
        margin = min(self._seen.worst + 1e-3, _MOST_MARGIN)
        return replace(self, margin=margin, notes=(*self.notes, note), _seen=_Seen())

    def granted(self, margin: float) -> MeasuredCost:
        """This cost with another margin, which goes on learning from what this one observes."""
        self._seen.granted = margin
        return replace(self, margin=margin)

    # ------------------------------------------------------------------ keeping it

    def save(self, path: str | Path) -> None:
        """Write it as JSON, with what it was measured on."""
        written = {
            "format": _FORMAT,
            "kind": "table" if isinstance(self.forms[0], TableCost) else "formula",
            "forms": [asdict(form) for form in self.forms],
            "margin": self.margin,
            "probes": [asdict(probe) for probe in self.probes],
            "measured_on": dict(self.measured_on),
            "notes": list(self.notes),
        }
        Path(path).write_text(json.dumps(written, indent=2) + "\n", "utf-8")

    # ------------------------------------------------------------------ telling of it

    def errors(self) -> list[float]:
        """Fitted / measured − 1 of each probe, without the margin."""
        return [
            int(self.fitted_bytes(p.n, p.size if self.axes > 1 else p.size[0])) / p.peak_bytes - 1
            for p in self.probes
        ]

    def report(self) -> str:
        """A table of the probes, what was fitted and how far it is off."""
        names = ("samples", "size", "measured", "fitted", "error", "seconds")
        lines = ["{:>8}  {:>12}  {:>12}  {:>12}  {:>8}  {:>8}".format(*names) + "  probe"]
        for probe, error in zip(self.probes, self.errors(), strict=True):
            size = " × ".join(map(str, probe.size))
            fitted = format_bytes(round(probe.peak_bytes * (1 + error)))
            seconds = "" if probe.seconds is None else f"{probe.seconds:.3f}"
            held = ", held out" if probe.held_out else ""
            lines.append(
                f"{probe.n:>8,}  {size:>12}  {format_bytes(probe.peak_bytes):>12}  {fitted:>12}  "
                f"{error:>+8.3%}  {seconds:>8}  {probe.how}{held}"
            )
        lines += [f"form: {form}" for form in self.forms]
        lines.append(f"margin: {self.margin:.3%}")
        lines += [f"{name}: {value}" for name, value in self.measured_on.items()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Measured against fitted bytes, and the errors, as a matplotlib figure.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingExtraError.of("matplotlib", "plot") from error
        figure = Figure(figsize=(9, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        measured = np.array([probe.peak_bytes for probe in self.probes]) / 2**20
        errors = np.array(self.errors())
        held = np.array([probe.held_out for probe in self.probes])
        ends = [measured.min(), measured.max()]
        left.plot(ends, ends, color="0.7")
        for mask, label in ((~held, "fitted"), (held, "held out")):
            left.plot(measured[mask], measured[mask] * (1 + errors[mask]), "o", label=label)
            right.plot(measured[mask], 100 * errors[mask], "o", label=label)
        right.axhline(-100 * self.margin, color="0.7")
        left.set(xlabel="measured, MiB", ylabel="fitted, MiB", xscale="log", yscale="log")
        right.set(xlabel="measured, MiB", ylabel="error, %", xscale="log")
        left.legend()
        return figure


def load_cost(path: str | Path, measured_on: Mapping[str, str] | None = None) -> MeasuredCost:
    """Read a cost that `MeasuredCost.save` wrote.

    Args:
        path: of the file.
        measured_on: what it is to be used on, as `describe_step(step)` tells it; what differs is
            warned of.

    Raises:
        CostError: the file is not a saved cost.

    Warns:
        MeasureWarning: it was measured on something else.
    """
    try:
        told = json.loads(Path(path).read_text("utf-8"))
        saved_as = told["format"]
        make: Callable[[Any], Form] = _table if told["kind"] == "table" else _formula
        cost = MeasuredCost(
            forms=tuple(make(form) for form in told["forms"]),
            margin=told["margin"],
            probes=tuple(Probe(**{**p, "size": tuple(p["size"])}) for p in told["probes"]),
            measured_on=told["measured_on"],
            notes=tuple(told["notes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CostError(f"{path} is not a saved cost: {type(error).__name__}: {error}") from error
    if saved_as != _FORMAT:
        raise CostError(f"{path}: format {saved_as!r} is not {_FORMAT}, which is read here")
    differing = [
        f"{name}: {cost.measured_on.get(name)!r} then, {now!r} now"
        for name, now in (measured_on or {}).items()
        if cost.measured_on.get(name) != now
    ]
    if differing:
        warnings.warn(
            f"{path} was measured on something else: {'; '.join(differing)}",
            MeasureWarning,
            stacklevel=2,
        )
    return cost


def _table(told: Mapping[str, Any]) -> TableCost:
    return TableCost(
        numbers=tuple(told["numbers"]),
        sizes=tuple(map(tuple, told["sizes"])),
        peak_bytes=tuple(told["peak_bytes"]),
    )


def _formula(told: Mapping[str, Any]) -> PaddedCost:
    return PaddedCost(**told)
