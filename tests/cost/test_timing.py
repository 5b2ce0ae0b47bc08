"""The measured time of a step: what it is fitted to, and what it leaves out."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.support.costs import Nodes, measured, piece
from torchbudget import MeasuredCost, measure_cost
from torchbudget.cost.timing import _not_negative, _terms, optimizer_seconds
from torchbudget.errors import CostError

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
    ],
    ids=["elements", "turns", "nothing"],
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
