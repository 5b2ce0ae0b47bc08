"""A gradient scaler, and weights on a device: what is read in a step, and what is decided by it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.overrides import TorchFunctionMode

from tests.support.large_steps import Data, loss_sum, make_model
from tests.support.reads import Reads, sgd
from torchbudget import GradAccumulator
from torchbudget.train import step as step_module


def test_split_micro_batches_with_weights_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of nine run out of memory, and are split: the same weights as with numbers."""
    monkeypatch.setattr(step_module, "waits", lambda _: True)
    found = []
    for of_weight in (int, torch.tensor):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).double()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        accumulator = GradAccumulator(optimizer, model, steps=3, scaler=scaler, max_norm=1.0)

        def train(batch: tuple[torch.Tensor, torch.Tensor], most: int) -> None:
            values, labels = batch
            with accumulator.micro_batch(of_weight(len(values))):  # noqa: B023 (called here)
                scores = model(values)  # noqa: B023
                if len(values) > most:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
                accumulator.backward(  # noqa: B023
                    nn.functional.cross_entropy(scores, labels, reduction="sum")
                )

        for number in range(9):
            batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(0, 3, (6,))
            most = {1: 2, 4: 3}.get(number, 6)
            accumulator.run_or_split(partial(train, most=most), batch)
        assert accumulator.out_of_memory == 4
        found.append([*model.parameters(), torch.tensor(scaler.get_scale())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_weights_on_a_device_are_read_with_what_a_scaler_decides(
    monkeypatch: pytest.MonkeyPatch, number: int, fused: bool
) -> None:
    """One read a step; numbers as weights give the same weights of the model and the same scale.

    Of eight steps one has an infinite gradient, and one no weight.
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
        assert reads.names == ["tolist"] * tensors.stepped
        with numbers.micro_batch(weight.item()):
            for model in models[1::2]:
                numbers.backward(loss_sum(model, data) * factor)
        if tensors.stepped:
            assert str(tensors.last) == str(numbers.last)  # in which nan is like nan
            assert tensors.last.skipped == (seed in (5, 11))
            assert scalers[0].state_dict() == scalers[1].state_dict()
    for mine, theirs in zip(models[0::2], models[1::2], strict=True):
        assert all(map(torch.equal, mine.parameters(), theirs.parameters()))


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


def stepped(
    gradient: float, weight: float, dtype: torch.dtype, scaler: torch.amp.GradScaler
) -> tuple[bool, bool]:
    """Whether a step with this gradient, unscaled, is skipped, and whether weights stay finite."""
    model = nn.Linear(4, 1, bias=False, dtype=dtype)
    accumulator = GradAccumulator(sgd(model), model, scaler=scaler)
    with accumulator.micro_batch(weight, last=True):
        accumulator.backward((model(torch.ones(1, 4, dtype=dtype)) * gradient).sum())
    return accumulator.last.skipped, bool(model.weight.isfinite().all())


# A gradient that its dtype has, and a weight that it is divided by, which makes it infinite.
OVERFLOWING = {
    torch.float16: (60_000.0, 0.25),
    torch.bfloat16: (1e38, 1e-3),
    torch.float32: (1e30, 1e-9),
    torch.float64: (1e300, 1e-9),
}


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process, which FSDP's scaler sums over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", OVERFLOWING, ids=str)
def test_what_only_the_weight_makes_infinite_is_not_stepped_with(dtype: torch.dtype) -> None:
    """Of every dtype that may be scaled. The scale is not lowered, which could not help."""
    kind = ShardedGradScaler if dtype is torch.float16 else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=1.0, growth_interval=9)
    gradient, weight = OVERFLOWING[dtype]
    for _ in range(3):
        assert stepped(gradient, weight, dtype, scaler) == (True, True)
    # What is large, and finite, is stepped with.
    assert stepped(gradient / 4, 1.0, dtype, scaler) == (False, True)
    assert scaler.get_scale() == 1


def test_a_step_that_fails_once_its_gradients_are_gone() -> None:
    """The scaler unscales the next ones."""
    model = make_model("CNN")
    optimizer = sgd(model)
    step = optimizer.step

    def fails(*_: Any) -> None:
        optimizer.zero_grad()
        raise KeyError

    accumulator = GradAccumulator(optimizer, model, scaler=torch.amp.GradScaler("cpu"))
    data = Data.make(4)
    for one in (fails, step):
        optimizer.step = one
        with (
            pytest.raises(KeyError) if one is fails else nullcontext(),
            accumulator.micro_batch(data.weight, last=True),
        ):
            accumulator.backward(loss_sum(model, data))
    assert not accumulator.last.skipped


def test_a_loss_on_another_device_than_the_first_parameter() -> None:
    """As with an embedding on the host. Numbers of a meta device cannot be read, but are moved."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    accumulator = GradAccumulator(sgd(model), model)
    moved: list[str] = []

    class Moves(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if getattr(func, "__name__", "") == "to" and args[0].device.type == "meta":
                moved.append(str(args[1]))
                return torch.zeros(args[0].shape, dtype=args[0].dtype)
            return func(*args, **(kwargs or {}))

    with accumulator.micro_batch(1):
        accumulator.backward(model(torch.ones(1, 2)).sum())
    accumulator._pending.loss = torch.ones((), device="meta")
    with Moves():
        accumulator.step()
    assert moved == ["cpu"]
    assert accumulator.last.loss == 0
