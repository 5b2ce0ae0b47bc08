"""Training goes on after measuring as in a process that never measured."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from torchbudget import MeasuredCost, measure_cost
from torchbudget.errors import CostError
from torchbudget.machine.host import process_memory

Step = Callable[[torch.Tensor], Any]


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 8)


def measure(step: Step, method: Any) -> MeasuredCost:
    budget = process_memory().resident_bytes + 40 * 2**20
    return measure_cost(step, make_batch, max_size=200, method=method, budget=budget)


def full_step(module: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: torch.Tensor) -> None:
        module(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steps(step: Step, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """What the tensors are after each of ten steps."""
    found = []
    for _ in range(10):
        step(make_batch(2, 4))
        found += [tensor.detach().clone() for tensor in tensors]
    return found


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(batch))


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


METHODS = pytest.mark.parametrize("method", ["trace", "auto", "run"])


@METHODS
@pytest.mark.parametrize("inner", ["none", "own", "shared"])
@pytest.mark.parametrize("warm", [False, True])
def test_an_open_autocast(method: str, inner: str, warm: bool) -> None:
    """Its cache of casts is as before: no fake tensor in it, and none of a measured step."""

    def trained(measured: bool) -> list[torch.Tensor]:
        model, optimizer = network()

        def in_own(batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(batch)

        forward = {
            "none": model,
            "own": in_own,
            "shared": torch.autocast("cpu", torch.bfloat16)(model),
        }[inner]
        step = full_step(forward, optimizer)
        with torch.autocast("cpu", torch.bfloat16):
            if warm:
                step(make_batch(2, 4))
            if measured:
                cost = measure(step, method)
                assert any("autocast" in note for note in cost.notes)
            return steps(step, *model.parameters())

    assert torch.is_autocast_cache_enabled()
    assert all(map(torch.equal, trained(True), trained(False)))
    assert torch.is_autocast_cache_enabled()


@METHODS
@pytest.mark.parametrize("compiled", ["module", "in place", "function"])
def test_what_is_compiled(method: str, compiled: str) -> None:
    """It is compiled after measuring too, and so is anything else; its trace is of eager code."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(1)
        return graph.forward

    def trained(measured: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model, optimizer = network()
        if compiled == "in place":
            model.compile(backend=backend)
        module = {
            "module": torch.compile(model, backend=backend),
            "in place": model,
            "function": torch.compile(model.forward, backend=backend),
        }[compiled]
        step = full_step(module, optimizer)
        if measured:
            cost = measure(step, method)
            eager = any("traced as eager" in note for note in cost.notes)
            assert eager == (method != "run")
            assert bool(graphs) == (method != "trace")
        return steps(step, *model.parameters())

    measured = trained(True)
    assert graphs
    assert all(map(torch.equal, measured, trained(False)))


class Kernel(torch.autograd.Function):
    """Doubles the first number, by its address."""

    pointers: ClassVar[list[int]] = []

    @staticmethod
    def forward(_: Any, batch: torch.Tensor) -> torch.Tensor:
        result = batch.clone()
        Kernel.pointers.append(result.data_ptr())
        if result.data_ptr():
            ctypes.cast(result.data_ptr(), ctypes.POINTER(ctypes.c_float))[0] *= 2
        return result

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def test_a_kernel_that_gets_a_pointer() -> None:
    """It never gets the null pointer of a fake tensor: such a step is not traced, but run."""

    def trained(measured: bool) -> list[torch.Tensor]:
        model, optimizer = network()
        step = full_step(lambda batch: Kernel.apply(model(batch)), optimizer)
        if measured:
            with pytest.raises(CostError, match="data pointer"):
                measure(step, "trace")
            cost = measure(step, "auto")
            assert any("only run, not traced" in note for note in cost.notes)
        return steps(step, *model.parameters())

    assert all(map(torch.equal, trained(True), trained(False)))
    assert all(Kernel.pointers)
