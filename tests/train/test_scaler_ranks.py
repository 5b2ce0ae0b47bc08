"""A gradient scaler over several ranks: what any of them has decides for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.train.test_accumulator_ranks import COMMON

WEIGHTS = (
    COMMON
    + """
from torchbudget.errors import OptionError
from torchbudget.train import step as step_module
from tests.support.reads import Reads, sgd

kind = name = "CNN"
models = [DistributedDataParallel(make_model(name)) for _ in range(2)]
scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
tensors, numbers = (
    GradAccumulator(sgd(model), model, steps=2, scaler=scaler, max_norm=0.1)
    for model, scaler in zip(models, scalers, strict=True)
)
step_module.waits = lambda _: True
told = []
for seed in range(6):
    data = Data.make(4, seed + rank)
    # One rank has numbers, and the other tensors.
    weight = torch.tensor(data.weight) if rank else data.weight
    # Infinite on one rank alone: no rank steps.
    factor = float("inf") if rank and seed == 2 else 1.0
    with Reads() as reads, tensors.micro_batch(weight):
        tensors.backward(loss_sum(models[0], data) * factor)
    told.append(reads.names)
    with numbers.micro_batch(data.weight):
        numbers.backward(loss_sum(models[1], data) * factor)
    assert str(tensors.last) == str(numbers.last)
    assert seed < 1 or tensors.last.skipped == (seed in (3, 4))
assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
said = []
for wrong in (-1e6, float("nan"), float("inf")):
    try:
        with tensors.micro_batch(torch.tensor(wrong if rank else 5.0), last=True):
            tensors.backward(loss_sum(models[0], data))
    except OptionError as error:
        said.append("numbers of at least 0" in str(error))
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
model = DistributedDataParallel(make_model(name))
late = GradAccumulator(sgd(model), model, scaler=scaler)
if rank:
    late.step()  # without any micro-batch, so that this scaler has no scale yet
else:
    with late.micro_batch(data.weight, last=True):
        late.backward(loss_sum(model, data))
finish([told, said, late.last.skipped])
"""
)


@pytest.mark.distributed
def test_weights_on_the_devices_of_ranks(tmp_path: Path) -> None:
    """One read a step beside the sum on the host; an error of one rank is raised on all."""
    assert run_ranks(WEIGHTS, tmp_path, 2) == 2 * [[[[], ["tolist"] * 2] * 3, [True] * 3, False]]


ONE_SHARD = (
    COMMON
    + """
from torch import nn
from tests.support.reads import sgd

model = nn.Sequential(nn.Embedding(4, 3))
fully_shard(model)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
accumulator = GradAccumulator(sgd(model), model, steps=1, scaler=scaler)
before = model[0].weight.full_tensor().detach().clone()
for wrong in (float("nan"), float("inf")):
    with accumulator.micro_batch(weight=2):
        rows = model(torch.tensor([0, 3]))
        accumulator.backward((rows * torch.tensor([[1.0], [wrong]])).sum())
finite = bool(model[0].weight.full_tensor().isfinite().all())
same = bool(torch.equal(model[0].weight.full_tensor(), before))
finish([accumulator.last.skipped, same, finite, scaler.get_scale()])
"""
)


@pytest.mark.distributed
def test_what_is_wrong_on_one_rank_alone_lets_all_skip(tmp_path: Path) -> None:
    """Row 3 of an embedding lies on rank 1: what rank 0 has of the gradient is finite."""
    assert run_ranks(ONE_SHARD, tmp_path, 2) == 2 * [[True, True, True, 2.0]]


SHARDED = (
    COMMON
    + """
from torch import nn
from tests.support.reads import Reads

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
model.load_state_dict(plain.state_dict())
fully_shard(model)
theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accumulator = GradAccumulator(optimizer, model, steps=1, scaler=scaler, max_norm=0.5)
skipped, reads_of_steps = [], []
for seed in range(5):
    torch.manual_seed(seed)
    data = torch.randn(2 * ranks, 4)
    mine = data[2 * rank : 2 * rank + 2]
    # Of one rank's part of the batch.
    factor = float("nan") if rank and seed == 2 else 1.0
    with Reads() as reads, accumulator.micro_batch(weight=2):
        accumulator.backward(model(mine).square().sum() * factor)
    skipped.append(accumulator.last.skipped)
    if seed != 2:
        (plain(data).square().sum() / len(data)).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
worst = 0.0
for one, other in zip(model.parameters(), plain.parameters(), strict=True):
    worst = max(worst, (one.full_tensor() - other).abs().max().item())
local = [one.to_local().numel() for one in model.parameters()]
finish([skipped, worst, min(local), scaler.get_scale()])
"""
)


@pytest.mark.distributed
def test_a_scaler_over_shards_of_which_some_are_empty(tmp_path: Path) -> None:
    """A bias of one element lies on one of two ranks; the steps are those of the whole model."""
    found = run_ranks(SHARDED, tmp_path, 2)
    assert [skipped for skipped, *_ in found] == 2 * [[False, False, True, False, False]]
    assert max(worst for _, worst, *_ in found) < 1e-6
    assert [least for _, _, least, _ in found] == [1, 0]
    assert [scale for *_, scale in found] == [4, 4]
