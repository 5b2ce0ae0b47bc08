"""Forms fitted to measured steps.

The bytes that live at one moment of a step are a polynomial of n and the sizes with coefficients of
at least 0: what lives then is made of tensors, and their shapes are products of n and the sizes.
The peak is the largest moment: a *maximum* of such forms, of which the optimizer's step, which does
not depend on the batch, is one.

Where every operation of the step was seen, each moment is fitted by itself, and those that are
never the largest are left out. Loops whose number of turns is the length share their first and last
moments. Where only the peaks were seen, one form and a floor are fitted.

A moment gets as few terms as explain it: a constant and shares of n; then higher powers of several
sizes, as in attention over an image; then terms of the sizes without n; then terms in n². What
explains it is judged on each step by a fit to all the others, so that terms which only follow
rounding are not taken in. And since layers with strides round sizes up or down, what a fit misses
from below counts more than what it misses from above.

Convolutions without padding, and chunks that overlap, leave of a size what is less by a constant: a
square of it is a polynomial, but one with a negative coefficient. Counted from the smallest size on
it has none, and still no size costs less than a smaller one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measuring.least_squares import from_above, left_out_errors
from torchbudget.cost.measuring.shapes import Size
from torchbudget.cost.measuring.terms import (
    Columns,
    Powers,
    choices_of,
    counted_from,
    features,
    plain_powers,
    powers_of,
)
from torchbudget.cost.measuring.tracing import Trace
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term
from torchbudget.cost.models.protocol import FloatArray

# A relative error below this is explained: blocks that are rounded up, workspaces.
EXPLAINED: Final = 5e-4
# More terms must leave less than this share of the error without them.
BETTER: Final = 0.3
# Counted from the smallest size on, a moment must leave less than this share.
_MUCH_BETTER: Final = 0.125
# One that is missed by less is certain enough to be the peak of steps that were not seen.
_CERTAIN: Final = 0.01
# A moment that the fit to the other steps misses by more is no polynomial of the shape.
_POLYNOMIAL: Final = 0.1
# Nor is one of a loop, which only seems to be the same moment in steps of other lengths.
_LOOP_POLYNOMIAL: Final = 2e-3
# Steps whose numbers of operations differ by more have such loops.
_LOOPS: Final = 1.3
# A form that is nowhere larger than the others by more than this is left out.
_REDUNDANT: Final = 2e-4
# A coefficient whose part of the peak is nowhere above this is rounding.
_NEGLIGIBLE: Final = 1e-9
_CHUNK: Final = 64  # points of the domain at once
# What a fit misses from below counts as often as this from above.
BELOW: Final = 1000.0
# A term that is nowhere more of the peak is left out.
_SEEN: Final = 3e-4


def fit_traces(
    n: npt.ArrayLike,
    sizes: npt.ArrayLike,
    traces: Sequence[Trace],
    domain: FloatArray,
    smallest: Size,
) -> tuple[Form, ...] | None:
    """The forms whose maximum is the peak, from steps of which every operation was seen.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k, d)`.
        traces: one of each shape.
        domain: the smallest size that was traced on every axis, and the largest one, shape
            `(2, d)`.
        smallest: size that forms are asked for; what they count from, where they count from one.

    Returns:
        Forms whose maximum is the peak; `None` where the moments of the peaks are not in every
        trace, or are no polynomials.
    """
    number, size = np.asarray(n), np.asarray(sizes)
    peaks = np.array([trace.peak_bytes for trace in traces], np.float64)
    alike = of_same_operations(traces, len(domain[0]))
    if alike is not None:
        rows = [t.live_bytes for t, same in zip(traces, alike, strict=True) if same]
        shapes = number[alike], size[alike]
        forms = _fit_moments(shapes, peaks[alike], np.stack(rows), domain, smallest, _POLYNOMIAL)
        if forms is not None or alike.all():
            return forms
    lengths = np.array([len(trace.operations) for trace in traces])
    if lengths.max() < _LOOPS * lengths.min():
        shapes = number, size
        return _fit_moments(shapes, peaks, _common_moments(traces), domain, smallest, _POLYNOMIAL)
    # Loops of a turn or two have few moments in common with long ones.
    for least in (0.0, lengths.max() / 8, lengths.max() / 4):
        long = lengths >= least
        if long.sum() <= len(plain_powers(len(domain[0]))):
            break
        history = _common_moments([t for t, one in zip(traces, long, strict=True) if one])
        shapes = number[long], size[long]
        seen = np.array([np.maximum(domain[0], size[long].min(axis=0)), domain[1]])
        forms = _fit_moments(shapes, peaks[long], history, seen, smallest, _LOOP_POLYNOMIAL)
        if forms is not None:
            return forms
    return None


def of_same_operations(traces: Sequence[Trace], axes: int) -> npt.NDArray[np.bool_] | None:
    """Which steps are of the operations that most of them have; `None`: too few are the same."""
    operations, times = Counter(trace.operations for trace in traces).most_common(1)[0]
    if times <= len(plain_powers(axes)):
        return None
    return np.array([trace.operations == operations for trace in traces])


def _fit_moments(
    shapes: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    peaks: FloatArray,
    history: npt.NDArray[np.int64],
    domain: FloatArray,
    smallest: Size,
    polynomial: float,
) -> tuple[Form, ...] | None:
    """The forms of the moments that are ever the peak.

    Args:
        shapes: numbers of samples, shape `(k,)`, and padded sizes, shape `(k, d)`.
        peaks: bytes, shape `(k,)`.
        history: live bytes at moments that all of these traces have, shape `(k, moments)`.
        domain: see `fit_traces`.
        smallest: see `fit_traces`.
        polynomial: a moment that is missed by more is none.
    """
    if not history.size or (history.max(axis=1) < (1 - EXPLAINED) * peaks).any():
        return None
    plain = powers_of(len(domain[0]))
    powers = plain + counted_from(smallest, plain)
    shares = np.unique(history, axis=1) / peaks[:, None]  # relative errors count
    everything = features(*shapes, powers)
    either = everything / peaks[:, None]
    matrix = either[:, : len(plain)]
    terms, coefficients, errors = explain(matrix, shares, choices_of(plain))
    # Not all are polynomials: where a loop has fewer turns elsewhere, its k-th one may be the last.
    good = np.flatnonzero(errors < polynomial)
    if not len(good) or (shares[:, good].max(axis=1) < 1 - EXPLAINED).any():
        return None
    points = features(*domain_grid(domain), powers)
    # Beyond the steps that were seen, only what is certain, and grows slowly, may be the largest.
    squares = np.array([one.samples == 2 for one in plain])
    parts = np.abs(coefficients[squares]) * matrix[:, squares].max(axis=0)[:, None]
    coefficients[squares] *= parts > _CERTAIN  # what is less may be rounding
    slow = ~coefficients[np.ix_(squares, good)].any(axis=0)
    certain = good[slow & (errors[good] < _CERTAIN)]
    # Of moments that are equal, the simplest.
    lengths = np.array([len(terms[moment]) for moment in good.tolist()])
    rank = np.lexsort((errors[good], lengths))
    at_peak = shares[:, good[rank]] >= (1 - _REDUNDANT) * shares[:, good].max(axis=1, keepdims=True)
    decisive = {*good[rank][at_peak.argmax(axis=1)].tolist()}
    decisive |= {*certain[_largest(points[:, : len(plain)], coefficients[:, certain])].tolist()}
    forms = np.zeros((len(decisive), len(powers)))
    for form, moment in zip(forms, sorted(decisive), strict=True):
        used = terms[moment]
        error = _fill(form, either, used, shares[:, moment])
        if error > EXPLAINED:
            # Where layers round sizes, too, what is above all that was seen is safer in between.
            started = np.zeros_like(form)
            better = max(EXPLAINED, _MUCH_BETTER * error * (polynomial == _LOOP_POLYNOMIAL))
            if _fill(started, either, used + len(plain), shares[:, moment]) < better:
                form[:] = started
    return largest_forms(forms, np.concatenate([points, everything]), powers)


def _fill(form: FloatArray, matrix: FloatArray, used: Columns, moment: FloatArray) -> float:
    """Fit the coefficients of a moment.

    Args:
        form: the coefficients, written to, shape `(c,)`.
        matrix: features over peaks, shape `(k, c)`.
        used: the columns that it may have.
        moment: bytes over peaks, shape `(k,)`.

    Returns:
        The largest error, as a share of the peak.
    """
    bytes_ = from_above(matrix[:, used], moment, BELOW)
    # What matters in no step that was seen could matter far beyond them.
    used = used[(matrix[:, used] * bytes_).max(axis=0) > _SEEN]
    form[used] = from_above(matrix[:, used], moment, BELOW)
    return float(np.abs(matrix @ form - moment).max())


def total_form(form: Form, offset: float, factor: float, beside: Sequence[Term]) -> Form:
    """The form `offset + factor·form + beside`.

    Args:
        form: of the tensors.
        offset: bytes that do not depend on the batch; may be negative.
        factor: what the tensors' bytes are multiplied by.
        beside: what the batch needs beside its tensors.
    """
    total: defaultdict[Powers, float] = defaultdict(float)
    for term in form.terms:
        total[Powers(term.samples, term.sizes, term.start)] += factor * term.bytes
    constant = Powers(0, (0,) * form.axes)
    total[constant] = max(total[constant] + offset, 0)
    # The optimizer steps after the batch's activations are freed: `beside` is not in that form.
    if any(term.samples for term in form.terms):
        for term in beside:
            total[Powers(term.samples, term.sizes, term.start)] += term.bytes
    return form_of(list(total.values()), list(total))


def form_of(coefficients: Sequence[float], powers: Sequence[Powers]) -> Form:
    """The form of the coefficients that are not 0."""
    pairs = zip(coefficients, powers, strict=True)
    terms = tuple(Term(float(bytes_), *power) for bytes_, power in pairs if bytes_ > 0)
    return Form(terms=terms or (Term(0.0, *powers[0]),))


def explain(
    matrix: FloatArray, history: FloatArray, choices: Sequence[Columns]
) -> tuple[list[Columns], FloatArray, FloatArray]:
    """The terms of each moment and its coefficients, by plain least squares for all at once.

    Args:
        matrix: features over peaks, shape `(k, c)`.
        history: bytes over peaks, shape `(k, moments)`; or those of each storage.
        choices: columns that a moment may use, from the simplest choice on.

    Returns:
        The columns that each moment uses, coefficients of shape `(c, moments)`, and the largest
        error on any step of a fit to the others.
    """
    moments = history.shape[1]
    chosen = np.zeros(moments, np.intp)
    coefficients = np.zeros((matrix.shape[1], moments))
    worst = np.full(moments, np.inf)
    for number, used in enumerate(choices):
        if number and len(matrix) <= len(used):
            continue
        solved, errors = left_out_errors(matrix[:, used], history)
        better = (worst > EXPLAINED) & (errors < BETTER * worst)
        better |= number == 0
        chosen[better] = number
        worst = np.where(better, errors, worst)
        coefficients[:, better] = 0
        coefficients[np.ix_(used, better)] = solved[:, better]
    return [choices[number] for number in chosen.tolist()], coefficients, worst


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


def _largest(points: FloatArray, coefficients: FloatArray) -> list[int]:
    """The moments that are the largest somewhere."""
    found: set[int] = set()
    if not coefficients.size:
        return []
    for start in range(0, len(points), _CHUNK):
        found.update((points[start : start + _CHUNK] @ coefficients).argmax(axis=1).tolist())
    return sorted(found)


def largest_forms(
    rows: FloatArray, points: FloatArray, powers: Sequence[Powers]
) -> tuple[Form, ...]:
    """The forms of coefficients, shape `(forms, c)`, without those that nowhere matter.

    Args:
        rows: coefficients.
        points: features of the domain, shape `(points, c)`.
        powers: of the features.
    """
    top = (points @ rows.T).max(axis=1)
    parts = (points / top[:, None]).max(axis=0)  # the largest part of the peak that each can be
    rows = np.where(rows * parts < _NEGLIGIBLE, 0, rows)
    bytes_ = points @ rows.T
    top = bytes_.max(axis=1)
    left = list(np.argsort(-np.bincount(bytes_.argmax(axis=1), minlength=len(rows)), kind="stable"))
    chosen = [left.pop(0)]
    while left and (short := bytes_[:, chosen].max(axis=1) < (1 - _REDUNDANT) * top).any():
        best = max(left, key=lambda one: (bytes_[short, one] >= top[short]).sum())
        left.remove(best)
        chosen.append(best)
    return tuple(form_of(row, powers) for row in rows[sorted(chosen)])


def domain_grid(domain: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Numbers of samples and sizes over the whole domain, evenly in their logarithms."""
    lowest, highest = np.asarray(domain, np.float64)
    per_axis = {1: 40, 2: 10, 3: 5}.get(len(highest), 3)
    axes = [np.geomspace(1, 65536, 33)]
    axes += [np.geomspace(low, high, per_axis) for low, high in zip(lowest, highest, strict=True)]
    points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
    return points[:, 0], points[:, 1:]
