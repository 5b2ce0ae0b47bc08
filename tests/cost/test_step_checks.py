"""A step that is not a full one, or that cannot be measured, is refused or warned of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from torchbudget import measure_cost, trace_peak_bytes
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.restoring import TrainingState


def test_an_optimizer_that_is_not_found() -> None:
    """One that the step reaches by a way that is not searched could not be restored."""
    model = nn.Linear(3, 3)
    hidden = {torch.optim.SGD(model.parameters(), lr=0.1): 0}

    def step(batch: Any) -> None:
        model(batch).sum().backward()
        next(iter(hidden)).step()

    with pytest.raises(CostError, match="does not refer to"):
        trace_peak_bytes(step, torch.zeros(2, 3))


def test_no_optimizer_step() -> None:
    model = nn.Linear(3, 3)
    with pytest.warns(MeasureWarning, match="no optimizer stepped"):
        trace_peak_bytes(lambda batch: model(batch).sum().backward(), torch.zeros(2, 3))


@pytest.mark.parametrize("of_it", ["another", "the same", "frozen", "with its state"])
def test_one_of_several_optimizers_does_not_step(of_it: str) -> None:
    """Its state and its step are not in the cost: that is said, unless another one does both."""
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 3)
    steps = torch.optim.Adam(critic.parameters())
    idle = torch.optim.AdamW((critic if of_it == "the same" else generator).parameters())
    if of_it == "with its state":
        generator(torch.ones(1, 3)).sum().backward()
        idle.step()
    generator.requires_grad_(of_it != "frozen")
    count = 0

    def step(batch: Any) -> None:
        nonlocal count
        count += 1
        critic(generator(batch)).sum().backward()
        steps.step()
        if count % 1000 == 0:
            idle.step()
        generator.zero_grad()
        critic.zero_grad()

    warned = pytest.warns(MeasureWarning, match="AdamW did not step in any measured step")
    with warned if of_it == "another" else nullcontext():
        cost = measure_cost(
            step, lambda n, size: torch.ones(n, size, 3), max_size=64, method="trace"
        )
    assert any("AdamW did not step" in note for note in cost.notes) is (of_it == "another")


def test_no_model() -> None:
    with pytest.raises(CostError, match="refers to no module and no optimizer"):
        trace_peak_bytes(lambda batch: batch.sum(), torch.zeros(2, 3))


def network() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))


def measure(step: Callable[[torch.Tensor], Any], method: Any) -> None:
    """Refused before any budget matters."""
    measure_cost(
        step, lambda n, size: torch.ones(n, size, 8), max_size=200, method=method, budget="1TiB"
    )


def on_meta(model: nn.Module) -> None:
    model.second = nn.Linear(8, 8, device="meta")


def lazy(model: nn.Module) -> None:
    model.second = nn.LazyLinear(8)


def buffer_on_meta(model: nn.Module) -> None:
    model.second.register_buffer("mean", torch.ones(1, device="meta"))


def with_quantized(model: nn.Module) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    model.second.register_buffer("mean", quantized)


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize(
    ("change", "methods", "match"),
    [
        (on_meta, ["trace"], "second.weight of Sequential is on meta, but"),
        (on_meta, ["auto", "run"], "second.weight of Sequential is on the meta device"),
        (lazy, ["trace", "auto", "run"], "second.weight of Sequential is uninitialized"),
        (buffer_on_meta, ["auto", "run"], "second.mean of Sequential is on the meta device"),
        (with_quantized, ["trace"], "second.mean of Sequential cannot be traced"),
    ],
)
def test_a_model_that_cannot_be_measured(
    change: Callable[[nn.Module], None], methods: list[str], match: str
) -> None:
    """The parameter or buffer is named before the step is called."""
    model = network()
    change(model)
    calls: list[object] = []

    def step(batch: torch.Tensor) -> None:
        calls.append(object())
        model(batch)

    for method in methods:
        with pytest.raises(CostError, match=match):
            measure(step, method)
    assert not calls


@pytest.mark.parametrize("name", ["mps", "xpu", "hpu"])
def test_a_device_whose_memory_is_not_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CPU nor a CUDA device: the host's figures would say nothing about it."""
    model = network().eval()
    monkeypatch.setattr(TrainingState, "device", property(lambda _: torch.device(name)))
    for method in ("trace", "auto", "run"):
        with pytest.raises(CostError, match=f"parameters are on {name}: only the memory of CPUs"):
            measure(model, method)


def test_parameters_that_only_an_optimizer_has_are_on_the_same_device() -> None:
    """Such as a loss's temperature, which is in no module."""
    model = network()
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([*model.parameters(), elsewhere], lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    with pytest.raises(CostError, match="a tensor of the step is on meta, but the first parameter"):
        measure(step, "trace")
