"""Cases of accumulated steps over ranks, by their names; each returns what it found."""

import random
import warnings
from collections import Counter
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.support.accumulation import Accumulation
from tests.support.large_steps import (
    OPTIMIZERS,
    Data,
    accumulate,
    difference,
    large_step,
    loss_sum,
    make_model,
    parts_of,
    sgd,
)
from tests.support.rank_scripts import error_of, join
from tests.support.reads import Reads
from torchbudget import (
    GradAccumulator,
    joint_backward,
    memory_summary,
)
from torchbudget.errors import ForeignStepWarning
from torchbudget.train import step as step_module

rank, ranks = join()


def cases(*names: str) -> dict[str, Any]:
    """What each of the cases below found."""
    return {name: globals()[name]() for name in names}


# ---------------------------------------------------------------------- DDP and plain modules


def joined(pieces: list[Data]) -> Data:
    return Data(torch.cat([one.x for one in pieces]), torch.cat([one.y for one in pieces]))


def early() -> Any:
    """Ranks have 3, 5 and 7 micro-batches, and take four steps together."""
    model, large = DistributedDataParallel(make_model("CNN")), make_model("CNN")
    accumulator, theirs = GradAccumulator(sgd(model), model, steps=2), sgd(large)
    pieces = [[Data.make(5, 9 * one + at) for at in range(3 + 2 * one)] for one in range(ranks)]
    for step in range(4):
        mine = slice(2 * step, 2 * step + 2)
        large_step(large, theirs, joined([one for of_rank in pieces for one in of_rank[mine]]))
    accumulate(accumulator, model, pieces[rank])
    accumulator.flush()
    return difference(model.module, large), accumulator.last.number


