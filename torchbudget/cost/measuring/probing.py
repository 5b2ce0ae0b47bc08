"""Probes of a step, traced or run, the forms that fit them, and how far these can be trusted."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from torchbudget.cost.measuring.fitting import fit_peaks, fit_traces, non_negative, total_cost
from torchbudget.cost.measuring.shapes import Size, Subject, check_shape, run_shapes, traced_shapes
from torchbudget.cost.measuring.tracing import traces
from torchbudget.cost.models.measured import Form, MeasuredCost
from torchbudget.cost.models.padded import FloatArray, PaddedCost, features
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.table import TableCost
from torchbudget.errors import CostError
from torchbudget.machine.allocators import is_out_of_memory, trim_malloc
from torchbudget.machine.host import process_memory
from torchbudget.machine.peaks import Peak, peak_memory
from torchbudget.units import format_bytes

# Less than this is lost in what a process gains and loses by itself.
_SEEN_BYTES: Final = 2**24
# Traced forms that an offset and a factor bring this near to the runs need no further terms.
_SCALED: Final = 0.01
# A form whose error on any probe is larger is not the step's.
_FITS: Final = 0.1

Forms: TypeAlias = tuple[PaddedCost, ...]


class ProbeOutOfMemoryError(Exception):
    """A probe did not fit into the device's or the process's memory."""


class StepRunner:
    """Runs the step and reads its peak; to be used inside `TrainingState.restored(contents=True)`.

    Args:
        subject: the step and its batches.

    Attributes:
        idle_bytes: memory in use while no step runs.
        sampled: whether a peak was only sampled.
        not_finite: whether a step returned a number that is not finite.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._state = subject.state
        self._device = subject.state.device
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # blocks that earlier work left reserved do not count
        with peak_memory(self._device) as idle:
            pass
        self.idle_bytes = idle.bytes
        self._resident_bytes: list[int] = []  # before the second step of each probe
        # The peak of the largest batch, whose blocks stay reserved under smaller ones.
        self._largest: Peak | None = None
        self.sampled = False
        self.not_finite = False

    def run(self, n: int, size: tuple[int, ...], *, held_out: bool = False) -> Probe:
        """Step twice on batches of one shape; the first step loads kernels and fills caches.

        Raises:
            ProbeOutOfMemoryError: it did not fit; all memory that it took is freed.
        """
        try:
            return self._run(n, size, held_out=held_out)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler, the exception's frames no longer keep the step's tensors alive.
        for parameter in self._state.parameters():
            parameter.grad = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        raise ProbeOutOfMemoryError

    def _run(self, n: int, size: tuple[int, ...], *, held_out: bool) -> Probe:
        gc.collect()
        with self._state.checked(), peak_memory(self._device) as peak:
            for _ in range(2):
                resident_bytes = self._read_resident_bytes()
                batch = self._subject.batch(n, size)
                self._wait()
                start_s = time.perf_counter()
                result = self._subject.step(batch)
                self._check_finite(result)
                self._wait()
                seconds = time.perf_counter() - start_s
                del batch, result
        if peak.retries:
            raise ProbeOutOfMemoryError
        self.sampled |= peak.sampled
        self._resident_bytes.append(resident_bytes)
        peak_bytes = self._without_reserve(peak)
        return Probe(n, size, peak_bytes, held_out, "run", seconds)

    def settled(self, probes: Sequence[Probe]) -> list[Probe]:
        """All probes so far, as if resident memory had been from the start what it is now.

        While probes are run, kernels are compiled for new shapes, and the heap gets gaps.
        """
        now_bytes = self._read_resident_bytes()
        return [
            replace(probe, peak_bytes=probe.peak_bytes + max(now_bytes - then_bytes, 0))
            for probe, then_bytes in zip(probes, self._resident_bytes, strict=True)
        ]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _read_resident_bytes(self) -> int:
        cpu = self._device.type == "cpu"
        return process_memory().resident_bytes if cpu else 0

    def _check_finite(self, result: object) -> None:
        value = result.detach() if isinstance(result, torch.Tensor) else result
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            self.not_finite = True

    def _without_reserve(self, peak: Peak) -> int:
        """On CUDA, the peak had its blocks been reserved for it alone.

        The ratio of reserved to allocated bytes is taken to be that of the largest batch.
        """
        if not peak.allocated_bytes:
            return peak.bytes
        largest = self._largest
        if largest is None or peak.allocated_bytes > largest.allocated_bytes:
            self._largest = largest = peak
        share = peak.allocated_bytes / largest.allocated_bytes
        return peak.bytes - peak.reserved_bytes + round(share * largest.reserved_bytes)


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

    if subject.state.is_compiled:
        subject.notes.append(
            "what is compiled was traced as eager code; only runs count it compiled"
        )
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
    return _table_unless_it_fits(forms, probes, subject), probes, aligned


def run_probes(
    subject: Subject, room: int, traced: Forms
) -> tuple[tuple[Form, ...], tuple[Probe, ...]]:
    """Run the step on a few shapes, and fit its peaks; everything is restored.

    Args:
        subject: the step and its batches.
        room: bytes that no probe may exceed.
        traced: the forms that a trace has found; none if nothing is known.

    Returns:
        The forms whose maximum counts, or a table; and what was run.
    """
    if subject.state.device.type == "cpu" and not trim_malloc():
        subject.notes.append(
            "this C library keeps freed memory: the peak depends on the shapes before"
        )
    with subject.state.restored(contents=True):
        runner = StepRunner(subject)
        probes = runner.settled(_run_shapes(subject, runner, room, traced))
    if runner.sampled:
        subject.notes.append(
            "the peak of resident memory was sampled: /proc/self/clear_refs is not writable"
        )
    if runner.not_finite:
        subject.warn(
            "the step returned a loss that is not finite; does make_batch make a valid batch?"
        )
    forms = _fit_runs([p for p in probes if not p.held_out], traced)
    return _table_unless_it_fits(forms, probes, subject), tuple(probes)


