"""A cost measured by running the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import numpy as np

from torchbudget.cost.measuring.fitting import fit_peaks, non_negative, total_cost
from torchbudget.cost.measuring.judging import table_unless_it_fits
from torchbudget.cost.measuring.running import ProbeOutOfMemoryError, StepRunner
from torchbudget.cost.measuring.shapes import Size, run_shapes
from torchbudget.cost.measuring.subject import Subject
from torchbudget.cost.models.coefficients import FloatArray, features
from torchbudget.cost.models.measured import Form, MeasuredCost
from torchbudget.cost.models.padded import PaddedCost
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.errors import CostError
from torchbudget.machine.allocators import trim_malloc
from torchbudget.units import format_bytes

# Less than this is lost in what a process gains and loses by itself.
_SEEN_BYTES: Final = 2**24
# Traced forms that an offset and a factor bring this near to the runs need no further terms.
_SCALED: Final = 0.01

Forms: TypeAlias = tuple[PaddedCost, ...]


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
    return table_unless_it_fits(forms, probes, subject), tuple(probes)


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
