"""Cases of accumulated steps over ranks, by their names; each returns what it found."""

import copy
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
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
from torch.utils.data import DataLoader

from tests.support.large_steps import OPTIMIZERS, Data, large_step, loss_sum, make_model
from tests.support.reads import Reads
from torchbudget import (
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PaddedCost,
    joint_backward,
    memory_summary,
)
from torchbudget.errors import ForeignStepWarning, TorchBudgetError
from torchbudget.train import step as step_module
from torchbudget.train.gradients import GradientSums

folder, names = Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
everybody = dist.new_group(range(ranks))
SGD = OPTIMIZERS["SGD"]


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((full(a) - b).detach().norm() / (b.detach().norm() + 1e-30)) for a, b in pairs)


def piece_of(data: Data, start: int, size: int) -> Data:
    return data[list(range(start, start + size))]


def take(accumulator: GradAccumulator, model: Any, piece: Data, **options: Any) -> None:
    with accumulator.micro_batch(weight=piece.weight, **options):
        accumulator.backward(loss_sum(model, piece))


def error_of(act: Callable[[], object]) -> str:
    try:
        act()
    except TorchBudgetError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------------- DDP and plain modules


def early() -> Any:
    """Ranks have 3, 5 and 7 micro-batches, and take four steps together."""
    model, large = DistributedDataParallel(make_model("CNN")), make_model("CNN")
    accumulator = GradAccumulator(SGD(model.parameters()), model, steps=2)
    theirs, data = SGD(large.parameters()), Data.make(75)
    starts = {0: 0, 1: 3, 2: 8}
    for step in range(4):
        rows = [
            row
            for one, start in starts.items()
            for place in range(2 * step, min(2 * step + 2, 3 + 2 * one))
            for row in range(5 * (start + place), 5 * (start + place) + 5)
        ]
        large_step(large, theirs, data[rows])
    for place in range(3 + 2 * rank):
        take(accumulator, model, piece_of(data, 5 * (starts[rank] + place), 5))
    accumulator.flush()
    return distance(model.module, large), accumulator.last.number


def planned() -> Any:
    """A sampler in a DataLoader with workers plans three steps an epoch."""
    data = Data.make(90)
    lengths = (data.y != -100).sum(1).numpy()
    sampler = MemoryBudgetBatchSampler(lengths, PaddedCost(unit_bytes=1), 12, samples_per_step=30)
    model, large = DistributedDataParallel(make_model("CNN")), make_model("CNN")
    accumulator = GradAccumulator(SGD(model.parameters()), model, steps=sampler)
    theirs, worst, held = SGD(large.parameters()), 0.0, []
    for rows in DataLoader(range(90), batch_sampler=sampler, collate_fn=list, num_workers=1):
        held += rows
        take(accumulator, model, data[rows])
        if accumulator.stepped:
            parts: list[Any] = [None] * ranks
            dist.all_gather_object(parts, held)
            large_step(large, theirs, data[[row for part in parts for row in part]])
            worst, held = max(worst, distance(model.module, large)), []
    return worst, accumulator.last.number


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
    both = [GradAccumulator(SGD(one.parameters()), made, steps=1) for one in made]
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
    take(accumulator, ddp, pieces[place])
    worst = max(distance(model.inner, large), abs(model.own.item() / owns[place].item() - 1))
    return said, worst, model.seen.item(), model.shared.item()


def given_up() -> Any:
    """A sample does not fit on rank 1, or it has no room for zeros, or its batch is changed."""
    found = []
    for fault in ("sample", "sum", "batch"):
        model, large = DistributedDataParallel(make_model("CNN")), make_model("CNN")
        accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=2)

        def step(batch: Any, *, fails: bool = True, fault: str = fault) -> None:
            if rank and fails and fault == "batch":
                batch["x"].clamp_(max=3)
            with accumulator.micro_batch(weight=Data(**batch).weight):  # noqa: B023
                accumulator.backward(loss_sum(model, Data(**batch)))  # noqa: B023
                if rank and fails and fault == "sample":
                    raise MemoryError

        data = Data.make(4 * ranks, 3)
        mine = piece_of(data, 4 * rank, 4)
        out = mock.Mock(side_effect=MemoryError)

        def first() -> None:
            for _ in range(2):
                accumulator.run_or_split(step, {"x": mine.x.clone(), "y": mine.y})  # noqa: B023

        with mock.patch.object(
            GradientSums, "allocate", out if rank and fault == "sum" else GradientSums.allocate
        ):
            said = error_of(first)
        cleared = all(p.grad is None for p in model.parameters())
        for half in (0, 2):
            part = piece_of(mine, half, 2)
            accumulator.run_or_split(lambda one: step(one, fails=False), vars(part))
        large_step(large, torch.optim.SGD(large.parameters(), lr=0.1), data)
        found.append([said, cleared, distance(model.module, large)])
    return found


