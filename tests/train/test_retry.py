"""Failed allocations, undone: nothing is lost, and nothing counted twice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.batches import Encoding, Pair
from tests.support.costs import measured
from tests.support.large_steps import (
    EXACT,
    Data,
    accumulate,
    accumulating,
    difference,
    large_step,
    loss_sum,
    make_model,
    sgd,
)
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from torchbudget import (
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PackCollate,
    PadCollate,
    PaddedCost,
)
from torchbudget.errors import OptionError, SampleTooLargeError, StepError
from torchbudget.machine import out_of_memory
from torchbudget.protocols import SplittableBatch, SplittablePaddedBatch
from torchbudget.train.batches import halves, moved, num_samples


@pytest.mark.slow
def test_a_failed_allocation_is_undone(tmp_path: Path) -> None:
    """In forward or backward: each sample counts once, and the steps are the same.

    With dropout and batch statistics they are, bit for bit, those of a run that was cut so from the
    start: random numbers and buffers of the failed attempt are gone.
    """
    [undone] = run_ranks(script("starved.undone"), tmp_path, 1)
    assert undone == {"same": True, "failures": [5, 5], "counted": True, "last": [3, 12]}


AMBIGUOUS = "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART"


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(
    ("text", "counts", "is_undone"),
    [
        ("CUDA driver error: out of memory", False, True),
        (AMBIGUOUS, False, False),
        (AMBIGUOUS, True, True),
        ("CUDA error: device-side assert triggered", True, False),
    ],
)
def test_errors_are_undone_or_passed_on(
    text: str, counts: bool, is_undone: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a text, or by a device's count of failures that rises while the attempt runs.

    An error that is passed on leaves nothing of the batch, either. `tests/machine` has every text.
    """
    model, large, data = make_model("CNN"), make_model("CNN"), Data.make(6)
    accumulator, failing = GradAccumulator(sgd(model), model), [RuntimeError(text)]
    monkeypatch.setattr(out_of_memory, "_left", list)  # however short this machine is of memory
    if counts:
        monkeypatch.setattr(out_of_memory, "failed_allocations", lambda: int(not failing))

    def fail(*_: Any) -> None:
        if failing:
            raise failing.pop()

    def step(batch: Any) -> None:
        part = Data(*batch)
        with accumulator.micro_batch(weight=part.weight):
            loss = loss_sum(model, part)
            loss.register_hook(fail)
            if place == "forward":
                fail()
            accumulator.backward(loss)

    passed_on = pytest.raises(RuntimeError, match=text.rsplit(maxsplit=1)[-1])
    with nullcontext() if is_undone else passed_on:
        accumulator.run_or_split(step, (data.x, data.y))
    assert accumulator.out_of_memory == is_undone
    if is_undone:
        accumulator.step()
        large_step(large, sgd(large), data)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert difference(model, large) <= EXACT


class Counting(nn.Module):
    """A buffer that the first forward makes, and each later one replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.ones(()) if self.seen is None else self.seen + 1
        return self.layer(x)


def made(steps: int, act: Callable[[Tensor], object] = len) -> tuple[Any, ...]:
    """A model, its accumulator, and a function for which four samples are too many."""
    model = Counting()
    accumulator = GradAccumulator(sgd(model), model, steps=steps)

    def step(x: Tensor) -> None:
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).sum())
            act(x)
            if len(x) == 4:
                raise MemoryError

    return model, accumulator, step


def test_a_part_that_fails_for_good_takes_the_whole_batch_along() -> None:
    """Memory runs out on four samples, the second half raises: nothing of the batch stays."""

    def fail(x: Tensor) -> None:
        if x[0, 0] == 5:
            raise ValueError("the second half")

    model, accumulator, step = made(3, fail)
    accumulator.run_or_split(step, torch.ones(2, 2))
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
    model, accumulator, step = made(2)

    def logged(x: Tensor) -> None:
        step(x)
        if accumulator.stepped:
            raise ValueError("the logging")

    accumulator.run_or_split(step, torch.ones(4, 2))
    with pytest.raises(ValueError, match="the logging"):
        accumulator.run_or_split(logged, torch.ones(4, 2))
    assert accumulator.last.weight == 8
    assert all(p.grad is None for p in model.parameters())
    assert accumulator.pending == 0


def test_buffers_and_generators_are_put_back() -> None:
    """A buffer that a failed forward made is made again.

    The generators of `random`, NumPy and torch are where they were when the attempt began.
    """
    drawn: list[Any] = []

    def draw(_: Tensor) -> None:
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))

    model, accumulator, step = made(1, draw)
    accumulator.run_or_split(step, torch.ones(4, 2))
    assert model.seen == 2
    assert drawn[0] == drawn[1] != drawn[2]


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
    optimizer = sgd(model)
    with pytest.raises(OptionError, match=r"needs GradAccumulator\(…, module"):
        GradAccumulator(optimizer).run_or_split(print, torch.zeros(2))
    accumulator = GradAccumulator(optimizer, model)
    cost = measured(PaddedCost(unit_bytes=1))
    with pytest.raises(OptionError, match="padded_size"):
        accumulator.run_or_split(print, torch.zeros(2), cost=cost)
    with pytest.raises(StepError, match="opened no micro_batch"):
        GradAccumulator(optimizer, model).run_or_split(print, torch.zeros(2))


class Pairs:
    """A batch of preference pairs, which splits between pairs."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.num_samples = x, len(x)

    def split(self, n: int) -> list[Pairs]:
        return [Pairs(part.flatten(0, 1)) for part in self.x.unflatten(0, (-1, 2)).tensor_split(n)]


