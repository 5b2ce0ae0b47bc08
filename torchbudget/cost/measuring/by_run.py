"""A cost measured by running the step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from torchbudget.cost.measuring.by_trace import Traced
from torchbudget.cost.measuring.fitting import fit_peaks, non_negative, total_cost
from torchbudget.cost.measuring.judging import table_unless_it_fits
from torchbudget.cost.measuring.running import ProbeOutOfMemoryError, StepRunner
from torchbudget.cost.measuring.shapes import Domain, Size, one_size, run_shapes
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.cost.models.coefficients import FloatArray, features
from torchbudget.cost.models.measured import Form, MeasuredCost
from torchbudget.cost.models.padded import PaddedCost
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine.allocators import trim_malloc
from torchbudget.units import format_bytes

# Less than this is lost in what a process gains and loses by itself.
_SEEN_BYTES: Final = 2**24
# Traced forms that an offset and a factor bring this near to the runs need no further terms.
_SCALED: Final = 0.01


def run_probes(
    step: Callable[[Any], object],
    make_batch: Callable[[int, Any], Any],
    state: TrainingState,
    domain: Domain,
    room: int,
    traced: Traced | None,
    notes: list[str],
) -> tuple[tuple[Form, ...], tuple[Probe, ...]]:
    """Run the step on a few shapes, and fit its peaks; everything is restored.

    Args:
        step: the full training step.
        make_batch: makes a batch of n samples padded to a size.
        state: what the step trains.
        domain: the range of sizes.
        room: bytes that no probe may exceed.
        traced: what a trace has found; `None`: nothing is known.
        notes: for the user; some are appended.

    Returns:
        The forms whose maximum counts, or a table; and what was run.
    """
    if state.device.type == "cpu" and not trim_malloc():
        notes.append("this C library keeps freed memory: the peak depends on the shapes before")
    shapes = None
    if traced is not None and isinstance(traced.forms[0], PaddedCost):
        shapes = MeasuredCost(forms=traced.forms, margin=0)
    with state.restored(contents=True):
        runner = StepRunner(step, make_batch, state)
        probes = runner.settled(_probes(runner, domain, room, shapes, notes))
    if runner.sampled:
        notes.append(
            "the peak of resident memory was sampled: /proc/self/clear_refs is not writable"
        )
    if runner.not_finite:
        text = "the step returned a loss that is not finite; does make_batch make a valid batch?"
        warnings.warn(text, MeasureWarning, stacklevel=3)
        notes.append(text)
    forms = _fit_runs([p for p in probes if not p.held_out], shapes)
    return table_unless_it_fits(forms, probes, notes), tuple(probes)


def _probes(
    runner: StepRunner,
    domain: Domain,
    room: int,
    shapes: MeasuredCost | None,
    notes: list[str],
) -> list[Probe]:
    """Run a few shapes, none of which is predicted to exceed the budget."""
    smallest = domain.at(1 / 64)
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
    for share, size, held_out in run_shapes(domain, traced=shapes is not None):
        target = probes[0].peak_bytes + share * (room - probes[0].peak_bytes)
        so_far = MeasuredCost(forms=_guess(probes, shapes), margin=0)
        n = int(so_far.capacity(one_size(size), int(target)))
        if shapes is None:  # a form fitted to few points is unreliable far beyond them
            n = min(n, _reach(probes, size, runner.idle_bytes, int(target)))
        if n < 1 or any((p.n, p.size) == (n, size) for p in probes):
            continue
        try:
            probes.append(runner.run(n, size, held_out=held_out))
        except ProbeOutOfMemoryError:
            # There is less memory than the budget: later probes aim at half as much.
            notes.append(f"out of memory at {n} samples of size {size}, below the budget")
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


def _guess(probes: Sequence[Probe], shapes: MeasuredCost | None) -> tuple[PaddedCost, ...]:
    """The forms to choose the next shape by, from the runs so far."""
    fitted = [p for p in probes if not p.held_out]
    if shapes is None:
        return fit_peaks(*columns(fitted))
    if len(fitted) == 1:  # a third on top of the tensors, for what kernels may need
        offset = fitted[0].peak_bytes - 4 / 3 * _predicted(shapes, fitted)[0]
        return tuple(total_cost(form, offset, 4 / 3, np.zeros(0)) for form in _formulas(shapes))
    return _fit_runs(fitted, shapes)


def _fit_runs(probes: Sequence[Probe], shapes: MeasuredCost | None) -> tuple[PaddedCost, ...]:
    """The traced forms with an offset, a scale, and what kernels need beside tensors, all ≥ 0."""
    n, sizes, peaks = columns(probes)
    if shapes is None:
        return fit_peaks(n, sizes, peaks)
    target = np.array(peaks, np.float64)
    tensors = _predicted(shapes, probes)
    # The tensors are certain: only what comes on top of them is fitted. The simplest explanation,
    # an offset and a scale, is tried first; more terms only where it does not fit.
    above = np.stack([np.ones(len(target)), tensors], axis=1)
    for matrix in (above, np.concatenate([above, features(n, sizes)[:, 1:]], axis=1)):
        offset, share, *beside = x = non_negative(matrix / target[:, None], 1 - tensors / target)
        if np.abs((tensors + matrix @ x) / target - 1).max() < _SCALED:
            break
    totals = (total_cost(form, offset, 1 + share, np.array(beside)) for form in _formulas(shapes))
    return tuple(dict.fromkeys(totals))  # they may have become equal


def _formulas(cost: MeasuredCost) -> list[PaddedCost]:
    return [form for form in cost.forms if isinstance(form, PaddedCost)]


def _predicted(cost: MeasuredCost, probes: Sequence[Probe]) -> FloatArray:
    n, sizes, _ = columns(probes)
    several = np.array(sizes) if cost.axes > 1 else np.array(sizes)[:, 0]
    return cost.fitted_bytes(n, several).astype(np.float64)
