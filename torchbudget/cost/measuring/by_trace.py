"""A cost measured by tracing the step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchbudget.cost.measuring.fitting import fit_peaks, fit_traces
from torchbudget.cost.measuring.judging import table_unless_it_fits
from torchbudget.cost.measuring.shapes import Size, check_shape, traced_shapes
from torchbudget.cost.measuring.subject import Subject
from torchbudget.cost.measuring.tracing import traces
from torchbudget.cost.models.measured import Form
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.units import format_bytes


def trace_probes(subject: Subject) -> tuple[tuple[Form, ...], tuple[Probe, ...], bool]:
    """Trace the step on a few shapes, and fit its live bytes.

    Returns:
        The forms whose maximum counts, or a table; what was traced; and whether each moment of the
        step was fitted, otherwise only the peaks.

    Raises:
        BatchError: `make_batch` ignores its arguments.
        CostError: the step cannot be traced.
    """
    shapes = traced_shapes(subject.domain)
    seen: dict[Any, tuple[int, Size]] = {}

    def batches() -> Iterator[Any]:
        for n, size, _ in [*shapes, shapes[0]]:
            batch = subject.batch(n, size)
            check_shape(batch, n, size, seen)
            yield batch
            del batch

    first, *others, again = traces(subject.step, subject.state, batches())
    counted = [first, *others]
    kept_bytes = max(trace.kept_bytes for trace in counted)
    if kept_bytes > 0:
        subject.warn(
            f"a step leaves up to {format_bytes(kept_bytes)} allocated when it ends: a leak?"
        )
    elif again.peak_bytes != first.peak_bytes:
        subject.warn(
            f"two steps on one shape took {format_bytes(first.peak_bytes)} and "
            f"{format_bytes(again.peak_bytes)}: the step's memory does not depend on shapes alone"
        )
    if first.assumed:
        subject.notes.append(
            f"the step asked tensors for {first.assumed} truth values; the trace assumes that "
            "all of them are False"
        )
    probes = tuple(
        Probe(n, size, trace.peak_bytes, held_out, "trace")
        for (n, size, held_out), trace in zip(shapes, counted, strict=True)
    )
    fitted = [(p, trace) for p, trace in zip(probes, counted, strict=True) if not p.held_out]
    n, sizes, peaks = columns([probe for probe, _ in fitted])
    forms = fit_traces(n, sizes, [trace for _, trace in fitted], subject.domain.largest)
    aligned = forms is not None
    if forms is None:
        subject.notes.append("the step's operations depend on the shape: fitted to the peaks alone")
        forms = fit_peaks(n, sizes, peaks)
    return table_unless_it_fits(forms, probes, subject), probes, aligned
