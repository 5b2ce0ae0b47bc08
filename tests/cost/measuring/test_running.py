"""Running a step: until memory runs out, and on a machine whose readings are noisy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import torchbudget as tb
from tests.support.training_cases import CASES
from torchbudget.cost.measuring.shapes import Domain, Size, Subject
from torchbudget.cost.measuring.step_runner import StepRunner
from torchbudget.cost.models.probe import Probe
from torchbudget.errors import MeasureWarning
from torchbudget.machine.process_tree import process_memory
from torchbudget.restoring import TrainingState

TOO_MUCH = """
import resource

import torchbudget as tb
from tests.support.training_cases import CASES

training = CASES["decoder, scores kept"]()
training.step(training.make_batch(2, 512))
status = open("/proc/self/status").read()
limit = int(status.partition("VmData:")[2].split()[0]) * 1024 + 400 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
cost = tb.measure_cost(training.step, training.make_batch, max_size=512, budget="1200MiB")
assert all(before[name].equal(t) for name, t in training.model.state_dict().items())
assert len(cost.probes) > 3
print(*cost.notes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
def test_a_real_out_of_memory_is_survived() -> None:
    """A budget beyond what there is: probes that fail are noted, and the others are smaller."""
    done = subprocess.run(
        [sys.executable, "-c", TOO_MUCH], capture_output=True, text=True, check=False
    )
    assert not done.returncode, done.stderr
    assert "out of memory at" in done.stdout


@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize("layer", [torch.nn.Conv1d(8, 8, 3), torch.nn.Linear(8, 8)])
def test_kernels_that_are_kept_are_warned_of(
    layer: torch.nn.Module, stated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where convolutions run, unless the environment bounds both caches of their kernels."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "32")
    if not stated:
        monkeypatch.delenv("LRU_CACHE_CAPACITY")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    convolves = isinstance(layer, torch.nn.Conv1d)

    def step(batch: torch.Tensor) -> None:
        layer(batch.mT if convolves else batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def measured(method: Any) -> tb.MeasuredCost:
        budget = process_memory().resident_bytes + 100 * 2**20
        return tb.measure_cost(
            step,
            lambda n, size: torch.ones(n, size, 8),
            max_size=99,
            min_size=3,
            method=method,
            budget=budget,
        )

    def noted(cost: tb.MeasuredCost) -> bool:
        return any("configure_allocators() first" in note for note in cost.notes)

    assert not noted(measured("trace"))
    warned = convolves and not stated
    with pytest.warns(MeasureWarning, match="keep compiled") if warned else nullcontext():
        assert noted(measured("auto")) is warned


@pytest.mark.parametrize("depends", [True, False])
def test_the_worst_of_several_batches_counts(depends: bool) -> None:
    """Where memory depends on values, another batch of the shape may need far more."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values: list[float] = []

    def make_batch(n: int, size: int) -> torch.Tensor:
        return torch.full((n, size, 8), float(values.pop(0)) if values else 1.0)

    def step(batch: torch.Tensor) -> None:
        chosen = torch.ones(int(batch.max()), 2**18)  # so many MiB
        (model(batch).sum() + chosen.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    state = TrainingState(step)
    subject = Subject(step, make_batch, Domain.of(64, 1), state, state.device)
    subject.depends_on_values = depends
    with state.restored(contents=True):
        runner = StepRunner(subject)
        values += [1, 1, 200, 1]
        probe = runner.run(2, (8,))
    assert (probe.peak_bytes - runner.idle_bytes >= 180 * 2**20) is depends


class NoisyMachine(StepRunner):
    """Bytes as a busy machine might read them, of plain convolutions.

    No real machine's noise can be chosen: this one is off by up to some MiB, or by some percent,
    and keeps a little more after each step.

    Args:
        subject: whose step is not run.
    """

    seed, percent, kept_mib, off_mib = 0, 0.3, 0.5, 1.0

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.rng = np.random.default_rng(self.seed)
        self.idle_bytes = int(self.rng.uniform(180, 260) * 2**20)
        self.floor_bytes = 3 * 2**20
        self.pixel_bytes = self.rng.uniform(200, 900)
        self.kept_bytes = 0.0

    def sample_bytes(self, size: Size) -> float:
        """Of one sample."""
        return float(self.pixel_bytes * np.prod(size) + 2000)

    def true_bytes(self, n: int, size: Size) -> float:
        """Without noise."""
        return self.idle_bytes + max(n * self.sample_bytes(size), self.floor_bytes)

    def run(self, n: int, size: Size, *, held_out: bool = False) -> Probe:
        """What is read of a step."""
        noise, off, kept = self.rng.normal(size=3)
        self.kept_bytes += abs(kept) * self.kept_mib * 2**20
        above = self.true_bytes(n, size) - self.idle_bytes
        read = above * (1 + noise * self.percent / 100) + off * self.off_mib * 2**20
        return Probe(n, size, int(self.idle_bytes + read + self.kept_bytes), held_out, "run")

    def settled(self, probes: Sequence[Probe]) -> list[Probe]:
        """What was kept stays where it was read."""
        return list(probes)


class NoisyPolynomials(NoisyMachine):
    """Of lengths and their products, some of which are absent; little leaves a floor of its own."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.floor_bytes = int(self.rng.uniform(1, 60) * 2**20)
        longest, axes = max(subject.domain.largest), subject.domain.axes
        kept = self.rng.uniform(0, 1, (2, axes, axes)) > 0.35
        linear, squares = self.rng.uniform(0, 1, (2, axes, axes)) * kept * 2**20
        self.linear = 8 * linear[0] / longest + 2000
        self.squares = 32 * squares / longest**2

    def sample_bytes(self, size: Size) -> float:
        """Of one sample."""
        return float(self.linear @ size + size @ self.squares @ np.array(size))


class FreesLate(NoisyPolynomials):
    """The first three runs are read with 48 MiB that are freed then, as those of a compiler are."""

    def run(self, n: int, size: Size, *, held_out: bool = False) -> Probe:
        """What is read of a step."""
        self.runs = getattr(self, "runs", 0) + 1
        probe = super().run(n, size, held_out=held_out)
        held = 48 * 2**20 if self.runs <= 3 else 0
        return replace(probe, peak_bytes=probe.peak_bytes + held)


def measured_on_noisy(
    monkeypatch: pytest.MonkeyPatch,
    max_size: Size,
    budget: int,
    machine: type[NoisyMachine] = NoisyMachine,
    case: str = "images",
) -> tuple[tb.MeasuredCost, NoisyMachine]:
    """A cost, and the machine that it was measured on."""
    machines: list[NoisyMachine] = []

    def made(subject: Subject) -> NoisyMachine:
        machines.append(machine(subject))
        return machines[-1]

    monkeypatch.setattr("torchbudget.cost.measuring.running.StepRunner", made)
    training = CASES[case]()
    cost = tb.measure_cost(
        training.step, training.make_batch, max_size=max_size, budget=budget, method="run"
    )
    return cost, *machines


@pytest.mark.parametrize(
    ("seed", "percent", "kept", "off"), [(1, 0.2, 1.5, 2), (19, 0.2, 1.5, 2), (19, 1, 3, 5)]
)
def test_noise_takes_no_size_out_of_the_range(
    monkeypatch: pytest.MonkeyPatch, seed: int, percent: float, kept: float, off: float
) -> None:
    """However readings scatter, batches of the largest size are run early, and vouched for."""
    monkeypatch.setattr(NoisyMachine, "seed", seed)
    monkeypatch.setattr(NoisyMachine, "percent", percent)
    monkeypatch.setattr(NoisyMachine, "kept_mib", kept)
    monkeypatch.setattr(NoisyMachine, "off_mib", off)
    budget = 600 * 2**20
    cost, machine = measured_on_noisy(monkeypatch, (256, 256), budget)
    sizes = np.array([(4, 4), (4, 256), (31, 90), (100, 100), (256, 4), (256, 256)])
    n = cost.capacity(sizes, budget)
    true = np.array([machine.true_bytes(*one) for one in zip(n, map(tuple, sizes), strict=True)])
    assert (true <= budget).all()
    assert n.all()
    assert true.mean() >= 0.7 * budget


def test_a_largest_size_that_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run: it would exceed the budget."""
    cost, _ = measured_on_noisy(monkeypatch, (2048, 2048), 600 * 2**20)
    assert cost.capacity([(2048, 2048)], 600 * 2**20) == 0
    assert any("the largest size, (2048, 2048), was run" in note for note in cost.notes)
    assert all(probe.peak_bytes <= 600 * 2**20 for probe in cost.probes)


@pytest.mark.parametrize(
    ("case", "max_size"), [("decoder, scores kept", (512,)), ("encoder and decoder", (256, 256))]
)
@pytest.mark.parametrize("seed", [2, 3])
@pytest.mark.slow
def test_no_batch_is_run_over_the_budget(
    monkeypatch: pytest.MonkeyPatch, case: str, max_size: Size, seed: int
) -> None:
    """Below a floor nothing shows what samples need: neither noise nor a flat line is evidence."""
    monkeypatch.setattr(NoisyMachine, "seed", seed)
    budget = 600 * 2**20
    cost, machine = measured_on_noisy(monkeypatch, max_size, budget, NoisyPolynomials, case)
    assert max(probe.peak_bytes for probe in cost.probes) <= budget
    size = max_size if len(max_size) > 1 else max_size[0]
    n = int(cost.capacity([size], budget)[0])
    assert 0.7 * budget <= machine.true_bytes(n, max_size) <= budget


@pytest.mark.filterwarnings("ignore:no formula fits:torchbudget.errors.MeasureWarning")
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.slow
def test_what_is_freed_between_runs_is_no_evidence(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Where the floor falls while runs are made, no batch is run over the budget."""
    monkeypatch.setattr(NoisyMachine, "seed", seed)
    budget = 600 * 2**20
    cost, _ = measured_on_noisy(monkeypatch, (512,), budget, FreesLate, "decoder, scores kept")
    assert max(probe.peak_bytes for probe in cost.probes) <= budget