def _run_shapes(subject: Subject, runner: StepRunner, room: int, traced: Forms) -> list[Probe]:
    """Run a few shapes, none of which is predicted to exceed the budget."""
    smallest = subject.domain.at(1 / 64)
    try:
        probes = [runner.run(1, smallest)]
    except ProbeOutOfMemoryError as error:
        raise CostError(f"one sample of size {smallest} does not fit into memory") from error
    if probes[0].peak_bytes > room:
        raise CostError(
            "model, gradients, optimizer state and all else in the process need "
            f"{format_bytes(probes[0].peak_bytes)} with one sample of size {smallest}; the budget "
            f"is {format_bytes(room)}"
        )
    for share, size, held_out in run_shapes(subject.domain, traced=bool(traced)):
        target = probes[0].peak_bytes + share * (room - probes[0].peak_bytes)
        so_far = MeasuredCost(forms=_guess(probes, traced), margin=0)
        n = int(so_far.capacity(size if len(size) > 1 else size[0], int(target)))
        if not traced:  # a form fitted to few points is unreliable far beyond them
            n = min(n, _reach(probes, size, runner.idle_bytes, int(target)))
        if n < 1 or any((p.n, p.size) == (n, size) for p in probes):
            continue
        try:
            probes.append(runner.run(n, size, held_out=held_out))
        except ProbeOutOfMemoryError:
            # There is less memory than the budget: later probes aim at half as much.
            subject.notes.append(f"out of memory at {n} samples of size {size}, below the budget")
            room -= (room - probes[0].peak_bytes) // 2
    return probes


def _reach(probes: Sequence[Probe], size: Size, idle_bytes: int, target: int) -> int:
    """The most samples that cannot need more than the target, judged by each probe alone.

    With coefficients of at least 0, bytes grow at most by the factor of the feature that grows
    most. All that is allocated during a step is attributed to the samples; with few of them that is
    too much, so the bound rises from probe to probe.
    """
    most = 1  # a sample that does not fit alone could not be trained on, either
    for probe in probes:
        above = max(probe.peak_bytes - idle_bytes, _SEEN_BYTES)
        new, old = features([1, probe.n], [size, probe.size])[:, 1:]
        most = max(most, int((target - idle_bytes) / (above * (new / old).max())))
    return most


def _guess(probes: Sequence[Probe], traced: Forms) -> Forms:
    """The forms to choose the next shape by, from the runs so far."""
    fitted = [p for p in probes if not p.held_out]
    if traced and len(fitted) == 1:  # a third on top of the tensors, for what kernels may need
        offset = fitted[0].peak_bytes - 4 / 3 * _predicted(traced, fitted)[0]
        return tuple(total_cost(form, offset, 4 / 3, np.zeros(0)) for form in traced)
    return _fit_runs(fitted, traced)


def _fit_runs(probes: Sequence[Probe], traced: Forms) -> Forms:
    """The traced forms with an offset, a scale, and what kernels need beside tensors, all ≥ 0."""
    n, sizes, peaks = columns(probes)
    if not traced:
        return fit_peaks(n, sizes, peaks)
    target = np.array(peaks, np.float64)
    tensors = _predicted(traced, probes)
    # The tensors are certain: only what comes on top of them is fitted. The simplest explanation,
    # an offset and a scale, is tried first; more terms only where it does not fit.
    above = np.stack([np.ones(len(target)), tensors], axis=1)
    for matrix in (above, np.concatenate([above, features(n, sizes)[:, 1:]], axis=1)):
        offset, share, *beside = x = non_negative(matrix / target[:, None], 1 - tensors / target)
        if np.abs((tensors + matrix @ x) / target - 1).max() < _SCALED:
            break
    totals = (total_cost(form, offset, 1 + share, np.array(beside)) for form in traced)
    return tuple(dict.fromkeys(totals))  # they may have become equal


def _predicted(forms: Forms, probes: Sequence[Probe]) -> FloatArray:
    n, sizes, _ = columns(probes)
    several = np.array(sizes) if len(sizes[0]) > 1 else np.array(sizes)[:, 0]
    return MeasuredCost(forms=forms, margin=0).fitted_bytes(n, several).astype(np.float64)


def _table_unless_it_fits(
    forms: tuple[PaddedCost, ...], probes: Sequence[Probe], subject: Subject
) -> tuple[Form, ...]:
    """The forms; or, where one probe is far off, a table of the probes, a warning and a note."""
    errors = MeasuredCost(forms=forms, margin=0, probes=tuple(probes)).errors()
    worst = max(errors, key=abs)
    if abs(worst) <= _FITS:
        return forms
    probe = probes[errors.index(worst)]
    subject.warn(
        f"no formula fits: {probe.n} samples of size {probe.size} took "
        f"{format_bytes(probe.peak_bytes)}, the fitted form is off by {worst:+.1%}; a table of the "
        "measured batches is used instead, which is safe but coarse"
    )
    n, sizes, peaks = columns(probes)
    return (TableCost(numbers=tuple(n), sizes=tuple(sizes), peak_bytes=tuple(peaks)),)


def margin_of(cost: MeasuredCost, least: float) -> float:
    """The margin that a fit needs.

    Twice the largest underestimate of a probe that was held out, and at least the largest of any.
    """
    under = [max(1 / (1 + error) - 1, 0) for error in cost.errors()]
    held_out = [u for u, probe in zip(under, cost.probes, strict=True) if probe.held_out]
    return max([least, *under, *(2 * one for one in held_out)])
