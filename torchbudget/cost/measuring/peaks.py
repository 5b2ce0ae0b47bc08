"""Forms fitted to the peaks of measured steps alone, and to their seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measuring.fitting import BELOW, BETTER, EXPLAINED, largest_forms
from torchbudget.cost.measuring.least_squares import from_above
from torchbudget.cost.measuring.terms import (
    Columns,
    choices_of,
    features,
    plain_powers,
    powers_of,
    powers_of_runs,
)
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.padded import PaddedCost, cost_options
from torchbudget.cost.models.probe import Probe, columns
from torchbudget.cost.models.protocol import FloatArray
from torchbudget.errors import CostError

# An error from above counts as much less, where choices of terms are compared.
_OVER: Final = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class PeaksFit:
    """One form and a floor.

    Attributes:
        coefficients: of `powers_of`, shape `(c,)`.
        used: the indices of those that the form may have.
        floor: bytes.
        under: how much the fit to all peaks but one is below that one at most, as a share of what
            it is then.
    """

    coefficients: FloatArray
    used: Columns
    floor: float
    under: float

    def forms(self, n: npt.ArrayLike, sizes: npt.ArrayLike) -> tuple[Form, ...]:
        """The form and the floor, without the one that matters at none of these shapes."""
        powers = powers_of(np.size(sizes) // len(np.atleast_1d(n)))
        both = np.stack([self.coefficients, np.eye(1, len(powers))[0] * self.floor])
        return largest_forms(both, features(n, sizes, powers), powers)


def fit_peaks(
    n: npt.ArrayLike, sizes: npt.ArrayLike, peaks: npt.ArrayLike, *, few: bool = False
) -> PeaksFit:
    """One form and a floor, from peaks alone.

    The floor is one of the measured peaks: each is tried, and the peaks above it are fitted.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.
        peaks: bytes, shape `(k,)`.
        few: whether only few peaks were read off a machine, which do not show terms of a higher
            degree than two, nor such without n.
    """
    powers = powers_of(np.size(sizes) // len(np.atleast_1d(n)))
    matrix, peak = features(n, sizes, powers), np.asarray(peaks, np.float64)
    shown = set(powers_of_runs(len(powers[0].sizes)))
    best: tuple[float, PeaksFit] | None = None
    for used in choices_of(powers):
        if few and not {powers[at] for at in used if powers[at].samples < 2} <= shown:
            continue
        if best is not None and len(peak) < len(used) + 2:
            break  # too few to tell
        form, floor = _form_and_floor(matrix[:, used], peak, BELOW)
        errors = _left_out_errors(matrix[:, used], peak, floor)
        error = float(np.maximum(-errors, errors * _OVER).max(initial=0))
        if best is None or error < min(BETTER * best[0], best[0] - EXPLAINED):
            coefficients = np.zeros(matrix.shape[1])
            coefficients[used] = form
            under = float((1 / (1 + errors) - 1).max(initial=0))
            best = error, PeaksFit(coefficients, used, floor, under)
    if best is None or not len(peak):
        raise CostError("there are no peaks to fit")
    return best[1]


def fit_time(probes: Sequence[Probe]) -> PaddedCost | None:
    """Nanoseconds of a step as a cost, from the probes that were run; `None` where none was."""
    timed = [probe for probe in probes if probe.seconds is not None]
    if not timed:
        return None
    n, sizes, _ = columns(timed)
    matrix = features(n, sizes, plain_powers(len(sizes[0])))
    seconds = np.array([probe.seconds for probe in timed], np.float64)
    form, floor = _form_and_floor(matrix, np.maximum(1e9 * seconds, 1))
    options = cost_options(form)
    if not form[1:].any():
        options["sample_bytes"] = 1.0  # next to nothing, but a sample must cost something
    return PaddedCost(**options, floor_bytes=floor)


def _form_and_floor(
    matrix: FloatArray, peak: FloatArray, below: float = 1.0
) -> tuple[FloatArray, float]:
    """A form, and the floor of peaks."""
    order = np.argsort(peak)
    best: tuple[float, FloatArray, float] | None = None
    # Peaks on the floor differ a little when they are read off a machine.
    for on_floor in range(1, len(peak) + 1):
        floor, above = float(peak[order[on_floor - 1]]), order[on_floor:]
        form = from_above(matrix[above] / peak[above, None], np.ones(len(above)), below)
        error = float(np.abs(np.maximum(floor, matrix @ form) / peak - 1).max())
        if best is None or error < best[0] - 1e-4:
            best = error, form, floor
    if best is None:
        raise CostError("there are no peaks to fit")
    return best[1:]


def _left_out_errors(matrix: FloatArray, peak: FloatArray, floor: float) -> FloatArray:
    """Relative errors of the peaks above the floor, each by the form fitted to the others."""
    above = np.flatnonzero(peak > floor)
    fitted = np.empty(len(above))
    for at, left_out in enumerate(above):
        others = above[above != left_out]
        form = from_above(matrix[others] / peak[others, None], np.ones(len(others)), BELOW)
        fitted[at] = max(floor, float(matrix[left_out] @ form))
    errors: FloatArray = fitted / peak[above] - 1
    return errors
