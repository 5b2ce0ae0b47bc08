"""The mode that a step is measured in: that of training, wherever a module is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.steps import Step, step_of
from torchbudget import MeasuredCost, measure_cost
from torchbudget.errors import MeasureWarning
from torchbudget.machine.process_tree import process_memory


def encoder() -> nn.Module:
    parts = [nn.Dropout(0.1) for _ in range(4)]
    return nn.Sequential(nn.Linear(32, 32), *parts, nn.Linear(32, 32))


def training(model: nn.Module, before: Callable[[], object] = lambda: None) -> Step:
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        before()
        return model(batch).square().mean()

    return step_of(loss_of, model)


def measured(step: Step, method: Any = "trace") -> tuple[MeasuredCost, list[str]]:
    """The cost, and the warnings."""
    budget = process_memory().resident_bytes + 60 * 2**20
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cost = measure_cost(
            step,
            lambda n, size: torch.ones(n, size, 32),
            max_size=60,
            method=method,
            budget=budget,
        )
    return cost, [str(one.message) for one in caught if one.category is MeasureWarning]


def test_a_model_as_it_is_loaded() -> None:
    """Its step is measured in training mode, with a warning; the model's mode stays."""
    model = encoder().eval()
    cost, said = measured(training(model))
    assert not any(part.training for part in model.modules())
    assert "model.train()" in said[0]
    expected, _ = measured(training(encoder()))
    assert cost.traced_bytes(9, 50) == expected.traced_bytes(9, 50)
    low, said = measured(training(model, before=model.eval))
    assert not said
    assert low.traced_bytes(9, 50) < 0.7 * expected.traced_bytes(9, 50)


def test_a_step_that_sets_its_mode() -> None:
    """Nothing is warned of, and the step decides."""
    model = encoder().eval()
    cost, said = measured(training(model, before=model.train))
    assert not said
    assert cost.traced_bytes(9, 50) == measured(training(encoder()))[0].traced_bytes(9, 50)


def test_frozen_parts_stay() -> None:
    """Parts in evaluation mode below a model in training, and a teacher without gradients."""
    model, teacher = encoder(), encoder().eval()
    model[1].eval()
    seen: list[bool] = []

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(batch)
        seen[:] = [any(seen) or teacher.training or model[1].training]
        return (model(batch) - target).square().mean()

    _, said = measured(step_of(loss_of, model))
    assert not said
    assert not any(seen)


def test_normalisation_of_one_sample() -> None:
    """A step that fails in training mode is measured as it is, with a note."""
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).eval()
    cost, said = measured(step_of(lambda batch: model(batch.mean(1)).square().mean(), model))
    assert not said
    assert any("measured in evaluation mode" in note for note in cost.notes)


@pytest.mark.slow
def test_a_step_without_a_trace() -> None:
    """It is run in training mode, with a warning; a forward stays in evaluation mode."""
    model = encoder().eval()
    modes: list[bool] = []

    def note() -> None:
        modes.append(model.training)
        torch.nonzero(torch.ones(3))

    _, said = measured(training(model, before=note), "auto")
    assert "model.train()" in said[0]
    assert modes[-1]
    assert not model.training

    def forward(batch: torch.Tensor) -> None:
        note()
        with torch.no_grad():
            model(batch)

    modes.clear()
    _, said = measured(forward, "auto")
    assert not said
    assert not any(modes)


def test_an_evaluation_before_training() -> None:
    """A note says that gradients and the optimizer's state will come."""
    model = encoder().eval()

    def forward(batch: torch.Tensor) -> None:
        with torch.no_grad():
            model(batch)

    assert any("no gradients yet" in note for note in measured(forward)[0].notes)
    training(encoder())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert not any("no gradients yet" in note for note in measured(forward)[0].notes)
