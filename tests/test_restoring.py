"""After measuring, all that a step refers to is as before, and training goes on the same."""

from __future__ import annotations

import copy
import ctypes
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from torch import nn

import torchbudget
from tests.support.steps import Step, measured_with
from torchbudget import MeasuredCost
from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState

State = Callable[[], Any]
Make = Callable[[], tuple[Step, State]]

# What these tests have compiled comes and goes beside the step. They are about states, not bytes.


def make_batch(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 8)


def measure(step: Step, method: Any) -> MeasuredCost:
    return measured_with(100, step, make_batch, max_size=200, method=method)


def full_step(module: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: torch.Tensor) -> None:
        module(batch).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


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


def clones(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().resolve_conj().resolve_neg().clone() for tensor in tensors]


METHODS = pytest.mark.parametrize(
    "method", ["trace", "auto", pytest.param("run", marks=pytest.mark.slow)]
)

# ---------------------------------------------------------------------- training goes on


def check_training(
    make: Make, measuring: Callable[[Step], object], within: Any = nullcontext
) -> None:
    """A training after measuring shows the same, to the bit, as one that was never measured."""
    found: list[list[Any]] = []
    for measures in (True, False):
        with within():
            step, seen = make()
            if measures:
                measuring(step)
            shown = [seen()]
            for _ in range(10):
                step(make_batch(2, 4))
                shown.append(seen())
        found.append(shown)
    torch.testing.assert_close(*found, rtol=0, atol=0)


@METHODS
@pytest.mark.parametrize("inner", ["none", "own", "shared"])
@pytest.mark.parametrize("warm", [False, True])
def test_an_open_autocast(method: str, inner: str, warm: bool) -> None:
    """Its cache of casts is as before: no fake tensor in it, and none of a measured step."""
    autocast = partial(torch.autocast, "cpu", torch.bfloat16)

    def make() -> tuple[Step, State]:
        model, optimizer = network()

        def in_own(batch: torch.Tensor) -> torch.Tensor:
            with autocast():
                return model(batch)

        forward = {"none": model, "own": in_own, "shared": autocast()(model)}[inner]
        step = full_step(forward, optimizer)
        if warm:
            step(make_batch(2, 4))
        return step, lambda: clones(model.parameters())

    def measuring(step: Step) -> None:
        assert any("autocast" in note for note in measure(step, method).notes)

    assert torch.is_autocast_cache_enabled()
    check_training(make, measuring, autocast)
    assert torch.is_autocast_cache_enabled()


class Compiled:
    """Of a class, attributes are not put back."""

    graphs: ClassVar[list[object]] = []


