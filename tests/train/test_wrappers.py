"""DDP and FSDP2 as users set them up: what they leave alone is summed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.train.test_accumulator_ranks import COMMON

SHARDED = (
    COMMON
    + """
import copy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchbudget.errors import OptionError

case, = arguments
kind, name = "fsdp", "transformer"


class Scaled(nn.Module):
    "A model, and a parameter beside it that scales its logits."

    def __init__(self):
        super().__init__()
        self.inner = make_model(name)
        self.scale = nn.Parameter(torch.full((5,), 1.5, dtype=torch.float64))

    def forward(self, x):
        return self.inner(x) * self.scale


large, model = Scaled(), Scaled()
if case in ("outside", "scaled"):
    fully_shard(model.inner)
    given = model.inner
elif case == "hybrid":  # sharded over one dimension of a mesh, replicated over the other
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicated", "sharded"))
    fully_shard(model, mesh=mesh)
    given = model
elif case == "layers":  # no module as a whole
    fully_shard(model.inner.layer)
    fully_shard(model.inner.head)
    given = model
else:
    ignored = {model.scale, model.inner.head.weight} if case == "ignored" else None
    fully_shard(model.inner.layer, ignored_params=ignored)
    fully_shard(model, ignored_params=ignored)
    given = model
    if case == "factor":
        model.set_gradient_divide_factor(7.0)
        model.inner.layer.set_gradient_divide_factor(0.5)
theirs = OPTIMIZERS["AdamW"](large.parameters())
mine = [OPTIMIZERS["AdamW"](model.parameters())]
scaler = None
if case == "scaled":
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    try:
        GradAccumulator(mine, given, scaler=scaler)
    except OptionError as error:
        assert "an optimizer of its own" in str(error)
    mine = [OPTIMIZERS["AdamW"](model.inner.parameters()), OPTIMIZERS["AdamW"]([model.scale])]
accumulator = GradAccumulator(mine, given, max_norm=0.1, scaler=scaler)
worst, norms = 0.0, 0.0
for number in range(4):
    data = Data.make(24, seed=number)
    plain = copy.deepcopy(large)
    (loss_sum(plain, data) / data.weight).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    large_step(large, theirs, data, 0.1)
    pieces = [data[list(range(at, at + 3))] for at in range(0, 24, 3)][rank::ranks]
    for place, piece in enumerate(pieces):
        with accumulator.micro_batch(weight=piece.weight, last=place == len(pieces) - 1):
            accumulator.backward(loss_sum(model, piece))
    norms = max(norms, norm)
    worst = max(worst, abs(accumulator.last.gradient_norm / norm - 1))
    for one, other in zip(model.parameters(), large.parameters(), strict=True):
        full = one.full_tensor() if hasattr(one, "full_tensor") else one
        worst = max(worst, float((full - other).detach().norm() / other.detach().norm()))
finish([worst, norms])
"""
)


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["outside", "layers", "ignored", "factor", "scaled", "hybrid"])
def test_parameters_that_fsdp_does_not_reduce(case: str, tmp_path: Path) -> None:
    """Beside what is sharded, ignored in it, or divided by a user's factor: at most 1e-12."""
    results = run_ranks(SHARDED, tmp_path, 4 if case == "hybrid" else 2, case)
    assert max(worst for worst, _ in results) <= 1e-12
    assert results[0][1] > 0.1  # which was clipped


RAISED = (
    COMMON
    + """
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchbudget.errors import ForeignStepWarning

kind, name = "fsdp", "transformer"
[dtype] = arguments
warnings.simplefilter("ignore", ForeignStepWarning)
# Where gradients are reduced in another dtype, FSDP accumulates them in a place of their own.
policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float64)
data = Data.make(4 * ranks)


def stepped(raises):
    model = make_model(name)
    fully_shard(model, mp_policy=policy)
    accumulator = GradAccumulator(OPTIMIZERS["SGD"](model.parameters()), model, steps=2)
    if raises:
        try:
            with accumulator.micro_batch(weight=1):
                accumulator.backward(loss_sum(model, data))
                raise KeyError
        except KeyError:
            pass
    for at in (0, 2):
        piece = data[list(range(4 * rank + at, 4 * rank + at + 2))]
        with accumulator.micro_batch(weight=piece.weight):
            accumulator.backward(loss_sum(model, piece))
    return whole(model)


large = make_model(name)
large_step(large, OPTIMIZERS["SGD"](large.parameters()), data, None)
raised = stepped(True)
finish([difference(raised, stepped(False)), difference(raised, large)])
"""
)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_that_fsdp_has_of_a_micro_batch_that_raised_are_dropped(
    dtype: str, tmp_path: Path
) -> None:
    """It has accumulated them where no optimizer sees them."""
    for from_untouched, from_large in run_ranks(RAISED, tmp_path, 2, dtype):
        assert from_untouched == 0
        assert from_large <= (1e-12 if dtype == "float64" else 1e-4)


TWO_PLAYERS = (
    COMMON
    + """
from torch import nn
from torchbudget.errors import UnsynchronizedWarning

torch.manual_seed(0)
made = [DistributedDataParallel(nn.Linear(2, 2)) for _ in range(2)]
generator, critic = made
players = [
    GradAccumulator(OPTIMIZERS["SGD"](one.parameters()), made, steps=1) for one in made
]
x = torch.ones(2, 2)
for _ in range(2 + rank):  # ranks may have unequal numbers of micro-batches
    for player, loss_of in zip(players, (lambda: critic(generator(x)), lambda: critic(x))):
        for one in made:
            one.zero_grad()
        with player.micro_batch(weight=2):
            player.backward(loss_of().sum())
try:
    critic(x)
except UnsynchronizedWarning as warning:
    finish(str(warning))
for player in players:
    player.flush()
"""
)


