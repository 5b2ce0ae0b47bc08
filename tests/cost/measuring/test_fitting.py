"""Least squares without negative coefficients, and forms that are found again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MeasuredCost, PaddedCost
from torchbudget.cost.measuring.fitting import _CHUNK, _largest, fit_traces
from torchbudget.cost.measuring.least_squares import non_negative
from torchbudget.cost.measuring.peaks import fit_peaks, fit_time
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
    """A floor and one form, seen at enough shapes above it, are recovered.

    Then those that are left out are predicted, too.
    """
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
    assert fit.under < 0.05


@given(st.integers(1, 3 * _CHUNK), st.integers(2, 20), st.integers(0, 2**32))
def test_moments_that_are_the_largest_somewhere(points: int, moments: int, seed: int) -> None:
    """All of them, at whichever points of the domain, and no others."""
    rng = np.random.default_rng(seed)
    shapes, coefficients = rng.random((points, 3)), rng.random((3, moments))
    expected = {max(range(moments), key=row.__getitem__) for row in shapes @ coefficients}
    assert _largest(shapes, coefficients) == sorted(expected)


def test_a_moment_between_those_that_were_the_peak_counts() -> None:
    """Though it was the peak of no step, and has a little in n², as rounding looks."""
    small = [(2, 1, 1), (2, 25, 13), (2, 97, 49), (2, 512, 256), (2, 512, 1), (2, 1, 256)]
    large = [(256, 97, 49), (256, 1, 1), (256, 512, 256), (256, 512, 1), (256, 1, 256)]
    between = [(16, 256, 256), (24, 512, 128), (32, 97, 128), (8, 256, 49), (12, 358, 77)]
    shapes = np.array(small + large + between)

    def live(n: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        floor = 4.65e6 + 16 * n * a + 8 * n * b
        middle = 4.11e6 + 8032 * n * a + 8 * n * b + 8 * n * a**2 + 0.5 * n**2
        both = 3.2e6 + 9058 * n * a + 16630 * n * b + 8 * n * (a**2 + a * b + b**2)
        return np.stack([floor, middle, both], axis=-1)

    traces: list[Any] = [
        SimpleNamespace(
            operations=("x", "y", "z"), live_bytes=row.astype(int), peak_bytes=row.max()
        )
        for row in live(*shapes.T)
    ]
    domain = np.array([[1.0, 1.0], [512.0, 256.0]])
    forms = fit_traces(shapes[:, 0], shapes[:, 1:], traces, domain, (1, 1))
    assert forms is not None
    unseen = np.array([(2, 46, 1), (16, 5, 1), (3, 75, 3), (3, 66, 5)])
    found = MeasuredCost(forms=forms, margin=0).fitted_bytes(unseen[:, 0], unseen[:, 1:])
    assert found == pytest.approx(live(*unseen.T).max(axis=1), rel=1e-3)


@given(st.sampled_from([16, 64, 80]), st.integers(1, 4), st.integers(0, 2**32))
def test_chunks_that_overlap_are_fitted_exactly(multiple: int, less: int, seed: int) -> None:
    """L/m − k of them, compared in pairs: n·(L/m − k)², whose part in n·L is negative."""
    rng = np.random.default_rng(seed)
    smallest, largest = (less + 1) * multiple, 128 * multiple
    per_sample, per_pair = rng.integers(100, 10**5), rng.integers(100, 10**4)

    def live(n: np.ndarray, size: np.ndarray) -> np.ndarray:
        floor = 5e6 + 16 * n * size
        return np.stack([floor, 1e6 + n * (per_sample + per_pair * (size / multiple - less) ** 2)])

    sizes = np.unique(np.geomspace(smallest, largest, 6) // multiple * multiple)
    shapes = np.array([(n, size) for n in (2, 16, 256) for size in sizes])
    traces: list[Any] = [
        SimpleNamespace(operations=("x", "y"), live_bytes=row.astype(int), peak_bytes=row.max())
        for row in live(*shapes.T).T
    ]
    domain = np.array([[smallest], [largest]], float)
    forms = fit_traces(shapes[:, 0], shapes[:, 1:], traces, domain, (smallest,))
    assert forms is not None
    found = MeasuredCost(forms=forms, margin=0)
    n, size = np.meshgrid([1, 5, 40, 3000], np.arange(smallest, largest + 1, multiple))
    assert found.fitted_bytes(n, size) == pytest.approx(live(n, size).max(axis=0), rel=2e-3)
    # Sizes that were not asked for cost no less than shorter ones, and no more than the next.
    every = found.fitted_bytes(40, np.arange(1, 2 * largest))
    assert (np.diff(every) >= 0).all()


def test_time_is_fitted_to_what_was_run() -> None:
    """Nanoseconds; probes that were traced have none."""
    shapes = [(1, 8), (8, 64), (4, 100), (16, 256), (2, 512), (32, 128)]
    traced = [Probe(n, (length,), 1, False, "trace") for n, length in shapes]
    assert fit_time(traced) is None
    ran = [Probe(n, (length,), 1, False, "run", 1e-6 * n * length) for n, length in shapes]
    time = fit_time([*traced, *ran])
    assert time is not None
    assert time.batch_bytes(10, 300) == pytest.approx(3e6, rel=0.02)
