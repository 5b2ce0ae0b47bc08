"""How often the accumulator reads a tensor's value, which on a device waits for all of its work.

They are counted on the CPU, where nothing waits: by modes that see each operation that reads. They
would see copies from a device to the host as well, but none can be made without a device.
The optimizer is SGD, since others read a counter of steps that is on the host anyway.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.large_steps import Data, loss_sum, make_model
from tests.support.ranks import run_ranks
from tests.train.test_accumulator_ranks import COMMON
from torchbudget import GradAccumulator
from torchbudget.train import step as step_module
from torchbudget.train.step import Step, float64_device, in_float64

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_assert_async"}


class ListReads(TorchFunctionMode):
    """The names of the methods that make numbers of a whole tensor, on the CPU by no operation."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """The names of the operations inside that read a tensor's value, or copy it to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._lists = ListReads(self.names)

    def __enter__(self) -> Reads:
        self._lists.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        result = func(*args, **(kwargs or {}))
        copied = name in ("_to_copy", "copy_") and args[0].device != result.device
        if name in READS or (copied and result.device.type == "cpu"):
            self.names.append(name)
        return result


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.1},
    "mean": {"mean": True},
    "divided": {"divisor": 8.0, "max_norm": float("inf")},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_nothing_is_read_until_it_is_asked_for(case: str) -> None:
    """No read in a micro-batch, none in a step; loss and norm take one, when one is first asked."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=3, **OPTIONS[case])
    for _ in range(3):
        with Reads() as reads:
            for seed in range(3):
                data = Data.make(4, seed)
                weight = data.weight
                reads.names.clear()
                with accumulator.micro_batch(weight):
                    loss = loss_sum(model, data)
                    accumulator.backward(loss / weight if accumulator.mean else loss)
                assert reads.names == []
            step = accumulator.last
            assert not step.skipped
            assert reads.names == []
            norm = vars(step)["_gradient_norm"]
            late = vars(step)["_loss"].item(), None if norm is None else norm.item()
            reads.names.clear()
            assert (step.loss, step.gradient_norm) == (step.loss, step.gradient_norm) == late
            assert type(step.loss) is float
            assert reads.names == ["tolist"]


def test_a_scaler_takes_one_read_a_step() -> None:
    """Of the largest gradient, which says whether the optimizer steps."""
    model = make_model("CNN")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulator = GradAccumulator(sgd(model), model, steps=2, scaler=scaler)
    for seed in range(6):
        data = Data.make(4, seed)
        weight = data.weight
        with Reads() as reads, accumulator.micro_batch(weight):
            accumulator.backward(loss_sum(model, data) * (float("inf") if seed == 3 else 1))
        assert reads.names == ["tolist"] * accumulator.stepped
        if accumulator.stepped:
            assert accumulator.last.skipped == (seed == 3)


@pytest.mark.parametrize("norm", [None, 0.1])
@pytest.mark.parametrize("fused", ["none", "one", "all"])
def test_several_optimizers_with_a_scaler_take_one_read_a_step(
    fused: str, norm: float | None
) -> None:
    """And they do what the scaler has each of them do alone, where no gradient is infinite."""
    models = [make_model("CNN") for _ in range(4)]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=f)
        for m, f in zip(models, 2 * [fused == "all", fused != "none"], strict=True)
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    accumulator = GradAccumulator(
        optimizers[:2], models[:2], steps=2, scaler=scalers[0], max_norm=norm
    )
    for seed in range(8):
        data = Data.make(4, seed)
        weight, factor = data.weight, float("inf") if seed == 3 else 1.0
        with Reads() as reads, accumulator.micro_batch(weight):
            accumulator.backward(loss_sum(models[0], data) * factor)
            accumulator.backward(loss_sum(models[1], data))
        assert len(reads.names) == accumulator.stepped
        if accumulator.stepped:
            assert accumulator.last.skipped == (seed == 3)
    for first in range(0, 8, 2):
        parts = [Data.make(4, seed) for seed in (first, first + 1)]
        total = sum(data.weight for data in parts)
        for data in parts:
            for model in models[2:]:
                scalers[1].scale(loss_sum(model, data)).backward()
        gradients = [p.grad for model in models[2:] for p in model.parameters()]
        for gradient in gradients:
            gradient *= 1 / total
        if first == 2:
            gradients[0].fill_(float("inf"))
        for optimizer in optimizers[2:]:
            scalers[1].unscale_(optimizer)
        if norm is not None:
            nn.utils.clip_grad_norm_([p for m in models[2:] for p in m.parameters()], norm)
        for optimizer in optimizers[2:]:
            if first != 2:
                scalers[1].step(optimizer)
            optimizer.zero_grad()
        scalers[1].update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    for mine, theirs in zip(models[:2], models[2:], strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, other)


def test_an_optimizer_that_decides_on_the_device_takes_one_read() -> None:
    """Fused ones skip by themselves, so that torch reads nothing: then the scale is read, after."""
    model = make_model("CNN")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    accumulator = GradAccumulator(optimizer, model, steps=1, scaler=scaler)
    for seed in range(3):
        data = Data.make(4, seed)
        weight = data.weight
        with Reads() as reads, accumulator.micro_batch(weight):
            accumulator.backward(loss_sum(model, data) * (float("inf") if seed == 1 else 1))
        assert len(reads.names) == 1
        assert accumulator.last.skipped == (seed == 1)


def test_weights_on_a_device_are_read_at_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU stand for those on a device: one read a step, and the same step."""
    monkeypatch.setattr(step_module, "waits", lambda _: True)
    model, by_numbers = make_model("CNN"), make_model("CNN")
    tensors = GradAccumulator(sgd(model), model, steps=3)
    numbers = GradAccumulator(sgd(by_numbers), by_numbers, steps=3)
    for seed in range(3):
        data = Data.make(4, seed)
        weight = (data.y != -100).sum()
        with Reads() as reads, tensors.micro_batch(weight):
            tensors.backward(loss_sum(model, data))
        assert reads.names == ["tolist"] * (seed == 2)
        with numbers.micro_batch(weight.item()):
            numbers.backward(loss_sum(by_numbers, data))
    assert tensors.last == numbers.last
    for one, other in zip(model.parameters(), by_numbers.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"mean": True}, {"weight": 1e9}], ids=["mean", "weight"])