def test_units_of_one_micro_batch_are_not_cut() -> None:
    """Whatever the batch's type, at the first call, also where memory suffices.

    A type that splits itself is taken to know its units: the step is then that of the whole batch.
    """
    lengths, pairs = [1] * 12, [i // 2 for i in range(12)]
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))

    def training(units: Any) -> tuple[nn.Module, GradAccumulator, Callable[[Any], None], list[int]]:
        sampler = MemoryBudgetBatchSampler(
            lengths, PaddedCost(unit_bytes=1), 6, samples_per_step=12, units=units
        )
        model, tried = nn.Linear(3, 1), []
        accumulator = GradAccumulator(sgd(model), model, steps=sampler)

        def step(batch: Any) -> None:
            rows = batch["x"] if isinstance(batch, Mapping) else getattr(batch, "x", batch)
            tried.append(len(rows))
            with accumulator.micro_batch(weight=len(rows) // 2):
                margins = model(rows[::2]) - model(rows[1::2])
                accumulator.backward(nn.functional.softplus(-margins).sum())
                if len(rows) == 6:
                    raise MemoryError

        next(iter(sampler))
        return model, accumulator, step, tried

    collated = PadCollate()([{"x": one} for one in x[:6]])
    for batch in (collated, {"x": x[:6]}, x[:2]):
        _, accumulator, step, tried = training((pairs, "micro_batch"))
        with pytest.raises(OptionError, match="keeps each unit in one micro-batch"):
            accumulator.run_or_split(step, batch)
        assert tried == []
    _, accumulator, step, tried = training(pairs)  # a unit may take several micro-batches
    accumulator.run_or_split(step, x[:4])
    assert tried == [4]
    accumulator.flush()

    model, accumulator, step, tried = training((pairs, "micro_batch"))
    accumulator.run_or_split(step, Pairs(x[:6]))
    assert tried == [6, 4, 2]
    loss = nn.functional.softplus(model(x[1:6:2]) - model(x[:6:2])).sum()
    torch.testing.assert_close(model.weight.grad, *torch.autograd.grad(loss, model.weight))
    accumulator.flush()


class NoMemory(torch.optim.SGD):
    """Its first step fails."""

    fails = True

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise MemoryError
        return super().step(closure)


@pytest.mark.parametrize("scales", [False, True])
def test_an_optimizer_that_runs_out_of_memory(scales: bool) -> None:
    """Its gradients do not enter the next step, whose weights do not know them.

    A scaler unscales the next ones.
    """
    model, large = make_model("CNN"), make_model("CNN")
    optimizer = NoMemory(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scales else None
    accumulator = GradAccumulator(optimizer, model, steps=1, scaler=scaler)
    data = Data.make(4)
    with pytest.raises(SampleTooLargeError, match="in the optimizer's step"):
        accumulator.run_or_split(
            lambda x: accumulate(accumulator, model, [Data(*x)]), (data.x, data.y)
        )
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


def test_a_second_micro_batch_in_run_or_split() -> None:
    """The message says so; the first one counts, with its gradients and its weight."""
    accumulator, model = accumulating(steps=4)

    def twice(x: Tensor) -> None:
        accumulate(accumulator, model, [Data.make(2), Data.make(2)])

    with pytest.raises(StepError, match="opened a second micro_batch"):
        accumulator.run_or_split(twice, torch.zeros(4))
    assert accumulator.pending == 1
    accumulator.flush()
    assert accumulator.last.weight == Data.make(2).weight


# ---------------------------------------------------------------------- batches


def nested(n: int) -> Any:
    """N samples in nested containers, with a `None`."""
    x = torch.arange(n)
    inner = {"y": [x.unsqueeze(1), None], "z": MappingProxyType({"x": x})}
    return Encoding(pair=Pair(x.float(), inner), x=x)


def tensors_of(batch: Any) -> list[Tensor]:
    rest = batch["pair"].second
    assert rest["y"][1] is None
    return [batch["pair"].first, rest["y"][0], rest["z"]["x"], batch["x"]]


@given(st.integers(2, 9))
def test_halves_are_the_batch(n: int) -> None:
    """In order, of the same structure; of an odd number the first has one more."""
    batch = nested(n)
    first, second = halves(batch)
    assert isinstance(first, Encoding)
    assert [num_samples(one) for one in (batch, first, second)] == [n, (n + 1) // 2, n // 2]
    for whole, *parts in zip(*map(tensors_of, (batch, first, second)), strict=True):
        assert torch.equal(torch.cat(parts), whole)


def test_batches_of_collates_split_themselves() -> None:
    samples = [{"x": torch.arange(n)} for n in (3, 1, 4)]
    for collate in (PadCollate(), PackCollate()):
        batch = collate(samples)
        assert isinstance(batch, SplittableBatch)
        assert [num_samples(part) for part in halves(batch)] == [1, 2]
        assert isinstance(batch, SplittablePaddedBatch) == isinstance(collate, PadCollate)


class Counted:
    """It says how many samples it has, and cannot be split."""

    num_samples = 4


TEXTS = Encoding(x=torch.zeros(2), texts=["a", "b"])


@pytest.mark.parametrize(
    "batch", [torch.zeros(()), [], TEXTS, (torch.zeros(2), torch.zeros(3)), Counted()]
)
def test_batches_that_cannot_be_split(batch: Any) -> None:
    accumulator, _ = accumulating()
    with pytest.raises(OptionError, match="the number of samples is unknown"):
        accumulator.run_or_split(print, batch)
    if isinstance(batch, Counted):
        assert num_samples(batch) == 4


def test_tensors_and_batches_are_moved() -> None:
    batch = nested(2)
    assert moved(batch, None) is batch
    collated = PadCollate()([{"x": torch.arange(3)}])
    for one in (*tensors_of(moved(batch, "meta")), moved(collated, "meta")["x"]):
        assert one.device.type == "meta"
