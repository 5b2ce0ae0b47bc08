"""Explanations of a few peaks: the truth is never above the most that they say."""

from __future__ import annotations

import numpy as np
import pytest

from torchbudget.cost.measuring.explaining import explained
from torchbudget.cost.measuring.shapes import Domain
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.cost.models.polynomials import Term

IDLE = 300 * 2**20
# Long on one axis or both, and short on both: what runs begin with.
CORNERS = [(1, (4, 4)), (40, (4, 256)), (18, (256, 256)), (3700, (4, 4)), (47, (256, 4))]


def truth(seed: int) -> Form:
    """Of tokens and pairs on two axes, some of which are absent."""
    rng = np.random.default_rng(seed)
    powers = [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)]
    scale = [60_000, 12_000, 12_000, 90, 90, 90]
    bytes_ = rng.uniform(0, 1, 6) * scale * (rng.uniform(0, 1, 6) < 0.7)
    terms = [Term(float(b), 1, p) for b, p in zip(bytes_, powers, strict=True) if b]
    return Form(terms=(Term(float(IDLE), 0, (0, 0)), *terms))


@pytest.mark.parametrize("seed", range(40))
def test_what_few_peaks_leave_open_is_not_guessed(seed: int) -> None:
    """At every size of the domain, all explanations together bound the truth from both sides.

    Peaks at the corners do not tell a length from its square; each reading is off by up to 0.2 %.
    """
    form = MeasuredCost(forms=(truth(seed),), margin=0)
    n, sizes = (np.array(part) for part in zip(*CORNERS, strict=True))
    peaks = form.fitted_bytes(n, sizes) * np.random.default_rng(seed).uniform(1, 1.002, len(n))
    domain = Domain.of((256, 256), 1)
    found = explained(n, sizes, peaks, idle_bytes=IDLE, at=domain.spread())
    fitting = np.maximum(form.capacity(found.sizes, 2 * IDLE), 1)
    true = form.fitted_bytes(fitting, found.sizes)
    most = MeasuredCost(forms=found.forms(domain), margin=0).fitted_bytes(fitting, found.sizes)
    assert (true <= 1.01 * most).all()
    assert (most <= 1.05 * found.disputes(fitting) * true).all()


def test_where_peaks_tell_terms_apart_explanations_agree() -> None:
    """With runs between the corners the bounds meet."""
    form = MeasuredCost(forms=(truth(3),), margin=0)
    grid = Domain.of((256, 256), 1).spread()
    n = np.maximum(form.capacity(grid, 2 * IDLE), 1)
    found = explained(n, grid, form.fitted_bytes(n, grid), idle_bytes=IDLE, at=grid)
    assert found.disputes(n) == pytest.approx(1, abs=0.03)