# ---------------------------------------------------------------------- shards and meshes


def hybrid() -> Any:
    """FSDP2 shards over one dimension of a mesh, and replicates over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded"))
    large, model = make_model("transformer"), make_model("transformer")
    fully_shard(model, mesh=mesh)
    theirs, mine = (OPTIMIZERS["AdamW"](one.parameters()) for one in (large, model))
    accumulator = GradAccumulator(mine, model, max_norm=0.1)
    worst = 0.0
    for number in range(3):
        data = Data.make(24, seed=number)
        plain = copy.deepcopy(large)
        (loss_sum(plain, data) / data.weight).backward()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
        large_step(large, theirs, data, 0.1)
        for place in range(2):
            take(accumulator, model, piece_of(data, 6 * rank + 3 * place, 3), last=place == 1)
        worst = max(worst, abs(accumulator.last.gradient_norm / norm - 1), distance(model, large))
    return worst


def raised() -> Any:
    """A micro-batch raises after its backward, where FSDP has its gradients."""
    found = []
    for dtype in (torch.float64, torch.float32):
        # Where gradients are reduced in another dtype, FSDP accumulates them in another place.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float64)
        large, model = make_model("transformer"), make_model("transformer")
        fully_shard(model, mp_policy=policy)
        accumulator, data = GradAccumulator(SGD(model.parameters()), model, steps=2), Data.make(8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForeignStepWarning)
            try:
                with accumulator.micro_batch(weight=1):
                    accumulator.backward(loss_sum(model, data))
                    raise KeyError
            except KeyError:
                pass
        for at in (0, 2):
            take(accumulator, model, piece_of(data, 4 * rank + at, 2))
        large_step(large, SGD(large.parameters()), data)
        found.append(distance(model, large))
    return found


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
    for kind in ("plain", "fsdp"):
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
        accumulator = GradAccumulator(mine, model, max_norm=0.1, group=group)
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
            worst = max(worst, distance(model, large))
            worst = max(worst, abs(accumulator.last.gradient_norm / norm - 1))
        found.append(worst)
    return found


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


# ---------------------------------------------------------------------- scalers and reads


def weights_on_devices() -> Any:
    """One rank has numbers, the other tensors on a device; one gradient is infinite on one rank."""
    models = [DistributedDataParallel(make_model("CNN")) for _ in range(2)]
    tensors, numbers = (
        GradAccumulator(
            torch.optim.SGD(model.parameters(), lr=0.1), model, steps=2, max_norm=0.1,
            scaler=torch.amp.GradScaler("cpu", init_scale=8.0),
        )
        for model in models
    )  # fmt: skip
    told: list[Any] = []
    with mock.patch.object(step_module, "waits", return_value=True):
        for seed in range(6):
            data = Data.make(4, seed + rank)
            factor = float("inf") if rank and seed == 2 else 1.0
            weight = torch.tensor(data.weight) if rank else data.weight
            with Reads() as reads, tensors.micro_batch(weight):
                tensors.backward(loss_sum(models[0], data) * factor)
            with numbers.micro_batch(data.weight):
                numbers.backward(loss_sum(models[1], data) * factor)
            told.append([reads.names, tensors.last and tensors.last.skipped])
        same = all(map(torch.equal, models[0].parameters(), models[1].parameters()))

        def wrong() -> None:
            with tensors.micro_batch(torch.tensor(-1e6 if rank else 5.0), last=True):
                tensors.backward(loss_sum(models[0], data))

        said = error_of(wrong)
    return told, same, said


def nonfinite() -> Any:
    """A NaN on one rank, in its own parameter too, lets all skip, with a scaler or without."""
    found = []
    for options in ({"skip_nonfinite": True}, {"scaler": torch.amp.GradScaler("cpu", 8.0)}):
        for own in (False, True):
            model = Own()
            ddp = DistributedDataParallel(model)
            accumulator = GradAccumulator(SGD(ddp.parameters()), ddp, steps=1, **options)
            before = copy.deepcopy(model.inner)
            data = Data.make(4, rank)
            with accumulator.micro_batch(weight=data.weight):
                loss = loss_sum(ddp, data)
                wrong = model.own if own else next(model.inner.parameters())
                accumulator.backward(loss + (wrong.sum() * float("nan") if rank else 0.0))
            kept = distance(model.inner, before) == 0
            take(accumulator, ddp, data)
            found.append([kept, accumulator.last.skipped])
    return found


def shards_of_a_scaler() -> Any:
    """Row 3 of an embedding lies on rank 1, and a bias of one element on one of two ranks."""
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1))
    fully_shard(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, model, steps=1, scaler=scaler)
    skipped = []
    for wrong in (1.0, float("nan"), float("inf")):
        before = full(model[0].weight).detach().clone()
        with accumulator.micro_batch(weight=2):
            rows = model(torch.tensor([0, 3]))
            accumulator.backward((rows * torch.tensor([[1.0], [wrong]])).sum())
        skipped.append([accumulator.last.skipped, torch.equal(full(model[0].weight), before)])
    return skipped, scaler.get_scale()


def reads() -> Any:
    """The decisions of a step are summed on the host."""
    model = DistributedDataParallel(make_model("CNN"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, model, steps=2, max_norm=0.1)
    told = []
    for seed in range(4):
        data = Data.make(4, seed + rank)
        weight = data.weight
        with Reads() as seen, accumulator.micro_batch(weight):
            accumulator.backward(loss_sum(model, data))
        told.append(seen.names)
    return told


# ---------------------------------------------------------------------- refusals and joint losses


def refused() -> Any:
    data, told = Data.make(4), []

    def made(**options: Any) -> tuple[nn.Module, Any]:
        ddp = DistributedDataParallel(make_model("CNN"), **options)
        return ddp, SGD(ddp.parameters())

    sharded = make_model("transformer")
    fully_shard(sharded)
    optimizer = SGD(sharded.parameters())
    alone = dist.new_group([rank], use_local_synchronization=True)
    told += [
        error_of(lambda options=options: GradAccumulator(optimizer, sharded, **options))
        for options in ({"samples": 8}, {"weight": 8}, {"group": alone})
    ]
    told.append(error_of(lambda: GradAccumulator(optimizer)))
    accumulator = GradAccumulator(optimizer, sharded, steps=2)
    take(accumulator, sharded, data)
    told.append(error_of(accumulator.step))
    take(accumulator, sharded, data)
    joined = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    synchronized = GradAccumulator(SGD(joined.parameters()), joined)
    told.append(error_of(lambda: synchronized.run_or_split(print, torch.ones(2, 2))))
    ddp, optimizer = made(static_graph=True)
    told.append(error_of(lambda: GradAccumulator(optimizer, ddp)))
    ddp, optimizer = made()
    late = GradAccumulator(optimizer, ddp)

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        raise AssertionError(state, bucket)

    ddp.register_comm_hook(None, hook)
    told.append(error_of(lambda: take(late, ddp, data)))
    for given in (lambda ddp: ddp.module, lambda _: ()):
        ddp, optimizer = made()
        accumulator = GradAccumulator(optimizer, given(ddp), steps=2)
        with torch.no_grad():
            ddp(data.x)  # outside of a micro-batch it may run
        told.append(error_of(lambda ddp=ddp, bare=accumulator: take(bare, ddp, data)))
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
    found: list[Any] = [distance(model, large)]

    def of_rank(batch: Tensor) -> Any:
        return model.inner(batch), float(rank)

    found.append(error_of(lambda: joint_backward(of_rank, [rows], contrast, accumulator)))
    if rank:
        with accumulator.micro_batch(weight=1):
            accumulator.backward(model.inner(rows).sum())
    found.append(error_of(lambda: joint_backward(model, [rows], contrast, accumulator)))
    accumulator.step()
    return found


results = {name: globals()[name]() for name in names}
(folder / f"{rank}.json").write_text(json.dumps(results))
