"""Runs of a step: never over the budget, whatever the process does beside it; and their time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.costs import Nodes, measured, piece
from tests.support.fake_device import FakeDevice, put_in_place
from torchbudget import MeasuredCost, PaddedCost, measure_cost
from torchbudget.cost import measure, running
from torchbudget.cost.running import ProbeOutOfMemoryError, reserve_of
from torchbudget.cost.subject import Domain, Subject
from torchbudget.cost.timing import _not_negative, _terms, optimizer_seconds
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


# ---------------------------------------------------------------------- time


BUDGET = "1GiB"


class Clock:
    """A clock that goes on only as a step says, in place of the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)


def make_batch(n: int, length: int) -> torch.Tensor:
    return torch.ones(n, length, 8)


def measured_in(clock: Clock, seconds_of: Any, **options: Any) -> MeasuredCost:
    """The cost of a step that takes so many seconds, and its optimizer's one second more."""
    model = nn.Linear(8, 8)

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.now_s += 1
            return super().step(closure)

    optimizer = Slow(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        clock.now_s += seconds_of(len(batch), batch.shape[1])
        optimizer.step()
        optimizer.zero_grad()

    return measure_cost(step, make_batch, max_size=512, budget=BUDGET, **options)


@pytest.mark.parametrize(
    "seconds_of",
    [
        lambda n, length: 1e-3 + 2e-6 * n * length,
        lambda n, length: 1e-4 + 1e-5 * length + 1e-6 * n * length,  # turns along the size
        lambda _n, _length: 5e-3,
        lambda _n, _length: 5.0,  # of which few fit the seconds of timing
    ],
    ids=["elements", "turns", "nothing", "seconds each"],
)
def test_a_time_of_known_terms_is_found(seconds_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At shapes that were not timed, too; without the seconds of the optimizer."""
    cost = measured_in(Clock(monkeypatch), seconds_of)
    n, sizes = np.array([1, 3, 40, 500]), np.array([8, 77, 300, 511])
    for shape in product(n.tolist(), sizes.tolist()):
        predicted = float(cost.time.batch_bytes(*shape)) / 1e9
        assert predicted == pytest.approx(seconds_of(*shape), rel=0.02), shape
    assert any(note.startswith("time was measured with") for note in cost.notes)


def test_a_time_that_is_not_asked_for_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = measured_in(Clock(monkeypatch), lambda _n, _length: 5e-3, time=False)
    assert cost.seconds is None
    with pytest.raises(CostError, match="time=False"):
        _ = cost.time


def test_a_knee_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short steps take the same time, however short: what was begun ahead is waited for."""

    def seconds_of(n: int, length: int) -> float:
        return max(1e-3, 1e-7 * n * length)

    cost = measured_in(Clock(monkeypatch), seconds_of)
    for shape in ((1, 8), (4, 100), (5000, 100), (1000, 500)):
        predicted = float(cost.time.batch_bytes(*shape)) / 1e9
        assert predicted == pytest.approx(seconds_of(*shape), rel=0.35), shape


@pytest.mark.parametrize(("samples", "is_timed"), [(100, False), (1_000_000, True)])
def test_a_forward_of_few_samples_is_not_timed(
    samples: int, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pass is over before a plan of least time would pay."""
    clock, model = Clock(monkeypatch), nn.Linear(8, 8).eval()

    @torch.no_grad()
    def step(batch: torch.Tensor) -> None:
        model(batch)
        clock.now_s += 1e-2 * len(batch)

    sizes = np.random.default_rng(0).integers(8, 512, samples)
    cost = measure_cost(step, make_batch, sizes=sizes, budget=BUDGET)
    assert (cost.seconds is not None) == is_timed


def test_operations_of_no_polynomial_are_left_out() -> None:
    """Of n³ no table can be made, as a sampler asks for; the other terms stay."""
    nodes = Nodes()
    n, size = nodes.make("symbol", 0), nodes.make("symbol", 1)
    shapes: list[tuple[int, tuple[int, ...]]] = [(2, (5,)), (3, (7,))]
    for flops, expected in (((n, n, size), [20, 63]), ((n, n, n), [0, 0])):
        one = piece(nodes, nodes.make("Mul", n, size), flops=nodes.make("Mul", *flops))
        terms, of_bytes = _terms(measured(pieces=(one,), largest=(99,)), shapes)
        assert terms[:, -2].tolist() == expected
        assert of_bytes.tolist() == [10, 21]


def test_an_optimizer_that_steps_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, weight = Clock(monkeypatch), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.1)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.now_s += 2
            inner.step()
            return super().step(closure)

    weight.grad = torch.ones(2)
    with optimizer_seconds(lambda: None) as spent_s:
        clock.now_s += 5
        Outer([weight], lr=0.1).step()
        assert spent_s() == 2
    inner.step()
    assert spent_s() == 2


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 12))
def test_no_other_coefficients_are_better(seed: int, terms: int, shapes: int) -> None:
    """Against the best of all sets of terms whose coefficients come out positive."""
    rng = np.random.default_rng(seed)
    matrix = rng.lognormal(0, 2, (shapes, terms)) * rng.integers(0, 2, (shapes, terms))
    found = _not_negative(matrix)
    assert (found >= 0).all()
    errors = []
    for chosen in product([False, True], repeat=terms):
        solved = np.linalg.lstsq(matrix[:, chosen], np.ones(shapes))[0]
        if solved.min(initial=0.0) >= 0:
            errors.append(np.square(matrix[:, chosen] @ solved - 1).sum())
    assert np.square(matrix @ found - 1).sum() <= min(errors) + 1e-6
