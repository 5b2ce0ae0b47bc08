"""Least squares without negative coefficients, and forms that are found again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MeasuredCost, PaddedCost
from torchbudget.cost.measuring.fitting import fit_peaks, fit_time
from torchbudget.cost.measuring.least_squares import non_negative
from torchbudget.cost.measuring.terms import powers_of
from torchbudget.cost.models.probe import Probe


@given(st.integers(1, 3), st.integers(0, 2**32))
def test_non_negative_least_squares(axes: int, seed: int) -> None:
    """Kuhn and Tucker's conditions hold: no coefficient could move and make the error smaller."""
    rng = np.random.default_rng(seed)
    columns = len(powers_of(axes))
    matrix = rng.random((columns + 3, columns))
    target = matrix @ (rng.random(columns) * (rng.random(columns) < 0.5)) + rng.normal(
        0, 0.1, columns + 3
    )
    x = non_negative(matrix, target)
    assert (x >= 0).all()
    slope = matrix.T @ (matrix @ x - target)
    scale = np.abs(matrix.T @ target).max() + 1
    assert (slope >= -1e-7 * scale).all()
    assert np.abs(slope[x > 0]).max(initial=0) <= 1e-7 * scale


@given(st.integers(0, 2**32))
def test_peaks_of_the_form_are_found_again(seed: int) -> None:
    """A floor and one form, seen at enough shapes above it, are recovered."""
    rng = np.random.default_rng(seed)
    truth = PaddedCost(
        fixed_bytes=rng.integers(0, 10**7),
        sample_bytes=float(rng.integers(0, 10**4)),
        unit_bytes=float(rng.integers(10**3, 10**5)),
        pair_bytes=float(rng.integers(0, 100)),
        floor_bytes=2 * 10**7,
    )
    n = np.array([1, 8, 300, 50, 200, 16, 400])
    sizes = np.array([4, 8, 100, 512, 300, 2000, 64])
    fit = fit_peaks(n, sizes, truth.batch_bytes(n, sizes))
    found = MeasuredCost(forms=fit.forms(n, sizes), margin=0)
    grid = np.meshgrid([1, 5, 20, 500], [10, 60, 250, 1000, 2000])
    assert found.fitted_bytes(*grid) == pytest.approx(truth.batch_bytes(*grid), rel=1e-3)


def test_time_is_fitted_to_what_was_run() -> None:
    """Nanoseconds; probes that were traced have none."""
    shapes = [(1, 8), (8, 64), (4, 100), (16, 256), (2, 512), (32, 128)]
    traced = [Probe(n, (length,), 1, False, "trace") for n, length in shapes]
    assert fit_time(traced) is None
    ran = [Probe(n, (length,), 1, False, "run", 1e-6 * n * length) for n, length in shapes]
    time = fit_time([*traced, *ran])
    assert time is not None
    assert time.batch_bytes(10, 300) == pytest.approx(3e6, rel=0.02)