def test_weights_on_a_device_that_are_needed_sooner(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Where the loss is multiplied by them, or they end steps: one read for each micro-batch."""
    monkeypatch.setattr(step_module, "waits", lambda _: True)
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, **options)
    for seed in range(4):
        data = Data.make(4, seed)
        number = data.weight
        weight = torch.tensor(number)
        with Reads() as reads, accumulator.micro_batch(weight, last=seed == 3):
            accumulator.backward(loss_sum(model, data) / (number if accumulator.mean else 1))
        assert len(reads.names) == 1


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_on_a_device_are_read_with_what_a_scaler_decides(
    monkeypatch: pytest.MonkeyPatch, number: int, fused: bool
) -> None:
    """One read a step; numbers as weights give the same weights of the model and the same scale.

    Of eight steps one has an infinite gradient, and one no weight, which leaves the scale alone: it
    is read, too.
    """
    monkeypatch.setattr(step_module, "waits", lambda _: True)
    models = [make_model("CNN") for _ in range(2 * number)]
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=fused) for model in models
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    tensors, numbers = (
        GradAccumulator(
            optimizers[part::2], models[part::2], steps=2, scaler=scalers[part], max_norm=0.1
        )
        for part in range(2)
    )
    for seed in range(16):
        data = Data.make(4, seed)
        weight = (data.y != -100).sum() * (seed not in (10, 11))
        if seed % 3 == 1:
            weight = weight[None, None]  # one number, in axes of its own
        factor = torch.tensor(float("inf") if seed == 5 else float(weight.item() > 0))
        with Reads() as reads, tensors.micro_batch(weight):
            for model in models[0::2]:
                tensors.backward(loss_sum(model, data) * factor)
        scale = ["_local_scalar_dense"] * (seed == 11)
        assert reads.names == ["tolist"] * tensors.stepped + scale
        with numbers.micro_batch(weight.item()):
            for model in models[1::2]:
                numbers.backward(loss_sum(model, data) * factor)
        if tensors.stepped:
            assert str(tensors.last) == str(numbers.last)  # in which nan is like nan
            assert tensors.last.skipped == (seed in (5, 11))
            assert scalers[0].state_dict() == scalers[1].state_dict()
    for mine, theirs in zip(models[0::2], models[1::2], strict=True):
        assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


def test_a_batch_that_could_be_split_is_not_read() -> None:
    """`run_or_split` copies what it may have to restore, and reads nothing of it."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)

    def train(part: tuple[torch.Tensor, ...]) -> None:
        with accumulator.micro_batch(len(part[0])):
            accumulator.backward(loss_sum(model, Data(*part)))

    for seed in range(4):
        data = Data.make(4, seed)
        with Reads() as reads:
            accumulator.run_or_split(train, (data.x, data.y))
        assert reads.names == []


def test_a_step_is_a_plain_record() -> None:
    """Whether its numbers were read or not: fields, copies, pickles, comparison and text."""
    numbers = {"number": 1, "weight": 2.0, "micro_batches": 3, "skipped": False}
    late = Step(loss=torch.tensor(0.5), gradient_norm=torch.tensor(4.0), **numbers)
    plain = Step(loss=0.5, gradient_norm=4.0, **numbers)
    copied = pickle.loads(pickle.dumps(late))  # noqa: S301  (of this line)
    assert asdict(copied) == asdict(plain)
    assert copy.deepcopy(late) == replace(late, loss=0.5) == plain
    assert repr(late) == repr(plain)
    assert "loss=0.5" in repr(plain)
    assert Step(loss=0.5, gradient_norm=None, **numbers).gradient_norm is None
    with pytest.raises(FrozenInstanceError):
        late.loss = 1.0
    with pytest.raises(TypeError, match="loss"):
        Step(gradient_norm=None, **numbers)


def test_sums_are_on_the_host_where_the_device_has_no_float64() -> None:
    """By the device's name alone: there is no such device here."""
    assert float64_device(torch.device("mps")) == torch.device("cpu")
    assert float64_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    kept = in_float64(torch.tensor(0.1, requires_grad=True))
    assert kept.dtype == torch.float64
    assert not kept.requires_grad


RANKS = (
    COMMON
    + """
from tests.train.test_synchronizations import Reads, sgd

kind = name = "CNN"
model = DistributedDataParallel(make_model(name))
accumulator = GradAccumulator(sgd(model), model, steps=2, max_norm=0.1)
told = []
for seed in range(6):
    data = Data.make(4, seed + rank)
    weight = data.weight
    with Reads() as reads, accumulator.micro_batch(weight):
        accumulator.backward(loss_sum(model, data))
    told.append(reads.names)
accumulator.last.loss
finish(told)
"""
)


@pytest.mark.distributed
def test_nothing_is_read_over_ranks(tmp_path: Path) -> None:
    """What decides about a step is summed on the host, where it is read; no device has it."""
    assert run_ranks(RANKS, tmp_path, 2) == 2 * [[[], ["tolist"]] * 3]


WEIGHTS = (
    COMMON
    + """
from torchbudget.errors import OptionError
from torchbudget.train import step as step_module
from tests.train.test_synchronizations import Reads, sgd

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
        said.append("a number of at least 0" in str(error))
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


def test_a_scaler_and_gradients_without_elements() -> None:
    """A parameter of no elements, and a sparse gradient of no rows: they have no largest one."""
    torch.manual_seed(0)
    embedding, empty = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.zeros(0, 4))
    optimizer = torch.optim.SGD([embedding.weight, empty], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    accumulator = GradAccumulator(optimizer, embedding, steps=1, scaler=scaler)
    for tokens, factor in (([], 1.0), ([1, 2], 1.0), ([1, 2], float("inf")), ([3], 1.0)):
        before = embedding.weight.detach().clone()
        with accumulator.micro_batch(weight=1):
            rows = embedding(torch.tensor(tokens, dtype=torch.int64))
            accumulator.backward((rows.sum() + empty.sum()) * factor)
        skipped = factor != 1
        assert accumulator.last.skipped == skipped
        before[[] if skipped else tokens] -= 0.1
        torch.testing.assert_close(embedding.weight, before)
    assert scaler.get_scale() == 32


SHARDED = (
    COMMON
    + """
from torch import nn
from tests.train.test_synchronizations import Reads

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
    # Not a number on one rank alone, and only in what that one has of the weights.
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
    """All ranks skip where one has a gradient that is no number."""
    found = run_ranks(SHARDED, tmp_path, 2)
    assert [skipped for skipped, *_ in found] == 2 * [[False, False, True, False, False]]
    assert max(worst for _, worst, *_ in found) < 1e-6
    assert [least for _, _, least, _ in found] == [1, 0]
    assert [scale for *_, scale in found] == [4, 4]
