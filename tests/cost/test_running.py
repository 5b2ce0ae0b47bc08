"""Runs of a step: never over the budget, whatever the process does beside it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.costs import measured
from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget import PaddedCost, measure_cost
from torchbudget.cost import measure, running
from torchbudget.cost.running import ProbeOutOfMemoryError, reserve_of
from torchbudget.cost.subject import Domain, Subject
from torchbudget.errors import CostError
from torchbudget.machine.device import device_memory
from torchbudget.machine.peaks import Peak
from torchbudget.restoring import TrainingState

MIB = 2**20


def a_step(batch: torch.Tensor) -> None:
    LAYER(batch.mean((0, 1), keepdim=True)).sum().backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()


LAYER = torch.nn.Linear(8, 8)
OPTIMIZER = torch.optim.SGD(LAYER.parameters(), lr=0.1)


class Machine:
    """Peaks by a formula in place of the machine's."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, peak_of: Callable[[int, int], float]
    ) -> None:
        self.peaks: list[float] = []
        self.shape = 0, 0

        @contextmanager
        def peak_memory(_: Any) -> Any:
            self.shape = 0, 0
            peak = Peak()
            yield peak
            peak.bytes = int(peak_of(*self.shape))
            self.peaks.append(peak.bytes)

        monkeypatch.setattr(running, "peak_memory", peak_memory)
        monkeypatch.setattr(running.StepRunner, "_read_beside_bytes", lambda _: 0)
        monkeypatch.setattr(measure, "_beside_tensors", lambda _: 100 * MIB)

    def make(self, n: int, size: int) -> torch.Tensor:
        self.shape = n, size
        return torch.zeros(n, size, 8)


