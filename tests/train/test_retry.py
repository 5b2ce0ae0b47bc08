"""Failed allocations, undone: nothing is lost, and nothing counted twice."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.costs import measured
from tests.support.large_steps import (
    EXACT,
    Data,
    accumulate,
    difference,
    large_step,
    loss_sum,
    make_model,
    sgd,
)
from tests.support.out_of_memory_texts import AMBIGUOUS, CERTAIN, NEVER, ids
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from torchbudget import GradAccumulator, PaddedCost
from torchbudget.errors import ForeignStepWarning, OptionError, SampleTooLargeError, StepError
from torchbudget.machine import out_of_memory


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
def test_a_failed_allocation_is_undone(tmp_path: Path) -> None:
    """In forward or backward: each sample counts once, and the steps are the same.

    Without dropout and batch statistics they differ by at most 1e-12 from the uncut run's. With
    them they are, bit for bit, those of a run that was cut so from the start: random numbers and
    buffers of the failed attempt are gone. Where one sample does not fit, all is as it was.
    """
    [(dropped, plain, hopeless)] = run_ranks(script("starved"), tmp_path, 1)
    for found in (dropped, plain):
        assert found["failures"] == [5, 5]
        assert found["counted"]
        assert found["last"] == [3, 12]
        assert found["difference"] <= EXACT
    assert dropped["same"]
    assert "out of memory with one sample" in hopeless.pop("text")
    assert hopeless == {"tries": 3, "same": True, "clean": True, "random": True}


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


def gradients_of(error: BaseException | None) -> list[Any]:
    """What a batch gives in which this error is raised once: gradients, and how often it failed."""
    torch.manual_seed(0)
    model, x = nn.Linear(3, 1).double(), torch.randn(6, 3).double()
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model)
    Fails.errors = [] if error is None else [error]

    def step(x: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(Fails.apply(model(x)).square().sum())

    try:
        accumulator.run_or_split(step, x)
    except BaseException:
        assert [parameter.grad for parameter in model.parameters()] == [None, None]
        raise
    found = [parameter.grad.clone() for parameter in model.parameters()]
    accumulator.flush()
    return [*found, accumulator.out_of_memory]


@pytest.fixture(params=("forward", "backward"))
def _place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of the error, however short this machine is of memory while the tests run."""
    monkeypatch.setattr(out_of_memory, "_left", list)
    Fails.place = request.param


def check_undone(error: BaseException) -> None:
    *found, times = gradients_of(error)
    *expected, _ = gradients_of(None)
    assert times == 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(("kind", "text"), CERTAIN, ids=ids(CERTAIN))
def test_certain_texts_are_undone(kind: type, text: str) -> None:
    check_undone(kind(text))


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(("kind", "text"), AMBIGUOUS, ids=ids(AMBIGUOUS))
def test_ambiguous_texts_are_undone_where_an_allocation_failed(
    kind: type, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's count of failures rises while the attempt runs, as it does inside of cuDNN."""
    with pytest.raises(kind):
        gradients_of(kind(text))
    for module in ("torchbudget.train.retry", "torchbudget.machine.out_of_memory"):
        monkeypatch.setattr(f"{module}.failed_allocations", lambda: 0 if Fails.errors else 1)
    check_undone(kind(text))


@pytest.mark.usefixtures("_place")
@pytest.mark.parametrize(("kind", "text"), NEVER, ids=ids(NEVER))
def test_other_errors_are_passed_on(kind: type, text: str) -> None:
    """The batch is undone, too."""
    with pytest.raises(kind):
        gradients_of(kind(text))


class Counting(nn.Module):
    """A buffer that each forward replaces, from a number or, at first, from nothing."""

    def __init__(self, start: torch.Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.ones(()) if self.seen is None else self.seen + 1
        return self.layer(x)


def test_a_part_that_fails_for_good_takes_the_whole_batch_along() -> None:
    """Memory runs out on four samples, the second half raises: nothing of the batch stays."""
    model = Counting(torch.zeros(()))
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=3)
    first = torch.ones(2, 2)

    def step(x: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).sum())
            if len(x) == 4:
                raise MemoryError
            if x[0, 0] == 5:
                raise ValueError("the second half")

    accumulator.run_or_split(step, first)
    before = [p.grad.clone() for p in model.parameters()]
    x = torch.ones(4, 2)
    x[2:] = 5
    with pytest.raises(ValueError, match="second half"):
        accumulator.run_or_split(step, x)
    assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
    assert accumulator.pending == 1
    accumulator.run_or_split(step, torch.ones(4, 2))
    assert model.seen == 1 + 2  # nothing of what failed is among them
    accumulator.flush()


def test_a_batch_that_a_step_has_taken_is_not_undone() -> None:
    """The function fails after the step, in its logging say: nothing counts twice."""
    model = nn.Linear(2, 1)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=2)
    fails = [False]

    def step(x: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).sum())
            if len(x) == 4:
                raise MemoryError
        if fails[0] and accumulator.stepped:
            raise ValueError("the logging")

    accumulator.run_or_split(step, torch.ones(4, 2))
    fails[0] = True
    with pytest.raises(ValueError, match="the logging"):
        accumulator.run_or_split(step, torch.ones(4, 2))
    assert accumulator.last is not None
    assert accumulator.last.weight == 8
    assert all(p.grad is None for p in model.parameters())
    assert accumulator.pending == 0