def buffers() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ddp = DistributedDataParallel(model)
    accumulator = GradAccumulator(torch.optim.SGD(ddp.parameters(), lr=0.1), ddp, steps=2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            with accumulator.micro_batch(weight=4):
                accumulator.backward(ddp(torch.randn(4, 3) + rank).square().sum())
        ddp(torch.randn(4, 3)).sum().backward()
    told = [one.category.__name__ for one in seen if "torchbudget" in one.category.__module__]
    return told, model[1].running_mean.tolist()


def other_dtype() -> Any:
    used, rare = (nn.Parameter(torch.ones(3)) for _ in range(2))
    rare.grad_dtype = torch.float64
    accumulator = GradAccumulator(torch.optim.SGD([used, rare], lr=0.5, foreach=False), steps=1)
    with accumulator.micro_batch(weight=1):
        loss = used.sum() * (rank + 1)
        accumulator.backward(loss if rank else loss + rare.sum() * 7)
    return used.tolist(), rare.tolist()


def players() -> Any:
    """Each accumulator of two is given both modules; a forward outside of both is noticed."""
    torch.manual_seed(0)
    made = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
    both = [GradAccumulator(sgd(one), made, steps=1) for one in made]
    x = torch.ones(2, 2)
    calls = (lambda: made[1](made[0](x)), lambda: made[1](x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="torch")
        for _ in range(2 + rank):  # ranks may have unequal numbers of micro-batches
            for player, called in zip(both, calls, strict=True):
                for one in made:
                    one.zero_grad()
                with player.micro_batch(weight=2):
                    player.backward(called().sum())
    with warnings.catch_warnings(record=True) as seen:
        made[1](x)
    for player in both:
        player.flush()
    return [one.category.__name__ for one in seen]


class Own(nn.Module):
    """A part that each rank has for itself, as DDP is told."""

    _ddp_params_and_buffers_to_ignore = ("own", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model("CNN")
        self.own = nn.Parameter(torch.tensor(1.0 + rank, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(float(rank)))
        self.register_buffer("shared", torch.tensor(float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.own


def subgroups() -> Any:
    """DDP joins two of four ranks."""
    groups = [dist.new_group(one) for one in ([0, 1], [2, 3])]
    half, place = divmod(rank, 2)
    model = Own()
    ddp = DistributedDataParallel(model, process_group=groups[half])
    model.shared += rank  # after DDP's own broadcast
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    said = error_of(lambda: GradAccumulator(optimizer, ddp))
    accumulator = GradAccumulator(optimizer, ddp, steps=1, group=groups[half])
    pieces = [Data.make(4, seed=10 * half + one) for one in range(2)]  # of the ranks of this half
    large, weight = make_model("CNN"), sum(piece.weight for piece in pieces)
    owns = [
        nn.Parameter(torch.tensor(1.0 + 2 * half + one, dtype=torch.float64)) for one in range(2)
    ]
    pairs = zip(owns, pieces, strict=True)
    losses = [loss_sum(lambda x, own=own: large(x) * own, piece) for own, piece in pairs]
    (sum(losses) / weight).backward()
    torch.optim.SGD([*large.parameters(), *owns], lr=0.1).step()
    accumulate(accumulator, ddp, [pieces[place]])
    worst = max(difference(model.inner, large), abs(model.own.item() / owns[place].item() - 1))
    skipping = GradAccumulator(optimizer, ddp, steps=1, group=groups[half], skip_nonfinite=True)
    with skipping.micro_batch(weight=1):  # one rank's own parameter lets all of its group skip
        loss = loss_sum(ddp, pieces[place])
        skipping.backward(loss + (model.own * float("nan") if place else 0))
    return said, worst, model.seen.item(), model.shared.item(), skipping.last.skipped


# ---------------------------------------------------------------------- shards and meshes


def raised() -> Any:
    """A micro-batch raises after its backward, where FSDP has its gradients in another dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    large, model = make_model("transformer"), make_model("transformer")
    fully_shard(model, mp_policy=policy)
    accumulator, data = GradAccumulator(sgd(model), model, steps=2), Data.make(8)
    with warnings.catch_warnings(), suppress(KeyError):
        warnings.simplefilter("ignore", ForeignStepWarning)
        with accumulator.micro_batch(weight=1):
            accumulator.backward(loss_sum(model, data))
            raise KeyError
    accumulate(accumulator, model, parts_of(data[4 * rank : 4 * rank + 4], 2))
    large_step(large, sgd(large), data)
    return difference(model, large)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel() -> Any:
    """Tensors are parallel over two ranks; data over two, plain or with FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    found: list[Any] = []
    for kind in ("fsdp", "plain"):
        large, model = Block().double(), Block().double()
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(model, mesh["tensor"], plan)
        layouts = {"input_layouts": Replicate(), "desired_input_layouts": Shard(1)}
        parallelize_module(model, mesh["tensor"], PrepareModuleInput(**layouts))
        if kind == "fsdp":
            fully_shard(model, mesh=mesh["data"])
        theirs, mine = (OPTIMIZERS["AdamW"](one.parameters()) for one in (large, model))
        found.append(error_of(lambda mine=mine, model=model: GradAccumulator(mine, model)))
        group = mesh.get_group("data")
        options = {"max_norm": 0.1, "skip_nonfinite": True}
        accumulator = GradAccumulator(mine, model, group=group, **options)
        place, worst = mesh.get_local_rank("data"), 0.0
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(6, 4, 8, dtype=torch.float64, generator=generator)
            theirs.zero_grad()
            (large(x).square().sum() / len(x)).backward()
            norm = nn.utils.clip_grad_norm_(large.parameters(), 0.1).item()
            theirs.step()
            pieces = [x[:4]] if place else [x[4:]]
            if number == 2 and kind == "plain":
                pieces = [] if place else [x[:1], x[1:3], x[3:]]  # a rank without data
            for count, piece in enumerate(pieces, 1):
                with accumulator.micro_batch(weight=len(piece), last=count == len(pieces)):
                    accumulator.backward(model(piece).square().sum())
            if not pieces:
                accumulator.step()
            worst = max(worst, difference(model, large))
            worst = max(worst, abs(accumulator.last.gradient_norm / norm - 1))
        found.append(worst)
    if mesh.get_local_rank("tensor"):  # what is not finite in its part lets the others skip
        model.up.weight.register_hook(lambda one: one * float("nan"))
    with accumulator.micro_batch(weight=1, last=True):
        accumulator.backward(model(x).sum())
    return [*found, accumulator.last.skipped]


def summary() -> Any:
    plain, model = make_model("transformer"), make_model("transformer")
    fully_shard(model)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    mine, whole = memory_summary(model, optimizer).total, memory_summary(plain).total
    shards = sum(p.to_local().nbytes for p in model.parameters())
    states = 2 * shards + 4 * len(list(model.parameters()))  # and a count for each
    return [
        mine.parameters == whole.parameters,
        shards <= mine.weight_bytes < 0.7 * whole.weight_bytes,
        (mine.gradient_bytes, mine.optimizer_bytes) == (shards, states),
    ]


# ---------------------------------------------------------------------- reads


def reads() -> Any:
    """What steps read, without a scaler, and with one where rank 1's weights are on a device."""
    told: list[Any] = []
    for options in ({}, {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}):
        ddp = DistributedDataParallel(make_model("CNN"))
        accumulator = GradAccumulator(sgd(ddp), ddp, steps=2, max_norm=0.1, **options)
        with mock.patch.object(step_module, "waits", return_value=bool(options)):
            for seed in range(4):
                data = Data.make(4, seed + rank)
                weight = torch.tensor(data.weight) if rank and options else data.weight
                with Reads() as seen, accumulator.micro_batch(weight):
                    accumulator.backward(loss_sum(ddp, data))
                told.append(seen.names)

            def wrong() -> None:
                with accumulator.micro_batch(torch.tensor(-1e6 if rank else 5.0), last=True):  # noqa: B023
                    accumulator.backward(loss_sum(ddp, data))  # noqa: B023

            said = error_of(wrong) if options else ""
    return told, said


# ---------------------------------------------------------------------- refusals and joint losses


def refused() -> Any:
    data, told = Data.make(4), []

    def made(**options: Any) -> tuple[nn.Module, Any]:
        ddp = DistributedDataParallel(make_model("CNN"), **options)
        return ddp, sgd(ddp)

    sharded = make_model("transformer")
    fully_shard(sharded)
    optimizer = sgd(sharded)
    alone = dist.new_group([rank], use_local_synchronization=True)
    told += [
        error_of(lambda options=options: GradAccumulator(optimizer, sharded, **options))
        for options in ({"samples": 8}, {"weight": 8}, {"group": alone})
    ]
    told.append(error_of(lambda: GradAccumulator(optimizer)))
    accumulator = GradAccumulator(optimizer, sharded, steps=2)
    accumulate(accumulator, sharded, [data])
    told.append(error_of(accumulator.step))
    accumulate(accumulator, sharded, [data])
    joined = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    synchronized = GradAccumulator(sgd(joined), joined)
    told.append(error_of(lambda: synchronized.run_or_split(print, torch.ones(2, 2))))
    ddp, optimizer = made(static_graph=True)
    told.append(error_of(lambda: GradAccumulator(optimizer, ddp)))
    ddp, optimizer = made()
    late = GradAccumulator(optimizer, ddp)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        raise AssertionError(state, bucket)

    ddp.register_comm_hook(None, hook)
    told.append(error_of(lambda: accumulate(late, ddp, [data])))
    for given in (lambda ddp: ddp.module, lambda _: ()):
        ddp, optimizer = made()
        accumulator = GradAccumulator(optimizer, given(ddp), steps=2)
        with torch.no_grad():
            ddp(data.x)  # outside of a micro-batch it may run
        told.append(error_of(lambda ddp=ddp, bare=accumulator: accumulate(bare, ddp, [data])))
    return told


def joint() -> Any:
    """Representations of all ranks, and a temperature, whose gradient is counted once."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.Linear(3, 2).double()
            self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

        def forward(self, x: Tensor) -> Any:
            return self.inner(x), self.scale.exp()

    def contrast(both: Any) -> Tensor:
        z, scale = both
        return (z @ z.T * scale).logsumexp(1).mean()

    x = torch.randn(4 * ranks + 1, 3, dtype=torch.float64, generator=torch.manual_seed(1))
    large, model = Scaled(), Scaled()
    contrast(large(x)).backward()
    theirs, mine = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (large, model))
    theirs.step()
    accumulator = GradAccumulator(mine, model)
    rows = x[4 * rank :] if rank == ranks - 1 else x[4 * rank : 4 * rank + 4]
    joint_backward(model, rows.split(3), contrast, accumulator)
    found: list[Any] = [difference(model, large)]

    def of_rank(batch: Tensor) -> Any:
        return model.inner(batch)[:, : rank + 1], 0.5

    found.append(error_of(lambda: joint_backward(of_rank, [rows], contrast, accumulator)))
    if rank:
        with accumulator.micro_batch(weight=1):
            accumulator.backward(model.inner(rows).sum())
    found.append(error_of(lambda: joint_backward(model, [rows], contrast, accumulator)))
    accumulator.step()
    return found


# ---------------------------------------------------------------------- random steps


def random_steps(first: str, number: str) -> list[str]:
    """The faults of some cases, which hold on all ranks."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    wrappings = ["plain", "ddp", "subgroup", "fsdp", "inner fsdp"] + ["hybrid"] * (ranks == 4)
    everybody, told = dist.new_group(range(ranks)), Counter[str]()
    with mock.patch.object(step_module, "waits", return_value=True):
        for one in range(int(first), int(first) + int(number)):
            wrapping = wrappings[one % len(wrappings)]
            told += Accumulation(random.Random(one), wrapping, rank, ranks, everybody).check()
    return [name.removeprefix("fault: ") for name in told if name.startswith("fault: ")]
