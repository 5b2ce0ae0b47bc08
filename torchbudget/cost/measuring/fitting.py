"""Costs fitted to measured steps.

The bytes that live at one moment of a step are `fixed + n·(sample + unit·L + pair·L²)`, with
coefficients of at least 0: what lives then is made of tensors, and their shapes are products of n
and the sizes. The peak is the largest moment: a *maximum* of such forms, of which the optimizer's
step, which does not depend on the batch, is one.

Where every operation of the step was seen, each moment is fitted by itself, and those that are
never the largest are left out; a loop over the length has its first and last ones in common with
another. Where only the peaks were seen, one form and a floor must do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measuring.tracing import Trace
from torchbudget.cost.models.padded import PackedCost, PaddedCost
from torchbudget.errors import CostError

FloatArray: TypeAlias = npt.NDArray[np.float64]

# A fit whose largest error is smaller by less than this is no better one.
_AS_GOOD: Final = 1e-4
# A coefficient whose part of every measured peak is below this is rounding.
_NEGLIGIBLE: Final = 1e-9


def num_coefficients(axes: int) -> int:
    """How many coefficients a form of d axes has: fixed, sample, units and pairs."""
    return 2 + axes + axes * (axes + 1) // 2


def features(n: npt.ArrayLike, sizes: npt.ArrayLike) -> FloatArray:
    """What the coefficients are multiplied by.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.

    Returns:
        1, n, n·Lᵢ for every axis, and n·Lᵢ·Lⱼ for i ≤ j: shape `(k, 2 + d + d·(d + 1)/2)`.
    """
    number = np.asarray(n, np.float64)
    length = np.asarray(sizes, np.float64).reshape(len(number), -1)
    axes = range(length.shape[1])
    columns = [np.ones_like(number), number]
    columns += [number * length[:, i] for i in axes]
    columns += [number * length[:, i] * length[:, j] for i in axes for j in axes if i <= j]
    return np.stack(columns, axis=1)


def non_negative(matrix: FloatArray, target: FloatArray) -> FloatArray:
    """The x ≥ 0 of the smallest ‖matrix·x − target‖.

    Lawson and Hanson's active set method ("Solving least squares problems", 1974, chapter 23),
    with columns scaled to length 1. As many steps as columns, usually.

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
        while True:
            step = np.zeros_like(x)
            step[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            if (step[free] > 0).all():
                break
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
        Forms of which the largest counts; `None` where the moments of the peaks are not to be found
        in every trace.
    """
    matrix = features(n, sizes)
    operations, times = Counter(trace.operations for trace in traces).most_common(1)[0]
    if times >= matrix.shape[1]:
        alike = np.array([trace.operations == operations for trace in traces])
        matrix = matrix[alike]
        history = np.stack([t.live_bytes for t, same in zip(traces, alike, strict=True) if same])
    else:
        history = _common_moments(traces)
        peaks = np.array([trace.peak_bytes for trace in traces])
        if not history.size or (history.max(axis=1) < (1 - _AS_GOOD) * peaks).any():
            return None
    weight = 1 / history.max(axis=1, keepdims=True)
    moments = np.linalg.lstsq(matrix * weight, history * weight, rcond=None)[0]
    decisive = np.unique((features(*_grid(largest)) @ moments).argmax(axis=1))
    forms = [non_negative(matrix * weight, history[:, m] * weight[:, 0]) for m in decisive]
    return _costs(np.stack(forms), matrix, history.max(axis=1))


def _common_moments(traces: Sequence[Trace]) -> npt.NDArray[np.int64]:
    """Live bytes at the moments that every trace has, shape `(k, moments)`.

    Where a loop's length is the sample's, operations do not line up by their places. But the first
    and the last ones of each kind do: a moment is known by its operation, and by how many of that
    kind came before, or come after. The largest are where a loop begins or ends.
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


def fit_peaks(
    n: npt.ArrayLike, sizes: npt.ArrayLike, peaks: npt.ArrayLike
) -> tuple[PaddedCost, ...]:
    """One form and a floor, from peaks alone.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.
        peaks: bytes, shape `(k,)`.
    """
    matrix = features(n, sizes)
    peak = np.asarray(peaks, np.float64)
    order = np.argsort(peak)
    best: tuple[float, FloatArray] | None = None
    # Which of the smallest peaks are of the floor is tried: read off a machine, they are not equal.
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


def total_cost(cost: PaddedCost, offset: float, factor: float, beside: FloatArray) -> PaddedCost:
    """The cost `offset + factor·cost + beside`.

    Args:
        cost: of the tensors.
        offset: bytes that are there in any case; may be negative.
        factor: what their bytes are multiplied by.
        beside: coefficients without the fixed one, of what the batch needs beside its tensors;
            may be empty.
    """
    form = factor * _coefficients(cost)
    form[0] = max(form[0] + offset, 0)
    if len(beside):
        form[1:] += beside
    # The optimizer's step comes when the batch is gone: nothing lives beside it.
    return _cost(form, max(offset + factor * cost.floor_bytes, 0) if cost.floor_bytes else 0)


def additive_bound(costs: Sequence[PaddedCost], factor: float) -> PackedCost:
    """The cheapest additive cost that is nowhere below `factor` times any of these."""
    forms = np.stack([_coefficients(cost) for cost in costs])
    fixed, sample, unit, pair = _split(factor * forms.max(axis=0))
    floor = factor * max(cost.floor_bytes for cost in costs)
    return PackedCost(
        fixed_bytes=max(fixed, floor), sample_bytes=sample, unit_bytes=unit, pair_bytes=pair
    )


def _coefficients(cost: PaddedCost) -> FloatArray:
    """The coefficients in the order of `features`."""
    pair = np.reshape(np.asarray(cost.pair_bytes, np.float64), (cost.axes, cost.axes))
    pairs = (pair + np.tril(pair, -1).T)[np.triu_indices(cost.axes)]
    unit = np.reshape(np.asarray(cost.unit_bytes, np.float64), cost.axes)
    return np.concatenate([[cost.fixed_bytes, cost.sample_bytes], unit, pairs])


def _costs(forms: FloatArray, matrix: FloatArray, peaks: FloatArray) -> tuple[PaddedCost, ...]:
    """Costs of coefficients, shape `(forms, c)`; one that does not depend on n is a floor."""
    forms = np.where(forms * matrix.max(axis=0) < _NEGLIGIBLE * peaks.max(), 0, forms)
    grows = forms[:, 1:].any(axis=1)
    floor = float(forms[~grows, 0].max(initial=0))
    # Where a batch of any size costs the same, the floor is all there is.
    growing = forms[grows] if grows.any() else forms[forms[:, 0].argmax()][None]
    return tuple(_cost(form, floor) for form in np.unique(growing, axis=0))


def _cost(form: FloatArray, floor: float) -> PaddedCost:
    fixed, sample, unit, pair = _split(form)
    if not form[1:].any():
        sample = 1.0  # as good as nothing, but a sample must cost something
    return PaddedCost(
        fixed_bytes=fixed,
        sample_bytes=sample,
        unit_bytes=unit,
        pair_bytes=pair,
        floor_bytes=floor,
    )


def _split(form: FloatArray) -> tuple[float, float, Any, Any]:
    """Coefficients in the order of `features` as a cost takes them."""
    axes = next(d for d in range(1, len(form)) if num_coefficients(d) == len(form))
    fixed, sample, unit, pairs = form[0], form[1], form[2 : 2 + axes], form[2 + axes :]
    pair = np.zeros((axes, axes))
    pair[np.triu_indices(axes)] = pairs
    if axes == 1:
        return float(fixed), float(sample), float(unit[0]), float(pair[0, 0])
    return float(fixed), float(sample), unit, pair


def _grid(largest: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Numbers of samples and sizes all over the domain, evenly in their logarithms."""
    ends = np.atleast_1d(np.asarray(largest, np.float64))
    per_axis = 48 if len(ends) == 1 else 12 if len(ends) == 2 else 6
    axes = [np.geomspace(1, 4096, 25), *(np.geomspace(1, max(e, 1), per_axis) for e in ends)]
    points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    return points[:, 0], points[:, 1:]