@METHODS
@pytest.mark.parametrize("compiled", ["module", "in place", "function"])
def test_what_is_compiled(method: str, compiled: str) -> None:
    """It is compiled after measuring too, and so is anything else; its trace is of eager code."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        Compiled.graphs.append(graph)
        return graph.forward

    def make() -> tuple[Step, State]:
        torch._dynamo.reset()
        Compiled.graphs.clear()
        model, optimizer = network()
        if compiled == "in place":
            model.compile(backend=backend)
        module = {
            "module": torch.compile(model, backend=backend),
            "in place": model,
            "function": torch.compile(model.forward, backend=backend),
        }[compiled]
        plain = full_step(module, optimizer)

        def step(batch: torch.Tensor) -> None:
            plain(batch)
            assert Compiled.graphs or torchbudget.is_measuring()

        return step, lambda: clones(model.parameters())

    def measuring(step: Step) -> None:
        eager = any("traced as eager" in note for note in measure(step, method).notes)
        assert eager == (method != "run")
        assert bool(Compiled.graphs) == (method != "trace")

    check_training(make, measuring)


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

    def make() -> tuple[Step, State]:
        model, optimizer = network()
        step = full_step(lambda batch: Kernel.apply(model(batch)), optimizer)
        return step, lambda: clones(model.parameters())

    def measuring(step: Step) -> None:
        with pytest.raises(CostError, match="data pointer"):
            measure(step, "trace")
        assert any("only run, not traced" in note for note in measure(step, "auto").notes)

    check_training(make, measuring)
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
        parts = self.parameters(), self.buffers(), self.listed, self.named["a"], self.queued
        return clones(chain(*parts))

    def update(self, value: torch.Tensor) -> None:
        self.expanded[:1].add_(value[0])
        self.conjugated.add_(1j)
        self.negated.mul_(0.9)
        for tensor in (self.listed[0], self.named["a"][0], self.queued[0]):
            tensor.mul_(0.9).add_(value)
        self.queued.append(value)


named = torch.zeros(8)


@METHODS
@pytest.mark.filterwarnings("ignore:a step leaves", "ignore:8 steps are run on each shape")
def test_what_a_step_refers_to(method: str) -> None:
    """Tensors in attributes, containers and plain objects, and generators of every kind."""

    def make() -> tuple[Step, State]:
        global named  # noqa: PLW0603
        named = torch.zeros(8)
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

        def seen() -> list[Any]:
            mine = [*average.by_name.values(), average.total, vars(average).get("last")]
            loose_ones = [*outputs, *mine, loose, bound, unbound, named]
            return [*model.tensors(), *(one if one is None else one.clone() for one in loose_ones)]

        return step, seen

    check_training(make, partial(measure, method=method))


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

    def make() -> tuple[Step, State]:
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

        return step, lambda: copy.deepcopy([mean.numbers(), total, losses, counted])

    check_training(make, partial(measure, method="trace"))


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.slow
def test_a_quantized_buffer() -> None:
    """Such a step is run only, and the buffer is restored."""

    def quantized(numbers: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(numbers, 0.1, 0, torch.qint8)

    def make() -> tuple[Step, State]:
        model, optimizer = network()
        plain, second = full_step(model, optimizer), cast("Any", model.second)
        second.register_buffer("mean", quantized(torch.ones(3)))

        def step(batch: torch.Tensor) -> None:
            plain(batch)
            second.mean.copy_(quantized(second.mean.dequantize() - 0.1))

        return step, lambda: [second.mean.dequantize(), model.first.weight.tolist()]

    check_training(make, partial(measure, method="auto"))


@METHODS
def test_effects_on_the_world(method: str) -> None:
    """A step that asks `is_measuring` logs nothing, in traces and in runs; training logs."""

    def make() -> tuple[Step, State]:
        model, optimizer = network()
        plain, log = full_step(model, optimizer), list[int]()

        def step(batch: torch.Tensor) -> None:
            plain(batch)
            if not torchbudget.is_measuring():
                log.append(len(batch))

        return step, lambda: [*log, torchbudget.is_measuring()]

    check_training(make, partial(measure, method=method))


# ---------------------------------------------------------------------- everything is as before


def _clipped(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-1e-3, 1e-3)


def _swapped(model: nn.Module, averages: list[torch.Tensor]) -> None:
    for parameter, average in zip(model.parameters(), averages, strict=True):
        average.data = 0.9 * average.data + 0.1 * parameter.data
        parameter.data, average.data = average.data, parameter.data


def _set(model: nn.Module, _: Any) -> None:
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.set_(parameter.clamp(-1e-3, 1e-3))


def _from_a_vector(model: nn.Module, _: Any) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


def _in_half(model: nn.Module, averages: list[torch.Tensor]) -> None:
    for average in averages:
        average.data = average.data.half()
    model.first.weight.data = model.first.weight.data.T.contiguous().T


def assigning(assign: Callable[[nn.Module, list[torch.Tensor]], None]) -> tuple[Step, State]:
    """Tensors keep their storage, their layout and their values, whatever their data became."""
    model, optimizer = network()
    averages = clones(model.parameters())
    plain, tensors = full_step(model, optimizer), [*model.parameters(), *averages]

    def step(batch: torch.Tensor) -> None:
        plain(batch)
        assign(model, averages)

    return step, lambda: [
        (one.data_ptr(), one.stride(), one.dtype, one.tolist()) for one in tensors
    ]


def resized() -> tuple[Step, State]:
    """Storages can still be resized, as by those who offload parameters by hand."""
    model, optimizer = network()
    storages = [parameter.untyped_storage() for parameter in model.parameters()]
    return full_step(model, optimizer), lambda: [one.resizable() for one in storages]


def flagged() -> tuple[Step, State]:
    """A frozen part is trained again, and gradients are on again, even if a trace is abandoned."""
    model, optimizer = network()
    critic = nn.Linear(8, 1)

    def step(batch: torch.Tensor) -> None:
        critic.requires_grad_(False)
        torch.set_grad_enabled(False)
        chosen = torch.nonzero(batch[:, 0, 0])  # which no trace can know
        torch.set_grad_enabled(True)
        critic(model(batch[chosen[:, 0]])).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        critic.requires_grad_(True)
        critic(model(batch).detach()).mean().backward()
        critic.zero_grad()

    return step, lambda: [
        torch.is_grad_enabled(),
        *(one.requires_grad for one in critic.parameters()),
    ]


def averaged() -> tuple[Step, State]:
    """Averages in a long dictionary; a long list of samples is neither searched nor copied."""
    model, optimizer = network()
    averages = {number: torch.zeros(4) for number in range(1500)}
    samples = [torch.zeros(4) for _ in range(1500)]
    plain = full_step(model, optimizer)

    def step(batch: torch.Tensor) -> None:
        plain(batch)
        for number in (0, 700, 1499):
            averages[number].add_(1)
        assert len(samples) == 1500

    assert len(TrainingState(step).tensors()) < 1500
    return step, lambda: [average.tolist() for average in averages.values()]


def attached() -> tuple[Step, State]:
    """Gradients of each sample, kept at the parameter, do not stay there."""
    model, optimizer = network()

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad_sample = parameter.grad.expand(len(batch), *parameter.shape) * 1
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: [vars(parameter).copy() for parameter in model.parameters()]


def scheduled() -> tuple[Step, State]:
    """Steps use up no schedule and no scaler; gradients of before and hooks stay."""
    model, optimizer = network()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step(batch: torch.Tensor) -> None:
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()

    calls: list[object] = []
    model.first.register_forward_hook(lambda *_: calls.append(0))

    def state() -> list[Any]:
        calls.clear()
        model(make_batch(2, 4))
        gradients = [None if one.grad is None else one.grad.tolist() for one in model.parameters()]
        return [schedule.state_dict(), scaler.state_dict(), [*optimizer.state], gradients, *calls]

    return step, state


class Wrapping(torch.optim.Optimizer):
    """An optimizer that wraps another one, as SAM and Accelerate do."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base_optimizer = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()


