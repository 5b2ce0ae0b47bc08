"""A cost measured by tracing the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchbudget.cost.measuring.fitting import fit_peaks, fit_traces
from torchbudget.cost.measuring.judging import table_unless_it_fits
from torchbudget.cost.measuring.shapes import Domain, Size, check_shape, one_size, traced_shapes
from torchbudget.cost.measuring.tracing import StepTracer, Trace
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.cost.models.measured import Form
from torchbudget.cost.models.padded import PaddedCost
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.errors import MeasureWarning
from torchbudget.units import format_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """What tracing found.

    Attributes:
        forms: those whose maximum counts, or a table.
        probes: what was traced.
        notes: what the user should know.
        aligned: whether each moment of the step was fitted; otherwise only the peaks.
    """

    forms: tuple[Form, ...]
    probes: tuple[Probe, ...]
    notes: tuple[str, ...]
    aligned: bool


def trace_probes(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    state: TrainingState,
    domain: Domain,
) -> Traced:
    """Trace the step on a few shapes, and fit its live bytes.

    Args:
        step: the full training step.
        make_batch: makes a batch of n samples padded to a size.
        state: what the step trains.
        domain: the range of sizes.

    Raises:
        BatchError: `make_batch` ignores its arguments.
        CostError: the step cannot be traced.
    """
    shapes = traced_shapes(domain)
    seen: dict[Any, tuple[int, Size]] = {}

    def batches() -> Iterator[Any]:
        for n, size, _ in [*shapes, shapes[0]]:
            batch = make_batch(n, one_size(size))
            check_shape(batch, n, size, seen)
            yield batch
            del batch

    *traces, again = StepTracer(step, state).traces(batches())
    notes = []
    if any(trace.kept_bytes > 0 for trace in traces):
        kept = max(trace.kept_bytes for trace in traces)
        text = f"a step leaves up to {format_bytes(kept)} allocated when it ends: a leak?"
        warnings.warn(text, MeasureWarning, stacklevel=3)
        notes.append(text)
    elif again.peak_bytes != traces[0].peak_bytes:
        text = (
            f"two steps on one shape took {format_bytes(traces[0].peak_bytes)} and "
            f"{format_bytes(again.peak_bytes)}: the step's memory does not depend on shapes alone"
        )
        warnings.warn(text, MeasureWarning, stacklevel=3)
        notes.append(text)
    if traces[0].assumed:
        notes.append(
            f"the step asked tensors for {traces[0].assumed} truth values; the trace assumes that "
            "all of them are False"
        )
    probes = tuple(
        Probe(n, size, trace.peak_bytes, held_out, "trace")
        for (n, size, held_out), trace in zip(shapes, traces, strict=True)
    )
    forms = _fit_traced(probes, traces, domain)
    aligned = forms is not None
    if forms is None:
        notes.append("the step's operations depend on the shape: fitted to the peaks alone")
        forms = _fit_peaks(probes)
    return Traced(table_unless_it_fits(forms, probes, notes), probes, tuple(notes), aligned)


def _fit_traced(
    probes: Sequence[Probe], traces: Sequence[Trace], domain: Domain
) -> tuple[PaddedCost, ...] | None:
    fitted = [(p, t) for p, t in zip(probes, traces, strict=True) if not p.held_out]
    n, sizes, _ = columns([p for p, _ in fitted])
    return fit_traces(n, sizes, [t for _, t in fitted], domain.largest)


def _fit_peaks(probes: Sequence[Probe]) -> tuple[PaddedCost, ...]:
    return fit_peaks(*columns([p for p in probes if not p.held_out]))
