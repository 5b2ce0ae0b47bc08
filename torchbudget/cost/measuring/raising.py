"""Forms raised above steps that they were not fitted to.

Layers with strides, patches or chunks round sizes. What a moment takes is then a polynomial of the
rounded size, and of the given one a staircase: forms are fitted to the steps that were traced, from
above, and are below others by at most a stair. How far they are above some steps tells how high
stairs are. In bytes of a long sample that is little, in those of a short one much: so it is added
to the sizes rather than to the bytes, where that takes less.

A sample so short that a layer leaves one position of it takes other operations, as there is nothing
to transpose. Its steps say nothing of the others, nor the others of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.form import Form
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.polynomials import Term
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.protocol import FloatArray

# What aligned forms are above some traced step tells how far they may be below others: as much of
# it must be added as makes the sizes of any kind hold that were not traced.
_UNSEEN: Final = 0.5
# Of other operations, what is missed by less is covered by any margin.
_MISSED: Final = 5e-3
# Of less, nearly all is the floor, and says nothing of what a sample takes.
_OUTWEIGHS: Final = 1.5


def with_missed(
    forms: tuple[Form, ...], probes: Sequence[Probe], shorter_than: npt.ArrayLike
) -> tuple[Form, ...]:
    """The forms, and such as hold what some probes took for batches no larger than those.

    Two lines in n for each: bytes grow with n from a floor that is at most the lowest peak, so that
    fewer samples are below the line from there through the probe, and more below the one through 0;
    or, up to a probe of the same size and more samples, below the line through both.
    A sample that is short on one axis alone takes so much for its length on the others: they are
    factors, so that what grows faster with them is below the lines, too.

    Args:
        forms: whose maximum counts.
        probes: steps that the forms were not fitted to.
        shorter_than: sizes below it are short, shape `(d,)`.
    """
    if not probes:
        return forms
    floor = float(min(*fitted_bytes(forms, probes), *(probe.peak_bytes for probe in probes)))
    nothing = (0,) * forms[0].axes
    for probe in sorted(probes, key=lambda one: one.peak_bytes, reverse=True):
        if fitted_bytes(forms, [probe])[0] > (1 - _MISSED) * probe.peak_bytes:
            continue
        is_long = np.greater_equal(probe.size, shorter_than)
        powers = tuple(map(int, is_long))
        product = math.prod(np.array(probe.size)[is_long].tolist())
        units = probe.n * product
        lines = [(floor, (probe.peak_bytes - floor) / units)]
        larger = [one for one in probes if one.size == probe.size and one.n > probe.n]
        if larger:
            other = min(larger, key=lambda one: one.n)
            slope = (other.peak_bytes - probe.peak_bytes) / (other.n * product - units)
            start = probe.peak_bytes - slope * units
            lines.append(
                (start, slope) if start > 0 else (0.0, other.peak_bytes / other.n / product)
            )
        elif probe.peak_bytes > _OUTWEIGHS * floor:
            lines.append((0.0, probe.peak_bytes / units))
        forms += tuple(
            Form(terms=(Term(start, 0, nothing), Term(slope, 1, powers))) for start, slope in lines
        )
    return forms


def raised(forms: tuple[Form, ...], probes: Sequence[Probe]) -> tuple[tuple[Form, ...], float]:
    """Forms that take sizes for larger than they are, and the margin that is left to add.

    Args:
        forms: whose maximum counts.
        probes: steps that they were fitted to, or should hold for.

    Returns:
        Of all ways to share what must be added between sizes and bytes, the one that makes the
        probes least too high.
    """
    peaks = np.array([probe.peak_bytes for probe in probes])
    fitted = fitted_bytes(forms, probes)
    above = np.maximum(fitted / peaks - 1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = fitted_bytes(forms, probes, longer=1) - fitted
        longer = np.where(above > 0, (fitted - peaks) / steps, 0)
    best: tuple[float, tuple[Form, ...], float] | None = None
    for most in np.unique(np.append(above, 0)).tolist():
        margin = _UNSEEN * most
        size = _UNSEEN * longer[above > most].max(initial=0)
        if not math.isfinite(size):
            continue  # there, bytes do not depend on the size
        trial = _of_larger_sizes(forms, math.ceil(size))
        too_high = float(np.log((1 + margin) * fitted_bytes(trial, probes) / peaks).mean())
        if best is None or too_high < best[0]:
            best = too_high, trial, margin
    if best is None:
        return forms, 0.0
    return best[1:]


def fitted_bytes(
    forms: tuple[Form, ...], probes: Sequence[Probe], *, longer: int = 0
) -> npt.NDArray[np.float64]:
    """What forms say of the shapes of probes, or of sizes that are longer on every axis."""
    n, sizes, _ = columns(probes)
    several = np.array(sizes) + longer
    several = several if several.shape[1] > 1 else several[:, 0]
    bytes_: FloatArray = MeasuredCost(forms=forms, margin=0).fitted_bytes(n, several).astype(float)
    return bytes_


def _of_larger_sizes(forms: tuple[Form, ...], longer: int) -> tuple[Form, ...]:
    """Forms that say of each size what they said of one that is longer on every axis."""
    if not longer:
        return forms

    def moved(term: Term) -> Term:
        if not any(term.sizes):
            return term
        start = term.start or (0,) * len(term.sizes)
        return replace(term, start=tuple(one - longer for one in start))

    return tuple(Form(terms=tuple(map(moved, form.terms))) for form in forms)