STEPS: dict[str, Callable[[int, int], float]] = {
    "tensors": lambda n, size: 100 * MIB + 32 * n * size,
    "kernels take 1.7 times": lambda n, size: 100 * MIB + 1.7 * 32 * n * size,
    "kernels touch a half": lambda n, size: 100 * MIB + 0.5 * 32 * n * size,
    "garbage at first": lambda n, size: (250 if n * size == 16 else 100) * MIB + 32 * n * size,
    "linear": lambda n, size: 100 * MIB + 4000 * n * size,
    "quadratic": lambda n, size: 120 * MIB + n * (9000 * size + 90 * size**2),
    "squares of n": lambda n, size: 100 * MIB + 3000 * n * size + 500 * n**2,
    "floor": lambda n, size: max(300 * MIB * (n > 0), 100 * MIB + 4000 * n * size),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("linear", "run"),
        ("tensors", "auto"),
        *(pytest.param(name, "run", marks=pytest.mark.slow) for name in STEPS if name != "linear"),
        ("kernels touch a half", "auto"),
        ("garbage at first", "auto"),
        pytest.param("kernels take 1.7 times", "auto", marks=pytest.mark.slow),
    ],
)
def test_no_run_is_over_the_budget(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is planned is near it: of sizes that were run, and in between."""
    machine = Machine(monkeypatch, STEPS[name])
    budget = 900 * MIB
    cost = measure_cost(
        a_step, machine.make, max_size=1024, min_size=16, method=method, budget=budget
    )
    assert max(machine.peaks) <= budget
    for size in np.geomspace(16, 1024, 9).astype(int).tolist():
        n = int(cost.capacity(size, budget))
        real = STEPS[name](n, size)
        assert real <= 1.002 * budget
        # Batches that are only run are limited; of small ones no two show a scale below 1.
        if name in ("linear", "quadratic", "floor") or (name, method) == ("tensors", "auto"):
            assert real >= 0.7 * budget


@pytest.mark.slow
@settings(max_examples=25)
@given(
    each=st.integers(100, 20_000),
    square=st.sampled_from([0, 0, 1, 30, 70]),
    floor=st.integers(0, 500 * MIB),
    max_size=st.integers(100, 2000),
)
@example(each=3587, square=30, floor=229 * MIB, max_size=1834)
@example(each=100, square=80, floor=0, max_size=2000)
def test_no_run_of_any_step_is_over_the_budget(
    each: int, square: int, floor: int, max_size: int
) -> None:
    """Nor is a planned batch: of bytes that are linear or quadratic in n, over a floor."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        def peak_of(n: int, size: int) -> float:
            return max(floor * (n > 0), 100 * MIB + each * n * size + square * (n * size) ** 2)

        machine = Machine(monkeypatch, peak_of)
        budget = 900 * MIB
        with suppress(CostError):  # not even one sample fits
            cost = measure_cost(
                a_step, machine.make, max_size=max_size, method="run", budget=budget
            )
            for size in {max_size // 64 or 1, max_size // 5, max_size}:
                assert peak_of(int(cost.capacity(size, budget)), size) <= budget
        assert max(machine.peaks[1:]) <= budget or len(machine.peaks) == 2


@pytest.mark.slow
@settings(max_examples=25)
@given(
    long=st.floats(0.5, 2.0), short=st.floats(0.7, 1.4), bend=st.floats(0.1, 5.0),
    max_size=st.integers(100, 2000),
)  # fmt: skip
def test_no_run_of_other_kernels_is_over_the_budget(
    long: float, short: float, bend: float, max_size: int
) -> None:
    """Of bytes in use for each traced byte that differ between sizes, by up to 40 %."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        def peak_of(n: int, size: int) -> float:
            scale = long * short ** ((1 - size / max_size) ** bend)
            return 100 * MIB + scale * 32 * n * size

        machine = Machine(monkeypatch, peak_of)
        budget = 300 * MIB  # above it, a batch would have more than 256 MiB
        measure_cost(a_step, machine.make, max_size=max_size, budget=budget)
        assert max(machine.peaks) <= budget


def test_no_run_of_many_samples_is_over_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bytes of each sample that no trace sees, and that the first run, of one, does not show."""
    budget = 300 * MIB

    def peak_of(n: int, size: int) -> float:
        return 100 * MIB + n * (288 * size + 12_000 * (128 / max(size, 128)) ** 4)

    machine = Machine(monkeypatch, peak_of)

    def step(batch: torch.Tensor) -> None:
        a_step(batch.repeat(8, 1, 1))

    measure_cost(step, machine.make, max_size=1024, min_size=128, budget=budget)
    assert 200 * MIB < max(machine.peaks) <= budget


def test_a_budget_below_the_first_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, STEPS["linear"])
    with pytest.raises(CostError, match=r"one sample of size .*; raise the budget, 50 MiB"):
        measure_cost(a_step, machine.make, max_size=64, method="run", budget=50 * MIB)


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_memory_that_depends_on_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a step is run only, with a margin of at least 3 %."""
    machine = Machine(monkeypatch, STEPS["linear"])

    def step(batch: torch.Tensor) -> None:
        a_step(batch[batch[..., 0] >= 0][None])

    cost = measure_cost(step, machine.make, max_size=256, budget=900 * MIB)
    assert any("with the values of make_batch" in note for note in cost.notes)
    assert cost.margin >= 0.03
    assert max(map(abs, cost.errors())) < 0.03
    assert cost.label(3, 256) == "interpolated"


def test_a_largest_size_that_does_not_fit_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are over every budget."""
    machine = Machine(monkeypatch, lambda n, size: 100 * MIB + n * size**2 * 1000)
    cost = measure_cost(a_step, machine.make, max_size=4096, method="run", budget=900 * MIB)
    assert any("no batch of the largest size" in note for note in cost.notes)
    assert cost.capacity([64, 4096], 900 * MIB).tolist()[1] == 0
    assert cost.capacity(64, 900 * MIB) > 0
    assert max(machine.peaks) <= 900 * MIB


@pytest.mark.parametrize(("wasted", "fits"), [(1.0, 1.0), (1.2, 1.0), (1.2, 0.75), (1.6, 0.6)])
def test_gaps_between_shapes_in_turn_are_added(
    wasted: float, fits: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are planned with them fit, and fill the budget; larger ones fail on the card."""
    put_in_place(monkeypatch, FakeDevice())
    room = 900 * MIB
    state = TrainingState(a_step)
    domain = Domain.of(1024, 1)
    subject = Subject(a_step, lambda n, size: torch.zeros(n, size, 8), domain, state, state.device)
    cost = measured(PaddedCost(fixed_bytes=100 * MIB, unit_bytes=4000))

    class Card:
        def __init__(self) -> None:
            self.memory = device_memory("cuda")

        def peak_of(self, shapes: list[tuple[int, tuple[int]]]) -> tuple[Peak, int, float]:
            most = max(int(cost.batch_bytes(n, size)) for n, [size] in shapes)
            if most > 1.001 * fits * room:
                raise ProbeOutOfMemoryError
            return Peak(bytes=int(wasted * most)), 0, 0.0

    reserve = reserve_of(cost, Card(), subject, room)  # type: ignore[arg-type]
    n = int(cost.capacity(64, room - reserve))
    assert 0.95 * room <= wasted * int(cost.batch_bytes(n, 64)) <= room


@pytest.mark.parametrize("stated", [True, False])
def test_kernels_that_are_kept_are_warned_of(
    stated: bool, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Convolutions on the CPU, unless their caches are limited."""
    monkeypatch.setattr(running, "kernel_caches_are_stated", lambda: stated)
    machine = Machine(monkeypatch, STEPS["linear"])
    layer = torch.nn.Conv1d(8, 8, 3)

    @torch.no_grad()
    def step(batch: torch.Tensor) -> None:
        layer(batch[:1, :4].mT)

    layer.eval()
    measure_cost(step, machine.make, max_size=16, min_size=4, method="run", budget=900 * MIB)
    assert any("convolutions" in str(one.message) for one in recwarn) is not stated
