"""A step that fails is abandoned: its gradients are cleared on every rank, the next is exact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.support.ranks import run_ranks
from tests.train.test_retry import STARVED
from torchbudget import GradAccumulator
from torchbudget.errors import ForeignStepWarning, OptionError, SampleTooLargeError, StepError

ABANDONED = (
    STARVED
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, where = sys.argv[1:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model, _ = make()
large, _ = make()
for one in (model, large):
    one.eval()
ddp = DistributedDataParallel(model)
accumulator = GradAccumulator(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, steps=3)
step = step_of(ddp, accumulator, [])
x = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 24, 4)))
told = {}
try:
    for number, batch in enumerate(x[rank, :12].split(4)):
        if rank == 1 and where == "sample" and number == 1:
            accumulator.run_or_split(lambda x: (starve(), step(x)), batch)
        if rank == 1 and where == "sum":
            starve()  # it has no gradients, and cannot allocate the zeros that stand for them
            accumulator.step()
        accumulator.run_or_split(step, batch)
except SampleTooLargeError as error:
    feed()
    told["error"] = str(error)
told["cleared"] = all(p.grad is None for p in model.parameters())
told["pending"] = accumulator.state_dict()["weight"]
for batch in x[rank, 12:].split(4):
    accumulator.run_or_split(step, batch)
(large(x[:, 12:].flatten(0, 1)).square().sum() / 24).backward()
torch.optim.SGD(large.parameters(), lr=0.1).step()
told["difference"] = difference(model, large)
write(told)
"""
)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
@pytest.mark.parametrize(
    ("where", "said"),
    [("sample", "out of memory with one sample"), ("sum", "gradients are summed over ranks")],
)
def test_a_step_that_one_rank_gives_up(where: str, said: str, tmp_path: Path) -> None:
    """One sample does not fit, or the zeros to be summed do not: every rank raises, and goes on."""
    results = run_ranks(ABANDONED, tmp_path, 2, where)
    assert "another rank" in results[0]["error"]
    assert said in results[1]["error"]
    for told in results:
        assert told["cleared"]
        assert told["pending"] == 0
        assert told["difference"] <= EXACT


MET = (
    STARVED
    + """
import torch.distributed as dist
from torchbudget.errors import StepError

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(2, 1)
accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model)


def step(x):
    with accumulator.micro_batch(weight=len(x)):
        seen = x.mean(0)
        dist.all_reduce(seen)  # such as a statistic of the whole batch
        if rank == 1:
            raise MemoryError
        accumulator.backward((model(x) - seen.sum()).sum())


told = ""
try:
    accumulator.run_or_split(step, torch.ones(4, 2))
except StepError as error:
    told = str(error)
write([told, all(p.grad is None for p in model.parameters()), accumulator.state_dict()["weight"]])
"""
)


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
def test_a_collective_is_not_repeated_on_one_rank(tmp_path: Path) -> None:
    """It would pair with another collective of the others: the batch is undone, and raises."""
    (nothing, *_), (told, undone, weight) = run_ranks(MET, tmp_path, 2)
    assert nothing == ""
    assert "has a collective, which one rank cannot repeat" in told
    assert undone
    assert weight == 0


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
    """Refused at construction where the module says it, else at the first step, and cleared."""
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    with pytest.raises(OptionError, match="sparse gradients cannot be clipped"):
        GradAccumulator(optimizer, embedding, max_norm=1.0)
    accumulator = GradAccumulator(optimizer, max_norm=1.0)
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
    assert accumulator.state_dict()["micro_batches"] == 1
    accumulator.flush()
    assert accumulator.last.weight == Data.make(2).weight
