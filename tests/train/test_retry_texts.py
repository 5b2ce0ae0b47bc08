"""Every text of out-of-memory, raised by hand where a step may meet it.

Undone: the batch runs again in halves, and gradients are those of the batch. Passed on: the error
reaches the caller, and gradients are those of before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.out_of_memory_texts import AMBIGUOUS, CERTAIN, NEVER, ids
from torchbudget import GradAccumulator
from torchbudget.machine import out_of_memory

PLACES = ("forward", "backward", "collective")


class Fails(torch.autograd.Function):
    """The identity, which raises an error once, in its forward or its backward."""

    place: str
    errors: list[BaseException]

    @classmethod
    def at(cls, place: str) -> None:
        if cls.place == place and cls.errors:
            raise cls.errors.pop()

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        Fails.at("forward")
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        Fails.at("backward")
        return gradient


class Step:
    """A model whose step reduces over ranks, too, and an accumulator that runs or splits it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1).double()
        self.x = torch.randn(6, 3).double()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.accumulator = GradAccumulator(optimizer, self.model)

    def __call__(self, x: torch.Tensor) -> None:
        with self.accumulator.micro_batch(weight=len(x)):
            out = Fails.apply(self.model(x))
            dist.all_reduce(out.detach().sum())
            self.accumulator.backward(out.square().sum())

    def run(self) -> list[torch.Tensor]:
        self.accumulator.run_or_split(self, self.x)
        gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
        self.accumulator.flush()
        return gradients

    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the error is raised; an all-reduce of one rank does nothing else."""
    monkeypatch.setattr(dist, "all_reduce", lambda _: Fails.at("collective"))
    # However short this machine is of memory while the tests run.
    monkeypatch.setattr(out_of_memory, "_left", list)
    Fails.place, Fails.errors = request.param, []
    return str(request.param)


def check_undone() -> None:
    [error], Fails.errors = Fails.errors, []
    expected = Step().run()
    Fails.errors = [error]
    step = Step()
    for one, other in zip(step.run(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert step.accumulator.out_of_memory == 1


def check_passed_on() -> None:
    step = Step()
    [error] = Fails.errors
    with pytest.raises(type(error)) as raised:
        step.run()
    assert raised.value is error
    assert step.gradients() == [None, None]
    assert step.accumulator.out_of_memory == 0


@pytest.mark.parametrize(("kind", "text"), CERTAIN, ids=ids(CERTAIN))
def test_certain_texts_are_undone(kind: type, text: str, place: str) -> None:
    Fails.errors = [kind(text)]
    check_undone()


@pytest.mark.parametrize(("kind", "text"), AMBIGUOUS, ids=ids(AMBIGUOUS))
def test_ambiguous_texts_are_passed_on_without_evidence(kind: type, text: str, place: str) -> None:
    Fails.errors = [kind(text)]
    check_passed_on()


@pytest.mark.parametrize(("kind", "text"), AMBIGUOUS, ids=ids(AMBIGUOUS))
def test_ambiguous_texts_are_undone_where_an_allocation_failed(
    kind: type, text: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's count of failures rises while the attempt runs, as it does inside of cuDNN."""
    Fails.errors = [kind(text)]

    def failed() -> int:
        return 0 if Fails.errors else 1

    for module in ("torchbudget.train.retry", "torchbudget.machine.out_of_memory"):
        monkeypatch.setattr(f"{module}.failed_allocations", failed)
    check_undone()


@pytest.mark.parametrize(("kind", "text"), NEVER, ids=ids(NEVER))
def test_other_errors_are_passed_on(kind: type, text: str, place: str) -> None:
    Fails.errors = [kind(text)]
    check_passed_on()
