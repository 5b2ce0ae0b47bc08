"""Costs fitted to measured steps.

The bytes that live at one moment of a step are `fixed + n·(sample + unit·L + pair·L²)`, with
coefficients of at least 0: what lives then is made of tensors, and their shapes are products of n
and the sizes. The peak is the largest moment: a *maximum* of such forms, of which the optimizer's
step, which does not depend on the batch, is one.

Where every operation of the step was seen, each moment is fitted by itself, and those that are
never the largest are left out. Loops whose number of turns is the length share their first and last
moments. Where only the peaks were seen, one form and a floor are fitted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measuring.tracing import Trace
from torchbudget.cost.models.padded import (
    FloatArray,
    PaddedCost,
    coefficients_of,
    cost_of,
    features,
)
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.errors import CostError

# A fit counts as better only if its largest error is smaller by more than this.
_AS_GOOD: Final = 1e-4
# A coefficient whose part of every measured peak is below this is rounding.
_NEGLIGIBLE: Final = 1e-9


def non_negative(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x ≥ 0 of the smallest ‖matrix·x − target‖.

    Lawson and Hanson's active set method ("Solving least squares problems", 1974, chapter 23),
    with columns scaled to length 1. Usually as many steps as columns.

    Args:
        matrix: shape `(k, c)`.
        target: shape `(k,)`.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(lengths > 0, lengths, 1)
    x = np.zeros(matrix.shape[1])
    free = np.zeros(len(x), np.bool_)
    tolerance = 1e-10 * float(np.linalg.norm(target) or 1)
    for _ in range(10 * len(x)):
        gradient = np.where(free, -np.inf, scaled.T @ (target - scaled @ x))
        if gradient.max() <= tolerance:
            break
        free[gradient.argmax()] = True
        while True:  # until the solution on the free columns is positive
            step = np.zeros_like(x)
            step[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if (step[free] > 0).all():
                break
            # Go as far towards it as all stay positive, and fix those that arrive at 0.
            falling = free & (step <= 0)
            share = (x[falling] / (x[falling] - step[falling])).min()
            x += share * (step - x)
            free &= x > tolerance * 1e-6
            x[~free] = 0
        x = step
    return x / np.where(lengths > 0, lengths, 1)


def fit_traces(
    n: npt.ArrayLike, sizes: npt.ArrayLike, traces: Sequence[Trace], largest: npt.ArrayLike
) -> tuple[PaddedCost, ...] | None:
    """The forms whose maximum is the peak, from steps of which every operation was seen.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.
        traces: one of each shape.
        largest: the largest size on every axis, shape `(d,)`.

    Returns:
        Forms whose maximum is the peak; `None` where the moments of the peaks are not in every
        trace.
    """
    matrix = features(n, sizes)
    operations, times = Counter(trace.operations for trace in traces).most_common(1)[0]
    if times >= matrix.shape[1]:  # enough traces of the same operations to solve for all moments
        alike = np.array([trace.operations == operations for trace in traces])
        matrix = matrix[alike]
        history = np.stack([t.live_bytes for t, same in zip(traces, alike, strict=True) if same])
    else:
        history = _common_moments(traces)
        peaks = np.array([trace.peak_bytes for trace in traces])
        if not history.size or (history.max(axis=1) < (1 - _AS_GOOD) * peaks).any():
            return None
    # Relative errors count: each trace is divided by its peak. Plain least squares, which fit all
    # moments at once, find those that are the peak somewhere; only these are fitted with x ≥ 0.
    weight = 1 / history.max(axis=1, keepdims=True)
    moments = np.linalg.lstsq(matrix * weight, history * weight, rcond=None)[0]
    decisive = np.unique((features(*_grid(largest)) @ moments).argmax(axis=1))
    forms = [non_negative(matrix * weight, history[:, m] * weight[:, 0]) for m in decisive]
    return _costs(np.stack(forms), matrix, history.max(axis=1))


def fit_peaks(
    n: npt.ArrayLike, sizes: npt.ArrayLike, peaks: npt.ArrayLike
) -> tuple[PaddedCost, ...]:
    """One form and a floor, from peaks alone.

    The floor is one of the measured peaks: each is tried, and the peaks above it are fitted.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.
        peaks: bytes, shape `(k,)`.
    """
    matrix = features(n, sizes)
    peak = np.asarray(peaks, np.float64)
    order = np.argsort(peak)
    best: tuple[float, FloatArray] | None = None
    # Peaks on the floor differ a little when they are read off a machine.
    for on_floor in range(1, len(peak) + 1):
        floor, above = peak[order[on_floor - 1]], order[on_floor:]
        constant = np.zeros(matrix.shape[1])
        constant[0] = floor
        form = non_negative(matrix[above] / peak[above, None], np.ones(len(above)))
        error = float(np.abs(np.maximum(floor, matrix @ form) / peak - 1).max())
        if best is None or error < best[0] - _AS_GOOD:
            best = error, np.stack([form, constant])
    if best is None:
        raise CostError("there are no peaks to fit")
    return _costs(best[1], matrix, peak)


def fit_time(probes: Sequence[Probe]) -> PaddedCost | None:
    """Nanoseconds of a step as a cost, from the probes that were run; `None` where none was."""
    timed = [probe for probe in probes if probe.seconds is not None]
    if not timed:
        return None
    n, sizes, _ = columns(timed)
    [fitted] = fit_peaks(n, sizes, [round(1e9 * (probe.seconds or 0)) for probe in timed])
    return fitted


def total_cost(cost: PaddedCost, offset: float, factor: float, beside: FloatArray) -> PaddedCost:
    """The cost `offset + factor·cost + beside`.

    Args:
        cost: of the tensors.
        offset: bytes that do not depend on the batch; may be negative.
        factor: what the tensors' bytes are multiplied by.
        beside: coefficients, without the fixed one, of what the batch needs beside its tensors;
            may be empty.
    """
    form = factor * coefficients_of(cost)
    form[0] = max(form[0] + offset, 0)
    if len(beside):
        form[1:] += beside
    # The optimizer steps after the batch's activations are freed: `beside` is not in the floor.
    return cost_of(form, max(offset + factor * cost.floor_bytes, 0) if cost.floor_bytes else 0)


def _common_moments(traces: Sequence[Trace]) -> npt.NDArray[np.int64]:
    """Live bytes at the moments that every trace has, shape `(k, moments)`.

    Where a loop takes as many turns as the sample is long, the same position is another operation
    in each trace. But the first and the last operations of each kind match: a moment is identified
    by its operation, and by how many of that kind came before, or come after. The peak is usually
    where a loop begins or ends.
    """
    keyed = []
    for trace in traces:
        total, seen = Counter(trace.operations), Counter[Any]()
        moments = {}
        for operation, live in zip(trace.operations, trace.live_bytes.tolist(), strict=True):
            before = seen[operation]
            seen[operation] += 1
            moments[operation, before, "before"] = live
            moments[operation, total[operation] - before, "after"] = live
        keyed.append(moments)
    common = [key for key in keyed[0] if all(key in moments for moments in keyed)]
    return np.array([[moments[key] for key in common] for moments in keyed], np.int64)


def _costs(forms: FloatArray, matrix: FloatArray, peaks: FloatArray) -> tuple[PaddedCost, ...]:
    """Costs of coefficients, shape `(forms, c)`; one that does not depend on n is a floor."""
    forms = np.where(forms * matrix.max(axis=0) < _NEGLIGIBLE * peaks.max(), 0, forms)
    grows = forms[:, 1:].any(axis=1)
    floor = float(forms[~grows, 0].max(initial=0))
    # Where no form grows with the batch, the largest constant stands in for one.
    growing = forms[grows] if grows.any() else forms[forms[:, 0].argmax()][None]
    return tuple(cost_of(form, floor) for form in np.unique(growing, axis=0))


def _grid(largest: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Numbers of samples and sizes over the whole domain, evenly in their logarithms."""
    ends = np.atleast_1d(np.asarray(largest, np.float64))
    per_axis = 48 if len(ends) == 1 else 12 if len(ends) == 2 else 6
    axes = [np.geomspace(1, 4096, 25), *(np.geomspace(1, max(e, 1), per_axis) for e in ends)]
    points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    return points[:, 0], points[:, 1:]