def wrapping() -> tuple[Step, State]:
    """An inner optimizer is found: its steps are allowed, and its state is restored."""
    model, _ = network()
    inner = torch.optim.AdamW(model.parameters())
    return full_step(model, Wrapping(inner)), lambda: [*inner.state]


def moved() -> tuple[Step, State]:
    """A tensor that got another key."""
    model, optimizer = network()
    plain, kept = full_step(model, optimizer), {"now": torch.zeros(2), "steps": 0}

    def step(batch: torch.Tensor) -> None:
        plain(batch)
        kept["before"] = kept.pop("now", 0)
        kept["steps"] = 1

    return step, lambda: [*kept]


@dataclass(slots=True)
class Slotted:
    """Has no dictionary of attributes."""

    center: torch.Tensor


def keeping() -> tuple[Step, State]:
    """Tuples, dictionaries, modules, arrays, slots and gradients of loose tensors."""
    model, optimizer = network()
    scale = torch.ones((), requires_grad=True)
    own = SimpleNamespace(
        state=None, pair=(torch.zeros(2), 1), nested={"c": [torch.zeros(2)]}, best=None,
        slotted=Slotted(torch.zeros(2)), mean=np.zeros(3), steps=0,
    )  # fmt: skip
    kept: Any = (torch.zeros(1), torch.zeros(1))

    def step(batch: torch.Tensor) -> None:
        nonlocal kept
        outputs = model(batch) * scale
        outputs.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            scale.sub_(0.1 * scale.grad)
        kept = own.state = (outputs.detach(), outputs.detach())
        own.pair, own.nested = (outputs.detach(), 2), {"c": [outputs.detach()]}
        own.best, own.slotted.center = copy.deepcopy(model), outputs.detach()
        own.mean += 1
        own.steps += 1

    def now() -> dict[str, Any]:
        return vars(own) | {"slotted": own.slotted.center, "kept": kept, "grad": scale.grad}

    before = now()
    names = [name for name in before if name != "steps"]
    return step, lambda: [own.mean.tolist(), scale.item(), *(now()[n] is before[n] for n in names)]


@METHODS
@pytest.mark.parametrize(
    "case",
    [
        *(partial(assigning, one) for one in (_clipped, _swapped, _set, _from_a_vector, _in_half)),
        *(resized, flagged, averaged, attached, scheduled, wrapping, moved, keeping),
    ],
)
def test_what_a_step_refers_to_is_as_before(method: str, case: Make) -> None:
    step, state = case()
    before = state()
    is_refused = case is flagged and method == "trace"  # no trace can know its choice
    with pytest.raises(CostError, match="nonzero") if is_refused else nullcontext():
        measure(step, method)
    assert state() == before


def test_replaced_storages_are_not_counted() -> None:
    """Traced bytes of a step that assigns weights are those of the same step in place."""

    def traced(assigns: bool) -> int:
        model, optimizer = network()

        plain = full_step(model, optimizer)

        def step(batch: torch.Tensor) -> None:
            plain(batch)
            for parameter in model.parameters():
                if assigns:
                    parameter.data = parameter.data.clone()

        return int(measure(step, "trace").traced_bytes(50, 200))

    assert traced(True) == traced(False)
