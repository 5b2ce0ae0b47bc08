"""A fit that is too far off becomes a table; the margin covers every probe."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.support.costs import measured
from tests.support.training_cases import CASES
from torchbudget import measure_cost, trace_peak_bytes
from torchbudget.cost.measuring.judging import margin_of
from torchbudget.cost.models.probe import Probe
from torchbudget.errors import MeasureWarning


@pytest.mark.slow
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


def test_a_step_that_pads_to_whole_chunks_needs_their_length() -> None:
    """One word takes as much as 32: no form of the length is near, one of multiples is exact."""
    model = nn.Embedding(10, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(F.pad(batch, (0, -batch.shape[1] % 32))).exp().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(n: int, length: int) -> torch.Tensor:
        return torch.zeros(n, length, dtype=torch.long)

    measure = partial(measure_cost, step, make_batch, max_size=256, min_size=1, method="trace")
    assert any("size_multiple=32" in note for note in measure().notes)
    cost = measure(size_multiple=32)
    assert not cost.notes
    assert cost.margin < 0.01
    for n, length in ((1, 32), (256, 64), (7, 256)):
        peak = trace_peak_bytes(step, make_batch(n, length))
        assert peak <= int(cost.batch_bytes(n, length)) <= 1.02 * peak


@pytest.mark.parametrize(
    ("fitted_peak", "held_out_peak", "margin"),
    [(1000, 1000, 0.01), (1050, 1000, 0.05), (1000, 1050, 0.1), (900, 900, 0.01)],
)
def test_the_margin(fitted_peak: int, held_out_peak: int, margin: float) -> None:
    """Twice an underestimate of what was held out, once one of what was fitted, or the least."""
    probes = Probe(1, (1,), fitted_peak, False, "run"), Probe(1, (1,), held_out_peak, True, "run")
    cost = measured(probes=probes)
    assert margin_of(cost, 0.01) == pytest.approx(margin)