def test_a_buffer_that_a_failed_forward_made_is_made_again() -> None:
    model = Counting(None)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=1)

    def step(x: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).sum())
            if len(x) == 4:
                raise MemoryError

    accumulator.run_or_split(step, torch.ones(4, 2))
    assert model.seen == 2


def test_generators_are_put_back() -> None:
    """Those of `random`, NumPy and torch are where they were when the failed attempt began."""
    model = nn.Linear(2, 1)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model)
    drawn = []

    def step(x: torch.Tensor) -> None:
        numpy = np.random.rand()
        drawn.append((random.random(), numpy, torch.rand(()).item()))
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).sum())
            if len(x) == 4:
                raise MemoryError

    accumulator.run_or_split(step, torch.ones(4, 2))
    assert drawn[0] == drawn[1] != drawn[2]
    accumulator.flush()


def test_a_batch_comes_as_it_was_into_every_run() -> None:
    """Its containers are rebuilt, and a tensor that is changed in place is refused by name."""
    model = nn.Linear(2, 1)
    accumulator = GradAccumulator(sgd(model), model, steps=2)

    def step(batch: dict[str, Any]) -> None:
        x, labels = batch.pop("x"), batch["rest"].pop()
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward((model(x) - labels).square().sum())
            if len(x) == 4:
                raise MemoryError

    batch = {"x": torch.ones(4, 2), "rest": [torch.ones(4, 1)]}
    accumulator.run_or_split(step, batch)
    assert accumulator.out_of_memory == 1
    assert sorted(batch) == ["rest", "x"]

    def masking(batch: dict[str, Any]) -> None:
        batch["rest"][0][0] = 0
        with accumulator.micro_batch(weight=2):
            accumulator.backward(model(batch["x"]).sum())

    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(OptionError, match=r"changed batch\['rest'\]\[0\] in place"):
        accumulator.run_or_split(masking, batch)
    assert accumulator.pending == 1
    assert all(map(torch.equal, before, [parameter.grad for parameter in model.parameters()]))
    accumulator.flush()


def test_what_cannot_be_split() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OptionError, match=r"needs GradAccumulator\(…, module"):
        GradAccumulator(optimizer).run_or_split(print, torch.zeros(2))
    accumulator = GradAccumulator(optimizer, model)
    with pytest.raises(OptionError, match="not made of tensors"):
        accumulator.run_or_split(print, (torch.zeros(2), ["a", "b"]))
    cost = measured(PaddedCost(unit_bytes=1))
    with pytest.raises(OptionError, match="padded_size"):
        accumulator.run_or_split(print, torch.zeros(2), cost=cost)
    with pytest.raises(StepError, match="opened no micro_batch"):
        GradAccumulator(optimizer, model).run_or_split(print, torch.zeros(2))


class NoMemory(torch.optim.SGD):
    """Its first step fails."""

    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise MemoryError
        return super().step(closure)


def test_an_optimizer_that_runs_out_of_memory() -> None:
    """Its gradients do not enter the next step, whose weights do not know them."""
    model, large = make_model("CNN"), make_model("CNN")
    optimizer = NoMemory(model.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, model, steps=1)

    def step(data: Data) -> None:
        accumulate(accumulator, model, [data])

    with pytest.raises(SampleTooLargeError, match="in the optimizer's step"):
        accumulator.run_or_split(lambda x: step(Data(*x)), (Data.make(4).x, Data.make(4).y))
    assert all(parameter.grad is None for parameter in model.parameters())
    accumulate(accumulator, model, [Data.make(8)])
    large_step(large, torch.optim.SGD(large.parameters(), lr=0.1), Data.make(8))
    assert difference(model, large) <= EXACT


def test_sparse_gradients_that_are_clipped() -> None:
    """Refused at the first step, and cleared."""
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, embedding, max_norm=1.0)
    with (
        pytest.raises(OptionError, match="sparse gradients cannot be clipped"),
        accumulator.micro_batch(1, last=True),
    ):
        accumulator.backward(embedding(torch.tensor([1, 2])).sum())
    assert embedding.weight.grad is None
    accumulator = GradAccumulator(optimizer, embedding)
    with accumulator.micro_batch(2, last=True):
        accumulator.backward(embedding(torch.tensor([1, 2])).sum())
    assert accumulator.stepped


def test_gradients_of_before_are_noticed_in_run_or_split() -> None:
    """Gradients that are set aside for a run count for the step as well: they are warned of."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=1)
    loss_sum(model, Data.make(4)).backward()
    with pytest.warns(ForeignStepWarning, match="were there before"):
        accumulator.run_or_split(
            lambda x: accumulate(accumulator, model, [Data(*x)]), (Data.make(4).x, Data.make(4).y)
        )


def test_a_second_micro_batch_in_run_or_split() -> None:
    """The message says so; the first one counts, with its gradients and its weight."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=4)

    def twice(x: torch.Tensor) -> None:
        accumulate(accumulator, model, [Data.make(2), Data.make(2)])

    with pytest.raises(StepError, match="opened a second micro_batch"):
        accumulator.run_or_split(twice, torch.zeros(4))
    assert accumulator.pending == 1
    accumulator.flush()
    assert accumulator.last.weight == Data.make(2).weight
