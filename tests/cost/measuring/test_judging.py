"""A fit that is too far off becomes a table; the margin covers every probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.costs import measured
from tests.support.training_cases import CASES
from torchbudget import measure_cost
from torchbudget.cost.measuring.judging import margin_of
from torchbudget.cost.models.probe import Probe
from torchbudget.errors import MeasureWarning


def test_a_form_that_does_not_fit_gives_a_table() -> None:
    """A step that needs much more from some length on: no step is under it, and a warning."""
    training = CASES["heavy"]()

    def step(batch: Any) -> None:
        if batch["x"].shape[1] > 60:  # nowhere near a polynomial
            ballast = torch.zeros(2**28, dtype=torch.uint8)
            ballast += 1
        training.step(batch)

    with pytest.warns(MeasureWarning, match="no formula fits"):
        cost = measure_cost(step, training.make_batch, max_size=100, method="trace")
    assert cost.table is not None
    for probe in cost.probes:
        assert cost.batch_bytes(probe.n, probe.size[0]) >= probe.peak_bytes
    assert cost.batch_bytes(1, 5) < cost.fitted_bytes(1, 5)


@pytest.mark.parametrize(
    ("fitted_peak", "held_out_peak", "margin"),
    [(1000, 1000, 0.01), (1050, 1000, 0.05), (1000, 1050, 0.1), (900, 900, 0.01)],
)
def test_the_margin(fitted_peak: int, held_out_peak: int, margin: float) -> None:
    """Twice an underestimate of what was held out, once one of what was fitted, or the least."""
    probes = Probe(1, (1,), fitted_peak, False, "run"), Probe(1, (1,), held_out_peak, True, "run")
    cost = measured(probes=probes)
    assert margin_of(cost, 0.01) == pytest.approx(margin)
