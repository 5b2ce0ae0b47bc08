"""Choices that a step makes by generators outside torch, which no trace can know."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import torchbudget
from tests.support.steps import SGD, Step, step_of
from torchbudget import MeasuredCost, measure_cost, trace_peak_bytes
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine.process_tree import process_memory

_own, _older, _pythons = np.random.default_rng(0), np.random.RandomState(0), random.Random(0)
GENERATORS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
    "a Generator": lambda: float(_own.random()),
    "a RandomState": lambda: float(_older.rand()),
    "a Random": _pythons.random,
}


def dropping(keeps: Callable[[], bool], optimizer: Any = SGD) -> Step:
    """A step of several layers, each of which may be left out."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        for layer in model:
            if keeps():
                batch = layer(batch).relu()
        return batch.mean() + 0 * model[0].weight.sum()

    return step_of(loss_of, model, optimizer=optimizer)


def drawing(draw: Callable[[], float], largest: bool = False) -> Step:
    return dropping(lambda: draw() < 0.5 or (largest and torchbudget.is_measuring()))


def measured(step: Step, method: Any) -> MeasuredCost:
    budget = process_memory().resident_bytes + 25 * 2**20
    make = lambda n, size: torch.ones(n, size, 32)  # noqa: E731
    return measure_cost(step, make, max_size=60, method=method, budget=budget)


@pytest.mark.parametrize("name", GENERATORS)
def test_layers_that_are_dropped(name: str) -> None:
    """No trace is exact."""
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(CostError, match="draws from a generator outside torch"):
        trace_peak_bytes(drawing(GENERATORS[name]), torch.ones(5, 33, 32))


def test_the_largest_choice_while_measuring() -> None:
    """A step that makes it is traced exactly."""
    assert measured(drawing(random.random, largest=True), "trace").label(5, 33) == "exact"


def test_draws_that_change_no_bytes() -> None:
    """A factor from NumPy, for example, leaves a trace exact."""
    layer = nn.Linear(32, 32)
    step = step_of(lambda batch: (layer(batch) * np.random.rand()).mean(), layer)
    assert measured(step, "trace").label(5, 33) == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "run"])
def test_such_a_step_is_run_several_times(method: str) -> None:
    """It is warned of; the largest of several steps counts, near that of all layers."""
    with pytest.warns(MeasureWarning, match=r"is_measuring"):
        cost = measured(drawing(random.random), method)
    whole = measured(drawing(lambda: 0.0), "auto")
    for n in (50, 200):
        assert cost.batch_bytes(n, 60) > 0.8 * whole.batch_bytes(n, 60)


@pytest.mark.parametrize("read", [lambda draw: draw < 0.8, lambda draw: draw.item() < 0.8])
def test_values_that_torch_draws_count_with_what_takes_more(read: Callable[[Any], bool]) -> None:
    """As of layers that are each left out with a chance: the bytes are those of all layers."""

    def make_batch(n: int, size: int) -> torch.Tensor:
        return torch.zeros(n, size, 32)

    some, every = (
        dropping(keeps, torch.optim.Adam) for keeps in (lambda: read(torch.rand(())), lambda: True)
    )
    found, expected = (
        measure_cost(one, make_batch, max_size=64, method="trace") for one in (some, every)
    )
    assert found.traced_bytes(50, 64) == expected.traced_bytes(50, 64)
    assert found.label(50, 64) == expected.label(50, 64) == "exact"
    assert any("reads" in note for note in found.notes)
    assert trace_peak_bytes(some, make_batch(50, 64)) == expected.traced_bytes(50, 64)


def test_a_step_that_guards_against_a_loss_that_is_not_finite() -> None:
    """What would skip the backward takes less, and does not count."""
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def made(guarded: bool) -> Callable[[torch.Tensor], None]:
        def step(batch: torch.Tensor) -> None:
            loss = model(batch).relu().mean()
            if guarded and (loss.isnan() or loss.item() > 1e9):
                return
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    peaks = [trace_peak_bytes(made(guarded), torch.zeros(500, 32)) for guarded in (True, False)]
    assert peaks[0] == pytest.approx(peaks[1], abs=256)
