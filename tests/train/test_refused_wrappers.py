"""DDP and FSDP2 as users set them up: what cannot be exact is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.train.test_accumulator_ranks import COMMON

REFUSED = (
    COMMON
    + """
from torch import nn
from torchbudget.errors import OptionError, StateError, StepError

kind, name = "fsdp", "transformer"
told = []


def refused(make, error=OptionError):
    try:
        make()
    except error as refusal:
        told.append(str(refusal))
    else:
        told.append("")


sharded = make_model(name)
fully_shard(sharded)
optimizer = OPTIMIZERS["SGD"](sharded.parameters())
refused(lambda: GradAccumulator(optimizer, sharded, samples=8))
refused(lambda: GradAccumulator(optimizer, sharded, weight=8))
refused(lambda: GradAccumulator(optimizer))
refused(lambda: GradAccumulator(optimizer, sharded, group=dist.new_group([rank],
    use_local_synchronization=True)))
accumulator = GradAccumulator(optimizer, sharded, steps=2)
data = Data.make(4)
with accumulator.micro_batch(weight=data.weight):
    accumulator.backward(loss_sum(sharded, data))
refused(accumulator.state_dict, StepError)
plain = make_model(name)
other = GradAccumulator(OPTIMIZERS["SGD"](plain.parameters()), plain, steps=2)
with other.micro_batch(weight=data.weight):
    other.backward(loss_sum(plain, data))
state = other.state_dict()
refused(lambda: accumulator.load_state_dict(state), StateError)
with accumulator.micro_batch(weight=data.weight):
    accumulator.backward(loss_sum(sharded, data))
assert accumulator.state_dict()["steps"] == 1


def half():
    model = make_model(name).bfloat16()
    fully_shard(model)
    accumulator = GradAccumulator(OPTIMIZERS["SGD"](model.parameters()), model, mean=True)
    with accumulator.micro_batch(weight=257, last=True):
        accumulator.backward(model(data.x).mean())


def hooked():
    ddp = DistributedDataParallel(make_model(name))
    ddp.register_comm_hook(None, lambda state, bucket: None)
    GradAccumulator(OPTIMIZERS["SGD"](ddp.parameters()), ddp)


def static():
    ddp = DistributedDataParallel(make_model(name), static_graph=True)
    GradAccumulator(OPTIMIZERS["SGD"](ddp.parameters()), ddp)


def resumed(accumulator, steps):
    "As of another run, between steps."
    accumulator.load_state_dict({**accumulator.state_dict(), "steps": steps})
    return accumulator


def bare(given, steps=0):
    ddp = DistributedDataParallel(make_model(name))
    accumulator = GradAccumulator(OPTIMIZERS["SGD"](ddp.parameters()), given(ddp), steps=2)
    resumed(accumulator, steps)
    with torch.no_grad():
        ddp(data.x)  # outside of a micro-batch it may run
    with accumulator.micro_batch(weight=data.weight):
        accumulator.backward(loss_sum(ddp, data))


def late(steps=0):
    ddp = DistributedDataParallel(make_model(name))
    accumulator = resumed(GradAccumulator(OPTIMIZERS["SGD"](ddp.parameters()), ddp), steps)
    ddp.register_comm_hook(None, lambda state, bucket: None)
    with accumulator.micro_batch(weight=data.weight):
        accumulator.backward(loss_sum(ddp, data))


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = make_model(name)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    GradAccumulator(optimizer, model)


refused(half)
synchronized = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.SyncBatchNorm(2))
optimizer = OPTIMIZERS["SGD"](synchronized.parameters())
refused(lambda: GradAccumulator(optimizer, synchronized).run_or_split(print, torch.ones(2, 2)))
refused(static)
refused(hooked)
for steps in (0, 3):
    refused(lambda: late(steps))
    refused(lambda: bare(lambda ddp: ddp.module, steps))
    refused(lambda: bare(lambda ddp: (), steps))
refused(zero)
halves = [dist.new_group(ranks) for ranks in ([0], [1])]
modules = [DistributedDataParallel(make_model(name), process_group=group)
    for group in (halves[rank], None)]
parameters = [p for module in modules for p in module.parameters()]
refused(lambda: GradAccumulator(torch.optim.SGD(parameters, lr=0.1), modules))
finish(told)
"""
)

SAID = [
    "fully_shard every rank must know the step's last micro-batch",
    "fully_shard every rank must know the step's last micro-batch",
    "DTensor over ranks that share a step",
    "reduces gradients over 2 ranks, but 1 share a step",
    "save between steps",
    "others than are sharded here",
    "compute it in float32",
    "tensor parallelism and SyncBatchNorm",
    "static_graph=True",
    "communication hook",
    *["communication hook", "pass the wrapped one", "pass the wrapped one"] * 2,
    "ZeroRedundancyOptimizer",
    "distributed over different ranks",
]


@pytest.mark.distributed
def test_what_cannot_be_exact_is_refused_by_name(tmp_path: Path) -> None:
    """At construction, or at the first micro-batch where only that can know; no rank waits."""
    for told in run_ranks(REFUSED, tmp_path, 2):
        assert len(told) == len(SAID)
        for text, said in zip(told, SAID, strict=True):
            assert said in text
