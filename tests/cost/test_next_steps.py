"""Training goes on after measuring as in a process that never measured."""

from __future__ import annotations

import ctypes
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from torchbudget import MeasuredCost, measure_cost
from torchbudget.errors import CostError
from torchbudget.machine.process_tree import process_memory
from torchbudget.restoring import TrainingState

Step = Callable[[torch.Tensor], Any]

# What these tests have compiled comes and goes beside the step. They are about states, not bytes.


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 8)


def measure(step: Step, method: Any) -> MeasuredCost:
    budget = process_memory().resident_bytes + 100 * 2**20
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


METHODS = pytest.mark.parametrize(
    "method", ["trace", "auto", pytest.param("run", marks=pytest.mark.slow)]
)


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
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(object())  # numbers would be put back
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


@pytest.mark.slow
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


class Average:
    """A moving average, which makes its tensors when it is first updated."""

    def __init__(self) -> None:
        self.total = torch.zeros(8)
        self.by_name: dict[str, torch.Tensor] = {}

    def update(self, value: torch.Tensor) -> None:
        self.total.mul_(0.9).add_(value)
        self.last = value
        self.by_name["total"] = self.by_name.get("total", 0) + value


class Attributes(Network):
    """What a module may have beside parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.zeros(1).expand(4))
        self.register_buffer("conjugated", torch.ones(2, dtype=torch.complex64).conj())
        self.register_buffer("negated", torch.ones(2, dtype=torch.complex64).conj().imag)
        self.listed = [torch.zeros(8)]
        self.named = {"a": [torch.zeros(8)]}
        self.queued = deque([torch.zeros(8)], maxlen=3)

    def tensors(self) -> list[torch.Tensor]:
        found = [*self.parameters(), *self.buffers(), *self.listed, *self.named["a"], *self.queued]
        return [tensor.detach().resolve_conj().resolve_neg().clone() for tensor in found]

    def update(self, value: torch.Tensor) -> None:
        self.expanded[:1].add_(value[0])
        self.conjugated.add_(1j)
        self.negated.mul_(0.9)
        for tensor in (self.listed[0], self.named["a"][0], self.queued[0]):
            tensor.mul_(0.9).add_(value)
        self.queued.append(value)


named = torch.zeros(8)


@METHODS
@pytest.mark.filterwarnings("ignore:a step leaves")
def test_what_a_step_refers_to(method: str) -> None:
    """Tensors in attributes, containers and plain objects, and generators of every kind."""

    def trained(measured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, average, outputs, loose = Attributes(), Average(), [], torch.zeros(8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        old, new, plain = np.random.RandomState(1), np.random.default_rng(1), random.Random(1)
        noise, drawn = torch.Generator().manual_seed(1), np.random.default_rng(2).random
        bound = unbound = None

        def step(batch: torch.Tensor) -> None:
            nonlocal bound, unbound
            global named
            draws = old.rand() + new.random() + plain.random() + drawn()
            output = model(batch + draws + torch.rand(1, generator=noise))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            weight = model.first.weight.detach().mean(0)
            bound = weight if bound is None else 0.9 * bound + weight
            unbound, named = weight.clone(), 0.9 * named + weight
            loose.add_(weight)
            outputs[:] = [output.detach().mean((0, 1))]
            for one in (model, average):
                one.update(weight)

        global named  # noqa: PLW0603
        named = torch.zeros(8)
        if measured:
            measure(step, method)
            assert bound is None
            assert unbound is None
        found = []
        for _ in range(10):
            found += [*outputs, *average.by_name.values()]
            step(make_batch(2, 4))
            found += [*model.tensors(), average.total.clone(), average.last, loose.clone()]
            found += [bound, unbound, named]
        return found

    measured, never = trained(True), trained(False)
    assert len(measured) == len(never)
    assert all(map(torch.equal, measured, never))


class Mean:
    """A running mean in Python's numbers."""

    __slots__ = ("__dict__", "count")

    def __init__(self) -> None:
        self.mean, self.count = 1.0, 0
        self.least: float | None = None
        self.lately: deque[float] = deque(maxlen=3)
        self.by_name: dict[str, float] = {}
        self.seen: set[float] = set()
        self.sums, self.replaced = np.zeros(2), np.zeros(0)

    def update(self, value: float) -> None:
        self.count += 1
        self.sums += value
        self.replaced = np.append(self.replaced, value)
        self.mean += (value - self.mean) / self.count
        self.least = value if self.least is None else min(self.least, value)
        self.lately.append(value)
        self.by_name[f"step {self.count}"] = value
        self.seen.add(value)

    def numbers(self) -> list[Any]:
        kept = [*self.lately, self.by_name, sorted(self.seen)]
        return [self.mean, self.count, self.least, *kept, *self.sums, *self.replaced]


