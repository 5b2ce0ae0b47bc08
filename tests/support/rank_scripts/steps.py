"""Cases of accumulated steps over ranks, by their names; each returns what it found."""

import copy
import random
import warnings
from contextlib import suppress
from functools import partial
from itertools import pairwise
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

from tests.support.large_steps import (
    MODELS,
    OPTIMIZERS,
    Data,
    large_step,
    loss_sum,
    make_model,
    sgd,
)
from tests.support.rank_scripts import error_of, join
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

rank, ranks = join()


def cases(*names: str) -> dict[str, Any]:
    """What each of the cases below found."""
    return {name: globals()[name]() for name in names}


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
    for piece in pieces[rank]:
        take(accumulator, model, piece)
    accumulator.flush()
    return distance(model.module, large), accumulator.last.number


def planned() -> Any:
    """A sampler in a DataLoader with workers plans three steps an epoch."""
    data = Data.make(90)
    lengths = (data.y != -100).sum(1).numpy()
    sampler = MemoryBudgetBatchSampler(lengths, PaddedCost(unit_bytes=1), 12, samples_per_step=30)
    model, large = DistributedDataParallel(make_model("CNN")), make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=sampler)
    theirs, worst, held = sgd(large), 0.0, []
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
    take(accumulator, ddp, pieces[place])
    worst = max(distance(model.inner, large), abs(model.own.item() / owns[place].item() - 1))
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
    for at in (0, 2):
        take(accumulator, model, piece_of(data, 4 * rank + at, 2))
    large_step(large, sgd(large), data)
    return distance(model, large)


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
            worst = max(worst, distance(model, large))
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
    take(accumulator, sharded, data)
    told.append(error_of(accumulator.step))
    take(accumulator, sharded, data)
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
        return model.inner(batch)[:, : rank + 1], 0.5

    found.append(error_of(lambda: joint_backward(of_rank, [rows], contrast, accumulator)))
    if rank:
        with accumulator.micro_batch(weight=1):
            accumulator.backward(model.inner(rows).sum())
    found.append(error_of(lambda: joint_backward(model, [rows], contrast, accumulator)))
    accumulator.step()
    return found


# ---------------------------------------------------------------------- random steps


