"""Real allocation failures, undone: nothing is lost, and nothing counted twice."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.costs import measured
from tests.support.large_steps import Data, loss_sum, make_model
from tests.support.ranks import run_ranks
from torchbudget import GradAccumulator, PaddedCost
from torchbudget.errors import OptionError, StepError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")

STARVED = """
import json
import os
import resource
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import torchbudget.train.retry as retry
from tests.support.large_steps import difference
from torchbudget import GradAccumulator, trim_malloc
from torchbudget.errors import BatchNormWarning, SampleTooLargeError

trim_malloc()  # or else the heap has blocks of before
# The first square root of a process (AdamW's) is not always the same where two threads take it at
# once: of the same gradients and averages, one process in a hundred made other parameters.
torch.set_num_threads(1)
WIDE = 30_000  # an activation of a sample is 240 kB, which malloc maps and unmaps


def data_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split()[0]) * 1024


def starve():
    "From here on no large block can be allocated."
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes(), resource.RLIM_INFINITY))


def write(results):
    Path(sys.argv[1], os.environ["RANK"] + ".json").write_text(json.dumps(results))


def feed():
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


class Wide(nn.Module):
    "Dropout and batch statistics, and a place in forward or backward where memory ends."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, WIDE).double()
        self.norm = nn.BatchNorm1d(WIDE).double()
        self.outer = nn.Linear(WIDE, 1).double()
        self.fails = []  # what is left to happen
        self.failures = 0

    def here(self, place):
        if self.fails and self.fails[0] == place:
            self.fails.pop(0)
            self.failures += 1
            starve()

    def forward(self, x):
        self.here("inner")
        hidden = self.inner(x)
        hidden.register_hook(lambda gradient: self.here("backward of inner"))
        self.here("norm")
        hidden = F.dropout(self.norm(hidden), 0.1, self.training)
        self.here("outer")
        out = self.outer(hidden)
        out.register_hook(lambda gradient: self.here("backward of outer"))
        return out


class Planned:
    "Steps of given numbers of micro-batches."

    def __init__(self, steps):
        self.steps = steps

    def accumulates(self):
        return True


def make(steps=3):
    model = Wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, GradAccumulator(optimizer, model, steps=steps)


def step_of(model, accumulator, counted):
    def step(x):
        with accumulator.micro_batch(weight=len(x)):
            accumulator.backward(model(x).square().sum())
        counted.extend(x[:, 0].tolist())
        feed()
    return step


# Memory comes back when the failure is undone, as it does where somebody else ends.
undo = retry.Attempt.undo
def undo_and_feed(attempt):
    feed()
    undo(attempt)
retry.Attempt.undo = undo_and_feed
warnings.simplefilter("error")
warnings.filterwarnings("ignore", category=BatchNormWarning)
"""

PLACES = ["inner", "norm", "outer", "backward of outer", "backward of inner"]

RANDOM = (
    STARVED
    + """
places, dropout = json.loads(sys.argv[2]), sys.argv[3] == "dropout"
rng = np.random.default_rng(len(places))
x = torch.from_numpy(rng.normal(size=(36, 4)))
x[:, 0] = torch.arange(36)
failing = set(rng.choice(9, len(places), replace=False).tolist())
halved = failing if dropout else set()
model, accumulator = make()
calm, undisturbed = make(
    Planned([sum(1 + (number in halved) for number in range(at, at + 3)) for at in (0, 3, 6)])
)
if not dropout:
    for one in (model, calm):
        one.eval()
counted, expected = [], []
step, calm_step = step_of(model, accumulator, counted), step_of(calm, undisturbed, expected)
torch.manual_seed(7)
for number, batch in enumerate(x.split(4)):
    if number in failing:
        model.fails.append(places.pop())
    accumulator.run_or_split(step, batch)
torch.manual_seed(7)
for number, batch in enumerate(x.split(4)):
    for part in batch.split(2) if number in halved else [batch]:  # the same cut, by hand
        calm_step(part)