counted = 0
log = logging.getLogger(__name__)  # whose handlers keep what they like


def test_what_a_traced_step_counts() -> None:
    """Numbers in plain objects, slots, containers and names, by which later steps may differ."""

    def trained(measured: bool) -> list[Any]:
        global counted  # noqa: PLW0603
        model, optimizer = network()
        mean, total, losses = Mean(), 0.0, [3.0]
        counted = 0

        def step(batch: torch.Tensor) -> None:
            nonlocal total
            global counted
            loss = model(batch).square().mean()
            (loss / (mean.mean + counted + len(losses))).backward()
            optimizer.step()
            optimizer.zero_grad()
            log.debug("a loss of %s", mean.update(loss.item()))
            losses.append(loss.item())
            total, counted = total + loss.item(), counted + 1

        if measured:
            measure(step, "trace")
        found: list[Any] = []
        for _ in range(10):
            step(make_batch(2, 4))
            found += [*mean.numbers(), total, *losses, counted, model.first.weight.tolist()]
        return found

    assert trained(True) == trained(False)


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
        (on_meta, ["trace"], "second.weight of Network is on meta, but"),
        (on_meta, ["auto", "run"], "second.weight of Network is on the meta device"),
        (lazy, ["trace", "auto", "run"], "second.weight of Network is uninitialized"),
        (buffer_on_meta, ["auto", "run"], "second.mean of Network is on the meta device"),
        (with_quantized, ["trace"], "second.mean of Network cannot be traced"),
    ],
)
def test_a_model_that_cannot_be_measured(
    change: Callable[[nn.Module], None], methods: list[str], match: str
) -> None:
    """The parameter or buffer is named before the step is called."""
    model, _ = network()
    change(model)
    calls: list[object] = []

    def step(batch: torch.Tensor) -> None:
        calls.append(object())
        model(batch)

    for method in methods:
        with pytest.raises(CostError, match=match):
            measure(step, method)
    assert not calls


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.slow
def test_a_quantized_buffer() -> None:
    """Such a step is run only, and the buffer is restored."""

    def trained(measured: bool) -> list[torch.Tensor]:
        model, optimizer = network()
        with_quantized(model)
        plain = full_step(model, optimizer)

        def step(batch: torch.Tensor) -> None:
            plain(batch)
            new = model.second.mean.dequantize() - 0.1
            model.second.mean.copy_(torch.quantize_per_tensor(new, 0.1, 0, torch.qint8))

        if measured:
            measure(step, "auto")
        return [
            tensor.dequantize() for tensor in steps(step, model.second.mean, model.first.weight)
        ]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize("name", ["mps", "xpu", "hpu"])
def test_a_device_whose_memory_is_not_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CPU nor a CUDA device: the host's figures would say nothing about it."""
    model = network()[0].eval()
    monkeypatch.setattr(TrainingState, "device", property(lambda _: torch.device(name)))
    for method in ("trace", "auto", "run"):
        with pytest.raises(CostError, match=f"parameters are on {name}: only the memory of CPUs"):
            measure(model, method)


def test_parameters_that_only_an_optimizer_has_are_on_the_same_device() -> None:
    """Such as a loss's temperature, which is in no module."""
    model, _ = network()
    elsewhere = nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.SGD([*model.parameters(), elsewhere], lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()

    with pytest.raises(CostError, match="a tensor of the step is on meta, but the first parameter"):
        measure(step, "trace")