class Scaled(nn.Module):
    """A model, and a parameter beside it, of whose gradient the last element may be `wrong`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = make_model(name)
        self.scale = nn.Parameter(torch.full((5,), 1.5, dtype=torch.float64))
        self.wrong = 0.0

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.clone()
        if self.wrong:
            scale.register_hook(lambda one: one.index_fill(0, torch.tensor([4]), self.wrong))
        return self.inner(x) * scale


def wrapped(model: Scaled, how: str, draw: random.Random) -> tuple[nn.Module, nn.Module]:
    """What is called, and what the accumulator is given."""
    called: Any = model
    if how in ("ddp", "subgroup"):  # of all ranks, in another group
        called = DistributedDataParallel(model, process_group=everybody if how != "ddp" else None)
    if how == "fsdp":
        fully_shard(model, ignored_params={model.scale} if draw.random() < 0.5 else None)
    if how == "hybrid":  # shards over one dimension of a mesh, replicas over the other
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicated", "sharded"))
        fully_shard(model, mesh=mesh)
    if how == "inner":
        fully_shard(model.inner)
        if draw.random() < 0.5:
            model.inner.set_gradient_divide_factor(draw.choice([0.5, 3.0]))
        return model, model.inner
    return called, called


# What a rank says that gives a step up, and what the others say.
GIVEN_UP = {
    "sample": ("out of memory with one sample", "out of memory on another rank"),
    "sum": ("out of memory while gradients were summed", "out of memory on another rank"),
    "batch": ("the forward changed batch[0] in place", "a batch was refused on another rank"),
}


class RandomSteps:
    """Three steps with options and faults that the number chooses, the same on every rank."""

    def __init__(self, number: int) -> None:
        self.draw = draw = random.Random(number)
        # FSDP needs every parameter to be used in every backward: what is never used is not there.
        self.how = HOWS[number % len(HOWS)]
        self.sharded = self.how in ("fsdp", "inner", "hybrid")
        unfit = ("frozen", "tied") if self.sharded else ()
        name = draw.choice([one for one in MODELS if one not in unfit])
        optimizer = draw.choice(["SGD", "AdamW"]) if name != "LSTM" else "SGD"
        self.max_norm = draw.choice([None, 0.1, float("inf")])
        self.options: dict[str, Any] = {"mean": draw.random() < 0.5, "max_norm": self.max_norm}
        self.options |= {"divisor": draw.choice([1, 8, 3])}
        self.faults = ["", "raised"] if self.sharded else ["", "raised", *GIVEN_UP]
        skips = draw.choice(["", "skip_nonfinite", "scaler"])
        if skips:
            self.faults += ["nonfinite"] * 2
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            self.options[skips] = scaler if skips == "scaler" else True
        self.large = Scaled(name)
        self.model = copy.deepcopy(self.large)
        self.called, given = wrapped(self.model, self.how, draw)
        self.theirs = OPTIMIZERS[optimizer](self.large.parameters())
        mine: Any = OPTIMIZERS[optimizer](self.called.parameters())
        if self.sharded and skips == "scaler":  # it unscales no shards beside others
            scale = self.model.scale
            parts = [one for one in self.called.parameters() if one is not scale], [scale]
            mine = [OPTIMIZERS[optimizer](one) for one in parts]
        self.accumulator = GradAccumulator(mine, given, **self.options)
        self.told = [number, self.how, name, optimizer, str(self.options)]

    def micro_batch(self, batch: Any, *, last: bool, fault: str = "") -> None:
        part = Data(*batch)
        if fault == "batch":
            part.x.clamp_(max=3)
        # Half of the ranks have weights on a device, for which tensors on the CPU stand.
        weight = torch.tensor(part.weight) if rank % 2 else part.weight
        with self.accumulator.micro_batch(weight, last=last):
            loss = loss_sum(self.called, part)
            self.accumulator.backward(loss / part.weight if self.options["mean"] else loss)
            if fault == "sample" or (fault == "part" and len(part) > 1 and not self.has_failed):
                self.has_failed = True
                raise MemoryError
            if fault == "raised":
                raise KeyError

    def fail(self, fault: str) -> None:
        """A step that is given up, or skipped, by all ranks, since one of them has a fault."""
        victim, data = self.draw.randrange(ranks), Data.make(3, rank)
        mine = fault if rank == victim or fault == "raised" else ""
        if mine == "nonfinite":
            self.model.wrong = float("nan")
        allocate = mock.Mock(side_effect=MemoryError) if mine == "sum" else GradientSums.allocate
        act = partial(self.micro_batch, last=fault != "raised", fault=mine)
        with mock.patch.object(GradientSums, "allocate", allocate), warnings.catch_warnings():
            warnings.simplefilter("ignore", ForeignStepWarning)
            try:
                self.micro_batch((data.x, data.y), last=False)
                if fault in GIVEN_UP:
                    self.accumulator.run_or_split(act, (data.x, data.y))
                else:
                    act((data.x, data.y))
            except (TorchBudgetError, KeyError) as error:
                said = "" if fault == "raised" else GIVEN_UP[fault][rank != victim]
                assert said in str(error)  # noqa: PT017  (only where it is given up)
                assert all(one.grad is None for one in self.called.parameters())
            else:
                assert fault == "nonfinite"
                assert self.accumulator.last.skipped
        self.model.wrong = 0.0

    def step(self) -> float:
        """How far the step is from the large batch's."""
        draw = self.draw
        data = Data.make(draw.randint(2 * ranks, 24), seed=draw.randrange(10**6))
        norm = large_step(self.large, self.theirs, data, self.max_norm)
        rows = list(range(len(data)))
        draw.shuffle(rows)
        parts = draw.randint(1, 3) * ranks if self.sharded else draw.randint(1, 8)
        parts = min(parts, len(rows) // ranks * ranks)
        ends = [0, *sorted(draw.sample(range(1, len(rows)), parts - 1)), len(rows)]
        pieces = [rows[a:b] for a, b in pairwise(ends)]
        owner = [place % ranks if self.sharded else draw.randrange(ranks) for place in range(parts)]
        own = [piece for piece, whose in zip(pieces, owner, strict=True) if whose == rank]
        fails = [draw.random() < 0.3 for _ in pieces]
        for place, piece in enumerate(own):
            run = partial(self.micro_batch, last=piece is own[-1])
            if self.sharded:
                run((data.x[piece], data.y[piece]))
            else:
                self.has_failed = not fails[place]
                run = partial(run, fault="part")
                self.accumulator.run_or_split(run, (data.x[piece], data.y[piece]))
        if not own:
            self.accumulator.step()
        assert self.accumulator.stepped
        last = self.accumulator.last
        assert last.weight == data.weight
        worst = 0.0 if norm is None else abs(last.gradient_norm / float(norm) - 1)
        return max(worst, distance(self.called, self.large))


HOWS = ["plain", "ddp", "subgroup", "fsdp", "inner"] + ["hybrid"] * (ranks == 4)
everybody = dist.new_group(range(ranks))


def random_steps(first: str, number: str) -> list[Any]:
    """Random cuts, wrappings, options and faults: how far steps are from the large batch's."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")
    told = []
    with mock.patch.object(step_module, "waits", return_value=True):
        for one in range(int(first), int(first) + int(number)):
            steps, worst = RandomSteps(one), 0.0
            for _ in range(3):
                fault = steps.draw.choice(steps.faults)
                steps.told.append(fault)
                if fault:
                    steps.fail(fault)
                worst = max(worst, steps.step())
            told.append([*steps.told, worst])
    return told
