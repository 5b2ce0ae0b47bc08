"""A saved cost is used again only for a step that still needs its bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.steps import Step, step_of
from torchbudget import MeasuredCost, measure_cost
from torchbudget.cost.measure import why_not
from torchbudget.machine.process_tree import process_memory


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 32)


def made(
    *, frozen: bool = False, heavier: bool = False, looks: bool = False, evaluates: bool = False
) -> Step:
    model = nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32))
    model.train(not evaluates)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        if looks:
            torch.nonzero(batch[:, 0, 0])
        first = model[:2](batch)
        if frozen:
            first = first.detach()
        if heavier and batch.shape[1] < 20:
            first = first + torch.cat([first] * 8, dim=1)[:, : batch.shape[1]]
        return model[2](first).square().mean()

    return step_of(loss_of, model)


def saved(step: Step, budget: int) -> MeasuredCost:
    return measure_cost(step, make_batch, sizes=range(8, 65), budget=budget)


@pytest.fixture(scope="module")
def room() -> int:
    saved(made(), process_memory().resident_bytes + 200 * 2**20)  # all is loaded then
    return process_memory().resident_bytes + 200 * 2**20


def reason(cost: MeasuredCost, step: Step, room: int) -> str:
    return why_not(cost, step, make_batch, range(8, 65), room)


@pytest.mark.slow
def test_the_same_step(room: int) -> None:
    """It holds, also for a model that was loaded in evaluation mode, and without a trace."""
    assert not reason(saved(made(), room), made(), room)
    with pytest.warns(match="evaluation mode"):
        cost = saved(made(evaluates=True), room)
    with pytest.warns(match="evaluation mode"):
        assert not reason(cost, made(evaluates=True), room)
    assert not reason(saved(made(looks=True), room), made(looks=True), room)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["frozen", "heavier"])
def test_another_step_of_the_same_model(change: Any, room: int) -> None:
    """Layers that are frozen inside the step, or more work for short samples, are noticed."""
    cost = saved(made(), room)
    assert reason(cost, made(**{change: True}), room).startswith("a trace of")


@pytest.mark.slow
def test_a_step_without_a_trace_that_became_heavier(room: int) -> None:
    """Real steps of small and middle samples exceed what they needed."""
    cost = saved(made(looks=True), room)
    assert "needed" in reason(cost, made(looks=True, heavier=True), room)
