"""All the forms that explain a few peaks, where these do not tell them apart.

Runs are few, and on several axes they separate the terms of a form poorly: peaks at one length on
an axis do not show whether bytes grow with it or with its square, and a fit that takes the wrong
one is right at every run and wrong between them. So no single fit is trusted. For each size, the
form is sought that gives most there and still explains all peaks; the maximum of these is the cost,
and the next batch is run where the forms that give most and least differ most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measuring.fitting import domain_grid, largest_forms
from torchbudget.cost.measuring.least_squares import non_negative
from torchbudget.cost.measuring.peaks import PeaksFit, fit_peaks
from torchbudget.cost.measuring.shapes import Domain, Size
from torchbudget.cost.measuring.terms import features, powers_of, powers_of_runs
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.protocol import FloatArray

# A form that misses no peak by more explains them all, or by no more than the best fit; readings of
# one shape differ by about half as much.
_SAME: Final = 5e-3
# A form is pulled towards this multiple of what the best fit gives for samples of a size, or to 0,
# as hard as it still explains the peaks: with a weight between these, by so many bisections.
_PULLED: Final = 1e3
_WEIGHTS: Final = (1e-9, 1e1)
_BISECTIONS: Final = 11
# Peaks on the floor that a form passes are taken for equal to it in the next pass.
_PASSES: Final = 3


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """Forms that agree with all peaks, and the floor below which none was.

    Attributes:
        sizes: where a form was sought, shape `(k, d)`.
        most: coefficients of the forms that give most at each size, and of the best fit, shape
            `(k + 1, c)`.
        least: of those that give least, shape `(k, c)`.
        floor: bytes.
    """

    sizes: npt.NDArray[np.int64]
    most: FloatArray
    least: FloatArray
    floor: float

    def forms(self, domain: Domain) -> tuple[Form, ...]:
        """The forms whose maximum is the most that any explanation gives."""
        powers = powers_of(domain.axes)
        floor = self.floor * np.eye(1, len(powers))
        ends = np.array([domain.smallest, domain.largest], np.float64)
        points = features(*domain_grid(ends), powers)
        return largest_forms(np.concatenate([self.most, floor]), points, powers)

    def disputes(self, n: npt.ArrayLike) -> FloatArray:
        """The most bytes over the least ones for n samples of each size, shape `(k,)`."""
        shapes = features(n, self.sizes, powers_of(self.sizes.shape[1]))
        most = np.maximum((shapes @ self.most.T).max(axis=1), self.floor)
        disputes: FloatArray = most / np.maximum((shapes @ self.least.T).min(axis=1), self.floor)
        return disputes


def explained(
    n: npt.ArrayLike,
    sizes: npt.ArrayLike,
    peaks: npt.ArrayLike,
    *,
    idle_bytes: int,
    floor_bytes: int = 0,
    at: list[Size],
) -> Explained:
    """What few peaks that were read off a machine may be: the best fit, and others as good.

    Another form is as good if it misses no peak by more than half a percent, or than the best fit
    does; it has a constant of at least what is in use anyway.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.
        peaks: bytes, shape `(k,)`.
        idle_bytes: what is in use before a step, whatever its batch.
        floor_bytes: up to here a peak may be on the floor, and shows nothing of its samples.
        at: sizes for which to find the forms that give most and least.
    """
    fit = fit_peaks(n, sizes, peaks, few=True)
    axes = len(at[0])
    powers = powers_of(axes)
    shown = [powers.index(power) for power in powers_of_runs(axes)]
    used = np.union1d(shown, fit.used)
    search = _Search.of(n, sizes, peaks, fit, used, idle_bytes, floor_bytes)
    pulls = features(np.ones(len(at)), at, powers)
    pulls[:, 0] = 0  # only what the samples need
    most = [fit.coefficients, *(search.pulled(pull, _PULLED) for pull in pulls)]
    least = [search.pulled(pull, 0.0) for pull in pulls]
    return Explained(np.array(at), np.stack(most), np.stack(least), fit.floor)


@dataclass(frozen=True, slots=True, eq=False)
class _Search:
    """Forms that are equal to the peaks above the floor, and not above those on it.

    Attributes:
        fit: the best one.
        used: the terms that forms may have.
        shares: features of the peaks above the floor, over them.
        wanted: what of these peaks is not idle, over them.
        floor_shares: features of the peaks on the floor, over them.
        room: what of the floor is not idle, over these peaks.
        idle_bytes: in each form.
        allowed: by how much a form may miss a peak.
    """

    fit: PeaksFit
    used: npt.NDArray[np.intp]
    shares: FloatArray
    wanted: FloatArray
    floor_shares: FloatArray
    room: FloatArray
    idle_bytes: int
    allowed: float

    @classmethod
    def of(
        cls,
        n: npt.ArrayLike,
        sizes: npt.ArrayLike,
        peaks: npt.ArrayLike,
        fit: PeaksFit,
        used: npt.NDArray[np.intp],
        idle_bytes: int,
        floor_bytes: int,
    ) -> _Search:
        peak = np.asarray(peaks, np.float64)
        above = peak > max(fit.floor, floor_bytes)
        powers = powers_of(np.size(sizes) // len(peak))
        shares = features(n, sizes, powers) / peak[:, None]
        worst = float(np.abs(shares[above] @ fit.coefficients - 1).max(initial=0))
        shares = shares[:, used]
        at_most = np.where(above, peak, np.maximum(peak, floor_bytes))
        part = (at_most - idle_bytes) / peak
        return cls(
            fit=fit,
            used=used,
            shares=shares[above],
            wanted=part[above],
            floor_shares=shares[~above],
            room=part[~above],
            idle_bytes=idle_bytes,
            allowed=max(_SAME, worst),
        )

    def pulled(self, pull: FloatArray, times: float) -> FloatArray:
        """The coefficients of a form that gives much more, or less, of what a sample needs.

        Args:
            pull: features of a sample, shape `(c,)`.
            times: of what the best fit gives, to pull to.
        """
        usual = float(pull @ self.fit.coefficients) or 1.0
        row = pull[self.used] / usual
        best = self.fit.coefficients
        low, high = map(np.log, _WEIGHTS)
        for _ in range(_BISECTIONS):
            weight = np.exp((low + high) / 2)
            solved = self._solved(weight * row, weight * times)
            if solved is None:
                high = np.log(weight)
                continue
            low = np.log(weight)
            best = np.zeros(len(pull))
            best[self.used] = solved
            best[0] += self.idle_bytes
        return best

    def _solved(self, row: FloatArray, target: float) -> FloatArray | None:
        """Least squares with one more row; `None` if the form no longer explains the peaks."""
        at_floor = np.zeros(
            len(self.room), np.bool_
        )  # of those on the floor, that it must not pass
        for _ in range(_PASSES):
            matrix = np.concatenate([self.shares, self.floor_shares[at_floor], row[None]])
            wanted = np.concatenate([self.wanted, self.room[at_floor], [target]])
            solved = non_negative(matrix, wanted)
            over = self.floor_shares @ solved - self.room > self.allowed
            if not (over & ~at_floor).any():
                break
            at_floor |= over
        missed = np.abs(self.wanted - self.shares @ solved).max(initial=0)
        return None if over.any() or missed > self.allowed else solved
