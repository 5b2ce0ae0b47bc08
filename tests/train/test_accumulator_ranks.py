"""The accumulated step over real ranks is the large batch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks, torchrun

COMMON = """
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.large_steps import OPTIMIZERS, Data, difference, large_step, loss_sum, make_model
from torchbudget import GradAccumulator

warnings.simplefilter("error")
warnings.filterwarnings("ignore", module="torch")
folder, *arguments = sys.argv[1:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def finish(told):
    Path(folder, f"{rank}.json").write_text(json.dumps(told))


def whole(model):
    "A plain model of the same weights."
    if kind != "fsdp":
        return getattr(model, "module", model)
    plain = make_model(name)
    with torch.no_grad():
        for mine, sharded in zip(plain.parameters(), model.parameters(), strict=True):
            mine.copy_(sharded.full_tensor())
    return plain
"""

STEPS = (
    COMMON
    + """
kind, name, optimizer, norm = arguments
max_norm = float(norm) or None
large = make_model(name)
theirs = OPTIMIZERS[optimizer](large.parameters())
model = make_model(name)
if kind == "ddp":
    model = DistributedDataParallel(model)
if kind == "fsdp":
    fully_shard(model)
mine = OPTIMIZERS[optimizer](model.parameters())
accumulator = GradAccumulator(mine, model, max_norm=max_norm)

reduced = []
all_reduce = dist.all_reduce
def counting(tensor, *args, **kwargs):
    reduced.append(tensor.numel())
    return all_reduce(tensor, *args, **kwargs)
dist.all_reduce = counting

rng = np.random.default_rng(5)
worst, collectives, losses = 0.0, [], []
for number in range(5):
    data = Data.make(40, seed=number)
    large_step(large, theirs, data, max_norm)
    parts = 3 * ranks
    cut = np.sort(rng.choice(np.arange(1, 40), parts - 1, replace=False))
    pieces = np.split(rng.permutation(40), cut)  # of unequal numbers of samples
    if kind == "fsdp":
        mine_now = pieces[rank::ranks]
    else:  # unequal numbers of micro-batches, and none at all
        owner = rng.integers(ranks, size=parts)
        if number == 2:
            owner[owner == 1] = 0
        mine_now = [piece for piece, whose in zip(pieces, owner) if whose == rank]
    reduced.clear()
    for place, rows in enumerate(mine_now):
        piece = data[torch.from_numpy(rows)]
        with accumulator.micro_batch(weight=piece.weight, last=place == len(mine_now) - 1):
            accumulator.backward(loss_sum(model, piece))
    if not mine_now:
        accumulator.step()
    assert accumulator.stepped and accumulator.last.weight == data.weight
    assert accumulator.last.micro_batches == parts
    collectives.append(list(reduced))
    worst = max(worst, difference(whole(model), large))
trained = sum(p.numel() for p in large.parameters() if p.requires_grad)
if name == "frozen":
    trained -= sum(p.numel() for p in large.unused.parameters())
finish([worst, collectives, trained])
"""
)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "kind", "name", "optimizer", "norm"),
    [
        (2, "plain", "transformer", "AdamW", 0.1),
        (3, "ddp", "LSTM", "AdamW", 0),
        (4, "ddp", "tied", "SGD", 0.1),
        (2, "ddp", "frozen", "AdamW", 0),
        (2, "fsdp", "transformer", "AdamW", 0.1),
        (3, "fsdp", "CNN", "SGD", 0),
    ],
)
def test_five_steps_over_ranks(
    ranks: int, kind: str, name: str, optimizer: str, norm: float, tmp_path: Path
) -> None:
    """Uneven cuts and weights, uneven numbers of micro-batches, a rank without data: at most 1e-12.

    Gradients are reduced once a step: each element in one collective, beside one of a few numbers.
    """
    start = torchrun if name == "frozen" else run_ranks
    results = start(STEPS, tmp_path, ranks, kind, name, optimizer, norm)
    assert max(worst for worst, _, _ in results) <= 1e-12
    if kind == "fsdp":
        return
    for _, collectives, trained in results:
        for numbers, *gradients in collectives:
            assert sum(gradients) == trained + 2  # the loss, and weights that are on a device
            assert numbers <= 100


UNEVEN = (
    COMMON
    + """
kind, name = "ddp", "CNN"
model = DistributedDataParallel(make_model("CNN"))
large = make_model("CNN")
accumulator = GradAccumulator(OPTIMIZERS["SGD"](model.parameters()), model, steps=2)
theirs = OPTIMIZERS["SGD"](large.parameters())
numbers = [3 + 2 * one for one in range(ranks)]  # 3, 5, 7 micro-batches
data = Data.make(5 * sum(numbers))
pieces = {}
for one, number in enumerate(numbers):
    for place in range(number):
        pieces[one, place] = 5 * (sum(numbers[:one]) + place)
for step in range(4):
    rows = [r for (_, place), at in pieces.items() if place // 2 == step for r in range(at, at + 5)]
    large_step(large, theirs, data[rows])

for place in range(numbers[rank]):
    at = pieces[rank, place]
    piece = data[list(range(at, at + 5))]
    with accumulator.micro_batch(weight=piece.weight):
        accumulator.backward(loss_sum(model, piece))
accumulator.flush()
finish([difference(model.module, large), accumulator.last.number])
"""
)


@pytest.mark.distributed
def test_ranks_that_end_early(tmp_path: Path) -> None:
    """Ranks with 3, 5 and 7 micro-batches take four steps together; none waits for ever."""
    results = run_ranks(UNEVEN, tmp_path, 3)
    assert max(worst for worst, _ in results) <= 1e-12
    assert [steps for _, steps in results] == [4, 4, 4]


PLANNED = (
    COMMON
    + """
from torch.utils.data import DataLoader
from torchbudget import MemoryBudgetBatchSampler, PaddedCost

kind = name = "CNN"
data = Data.make(90)
lengths = (data.y != -100).sum(1).numpy()
sampler = MemoryBudgetBatchSampler(lengths, PaddedCost(unit_bytes=1), 12, samples_per_step=30)
model = DistributedDataParallel(make_model("CNN"))
accumulator = GradAccumulator(OPTIMIZERS["SGD"](model.parameters()), model, steps=sampler)
large = make_model("CNN")
theirs = OPTIMIZERS["SGD"](large.parameters())
worst, held = 0.0, []
for epoch in range(2):
    for rows in DataLoader(range(90), batch_sampler=sampler, collate_fn=list, num_workers=1):
        piece = data[rows]
        held += rows
        with accumulator.micro_batch(weight=piece.weight):
            accumulator.backward(loss_sum(model, piece))
        if accumulator.stepped:
            everybody = [None] * ranks
            dist.all_gather_object(everybody, held)
            large_step(large, theirs, data[sum(everybody, [])])
            worst, held = max(worst, difference(model.module, large)), []
    accumulator.flush()
finish([worst, accumulator.last.number])
"""
)


@pytest.mark.distributed
def test_the_samplers_plan_over_ranks(tmp_path: Path) -> None:
    """A sampler in a DataLoader with workers on each of three ranks: three exact steps an epoch."""
    for worst, steps in run_ranks(PLANNED, tmp_path, 3):
        assert worst <= 1e-12
        assert steps == 6


BUFFERS = (
    COMMON
    + """
from torchbudget.errors import BatchNormWarning, UnsynchronizedWarning

kind = name = ""
warnings.simplefilter("always")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
ddp = DistributedDataParallel(model)
accumulator = GradAccumulator(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, steps=2)
with warnings.catch_warnings(record=True) as seen:
    for number in range(2):
        with accumulator.micro_batch(weight=4):
            accumulator.backward(ddp(torch.randn(4, 3) + rank).square().sum())
told = [w.category.__name__ for w in seen if "torchbudget" in w.category.__module__]
mean = model[1].running_mean.tolist()
with warnings.catch_warnings(record=True) as seen:
    ddp(torch.randn(4, 3)).sum().backward()
told += [w.category.__name__ for w in seen if "torchbudget" in w.category.__module__]
finish([told, mean])
"""
)


@pytest.mark.distributed
def test_buffers_and_a_forward_outside(tmp_path: Path) -> None:
    """Buffers are copied from rank 0 after a step; a DDP forward outside is noticed."""
    results = run_ranks(BUFFERS, tmp_path, 2)
    for categories, mean in results:
        assert categories == ["BatchNormWarning", "UnsynchronizedWarning"]
        assert mean == results[0][1]


OTHER_DTYPE = (
    COMMON
    + """
used, rare = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
rare.grad_dtype = torch.float64
accumulator = GradAccumulator(torch.optim.SGD([used, rare], lr=0.5, foreach=False), steps=1)
with accumulator.micro_batch(weight=1):
    loss = used.sum() * (rank + 1)
    if not rank:
        loss = loss + rare.sum() * 7
    accumulator.backward(loss)
finish([used.tolist(), rare.tolist()])
"""
)


@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="comes with torch 2.10")
def test_gradients_of_another_dtype_than_their_parameter(tmp_path: Path) -> None:
    """A rank that has none sums zeros of the same dtype: buffers of ranks have to match."""
    for used, rare in run_ranks(OTHER_DTYPE, tmp_path, 2):
        assert used == [1 - 0.5 * (1 + 2) / 2] * 3
        assert rare == [1 - 0.5 * 7 / 2] * 3