same = all(a.equal(b) for a, b in zip(model.state_dict().values(), calm.state_dict().values()))
write({
    "same": same, "difference": difference(model, calm), "failures": model.failures,
    "out_of_memory": accumulator.out_of_memory, "counted": sorted(counted) == list(range(36)),
    "last": accumulator.last.weight, "steps": accumulator.last.number,
})
"""
)


@pytest.mark.parametrize("dropout", ["dropout", "none"])
@pytest.mark.parametrize("place", PLACES)
def test_a_failed_allocation_is_undone(place: str, dropout: str, tmp_path: Path) -> None:
    """In forward or backward, four times: each sample counts once, and the steps are the same.

    Without dropout and batch statistics they differ by at most 1e-12 from the uncut run's. With
    them they are, bit for bit, those of a run that was cut so from the start: random numbers and
    buffers of the failed attempt are gone.
    """
    (results,) = run_ranks(RANDOM, tmp_path, 1, json.dumps([place] * 4), dropout)
    assert results["failures"] == results["out_of_memory"] == 4
    assert results["counted"]
    assert (results["steps"], results["last"]) == (3, 12)
    assert results["difference"] <= 1e-12
    assert results["same"] or dropout == "none"


HOPELESS = (
    STARVED.replace("30_000", "300_000")
    + """
model, accumulator = make()
model.eval()
starving = lambda x: (starve(), step_of(model, accumulator, [])(x))
before = [p.clone() for p in model.parameters()]
random = torch.get_rng_state()
try:
    accumulator.run_or_split(starving, torch.zeros(4, 4, dtype=torch.float64))
except SampleTooLargeError as error:
    feed()
    write({
        "text": str(error), "tries": accumulator.out_of_memory,
        "same": all(a.equal(b) for a, b in zip(before, model.parameters())),
        "clean": all(p.grad is None for p in model.parameters()),
        "random": random.equal(torch.get_rng_state()),
    })
"""
)


def test_one_sample_that_does_not_fit(tmp_path: Path) -> None:
    """4, 2 and 1 samples fail: a clear error, and everything is as it was."""
    (results,) = run_ranks(HOPELESS, tmp_path, 1)
    assert "out of memory with one sample" in results.pop("text")
    assert results == {"tries": 3, "same": True, "clean": True, "random": True}


RANKS = (
    STARVED
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, how = sys.argv[1:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model, accumulator = make()
calm, undisturbed = make()
for one in (model, calm):
    one.eval()
ddp, calm_ddp = DistributedDataParallel(model), DistributedDataParallel(calm)
accumulator = GradAccumulator(torch.optim.AdamW(ddp.parameters()), ddp, steps=3)
undisturbed = GradAccumulator(torch.optim.AdamW(calm_ddp.parameters()), calm_ddp, steps=3)
x = torch.from_numpy(np.random.default_rng(rank).normal(size=(36, 4)))
counted = []
step, calm_step = step_of(ddp, accumulator, counted), step_of(calm_ddp, undisturbed, [])
told = {}
try:
    for number, batch in enumerate(x.split(4)):
        if rank == 1 and number in (1, 5):
            model.fails.append("backward of outer" if number == 1 else "norm")
        if rank == 1 and how == "hopeless" and number == 4:
            accumulator.run_or_split(lambda x: (starve(), step(x)), batch)
        accumulator.run_or_split(step, batch)
        calm_step(batch)
    told["difference"] = difference(ddp, calm_ddp)
except SampleTooLargeError as error:
    feed()
    told["error"] = str(error)
told["counted"], told["out_of_memory"] = len(counted), accumulator.out_of_memory
write(told)
"""
)


@pytest.mark.distributed
def test_one_rank_alone_runs_out_of_memory(tmp_path: Path) -> None:
    """Its parts are one micro-batch to the others: same steps, same parameters."""
    results = run_ranks(RANKS, tmp_path, 2, "twice")
    assert [one["counted"] for one in results] == [36, 36]
    assert [one["out_of_memory"] for one in results] == [0, 2]
    assert max(one["difference"] for one in results) <= 1e-12


@pytest.mark.distributed
def test_one_rank_that_gives_up_takes_the_others_along(tmp_path: Path) -> None:
    """No rank waits for ever for one that has failed."""
    results = run_ranks(RANKS, tmp_path, 2, "hopeless")
    assert "on another rank" in results[0]["error"]
    assert "with one sample" in results[1]["error"]


def test_other_errors_are_let_through_and_undone() -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=2)

    def step(data: Data) -> None:
        with accumulator.micro_batch(weight=data.weight):
            accumulator.backward(loss_sum(model, data))
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        accumulator.run_or_split(step, Data.make(4))
    assert all(p.grad is None for p in model.parameters())
    assert accumulator.state_dict()["micro_batches"] == 0


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
    assert accumulator.state_dict()["weight"] == 2
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
    assert accumulator.state_dict()["weight"] == 0


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