@pytest.mark.distributed
def test_a_module_in_another_accumulators_micro_batch_is_not_outside(tmp_path: Path) -> None:
    """Two players that pass both modules to both accumulators; outside of all it is noticed."""
    assert all("is outside" in told for told in run_ranks(TWO_PLAYERS, tmp_path, 2))


SUBGROUPS = (
    COMMON
    + """
from torch import nn

kind = name = "CNN"
groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
half, place = divmod(rank, 2)


class Own(nn.Module):
    "A part that each rank has for itself, as DDP is told."

    _ddp_params_and_buffers_to_ignore = ("own", "seen")

    def __init__(self):
        super().__init__()
        self.inner = make_model(name)
        self.own = nn.Parameter(torch.tensor(1.0 + rank, dtype=torch.float64))
        self.register_buffer("seen", torch.tensor(float(rank)))
        self.register_buffer("shared", torch.tensor(float(rank)))

    def forward(self, x):
        return self.inner(x) * self.own


model = Own()
ddp = DistributedDataParallel(model, process_group=groups[half])
model.shared += rank  # after DDP's own broadcast
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
accumulator = GradAccumulator(optimizer, ddp, steps=1)
pieces = [Data.make(4, seed=10 * half + one) for one in range(2)]  # of the ranks of this half
before = model.own.item()
large = make_model(name)
weight = sum(piece.weight for piece in pieces)
owns = [nn.Parameter(torch.tensor(1.0 + 2 * half + one, dtype=torch.float64)) for one in range(2)]
loss = sum(loss_sum(lambda x: large(x) * own, piece) for own, piece in zip(owns, pieces))
(loss / weight).backward()
torch.optim.SGD([*large.parameters(), *owns], lr=0.1).step()
with accumulator.micro_batch(weight=pieces[place].weight):
    accumulator.backward(loss_sum(ddp, pieces[place]))
worst = max(difference(model.inner, large), abs(model.own.item() / owns[place].item() - 1))
finish([worst, model.seen.item(), model.shared.item(), accumulator.last.weight == weight])
"""
)


@pytest.mark.distributed
def test_ddp_over_a_subgroup_and_what_it_ignores(tmp_path: Path) -> None:
    """Steps are shared by DDP's own ranks; what it ignores is each rank's own: at most 1e-12."""
    for rank, (worst, seen, shared, weighed) in enumerate(run_ranks(SUBGROUPS, tmp_path, 4)):
        assert worst <= 1e-12
        assert weighed
        assert seen == rank  # left alone
        assert shared == 2 * (2 * (rank // 2))  # of the first rank of its group


TENSOR_PARALLEL = (
    COMMON
    + """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module,
)
from torchbudget.errors import OptionError

kind, = arguments
name = ""
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def make():
    torch.manual_seed(3)
    return Block().double()


large, model = make(), make()
parallelize_module(model, mesh["tensor"], {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(),
})
layouts = dict(input_layouts=Replicate(), desired_input_layouts=Shard(1))
parallelize_module(model, mesh["tensor"], PrepareModuleInput(**layouts))
group = None if kind == "fsdp" else mesh.get_group("data")
told = "it says over which: pass group="
if kind == "fsdp":
    fully_shard(model, mesh=mesh["data"])
theirs = OPTIMIZERS["AdamW"](large.parameters())
mine = OPTIMIZERS["AdamW"](model.parameters())
if kind == "plain":
    try:
        GradAccumulator(mine, model)
    except OptionError as error:
        told = str(error)
accumulator = GradAccumulator(mine, model, max_norm=0.1, group=group)
place, worst = mesh.get_local_rank("data"), 0.0
for number in range(4):
    x = torch.randn(6, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    theirs.zero_grad()
    (large(x).square().sum() / len(x)).backward()
    norm = torch.nn.utils.clip_grad_norm_(large.parameters(), 0.1).item()
    theirs.step()
    pieces = [x[:4]] if place else [x[4:]]
    if number == 2 and kind == "plain":
        pieces = [] if place else [x[:1], x[1:3], x[3:]]  # a rank without data
    for number, piece in enumerate(pieces, 1):
        with accumulator.micro_batch(weight=len(piece), last=number == len(pieces)):
            accumulator.backward(model(piece).square().sum())
    if not pieces:
        accumulator.step()
    for one, other in zip(model.parameters(), large.parameters(), strict=True):
        full = one.full_tensor() if isinstance(one, DTensor) else one
        worst = max(worst, float((full - other).detach().norm() / other.detach().norm()))
    worst = max(worst, abs(accumulator.last.gradient_norm / norm - 1))
finish([told, worst, accumulator.last.weight])
"""
)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_tensor_parallel_gradients_are_summed_by_their_local_parts(
    kind: str, tmp_path: Path
) -> None:
    """Over `group`, the ranks that have the same part, or FSDP's own: at most 1e-12."""
    for told, worst, weight in run_ranks(TENSOR_PARALLEL, tmp_path, 4, kind):
        assert "pass group=" in told
        assert worst <= 1e-12
        assert weight == 6
