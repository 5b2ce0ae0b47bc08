"""How often the accumulator reads a tensor's value, which on a device waits for all of its work.

They are counted on the CPU, where nothing waits: by a dispatch mode that sees each operation that
reads. It would see copies from a device to the host as well, but none can be made without a device.
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
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.large_steps import Data, loss_sum, make_model
from tests.support.ranks import run_ranks
from tests.train.test_accumulator_ranks import COMMON
from torchbudget import GradAccumulator
from torchbudget.train import step as step_module
from torchbudget.train.step import Step, float64_device, in_float64

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "_assert_async"}


class Reads(TorchDispatchMode):
    """The names of the operations inside that read a tensor's value, or copy it to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

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
    """No read in a micro-batch, none in a step; loss and norm take one each, when first asked."""
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
            for _ in range(2):
                assert isinstance(step.loss, float)
            assert reads.names == ["_local_scalar_dense"]
            norms = [step.gradient_norm, step.gradient_norm]
            assert reads.names == ["_local_scalar_dense"] * (1 + ("max_norm" in OPTIONS[case]))
            assert norms[0] == norms[1]


def test_a_scaler_takes_one_read_a_step() -> None:
    """It is torch's own, which decides whether the optimizer steps."""
    model = make_model("CNN")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulator = GradAccumulator(sgd(model), model, steps=2, scaler=scaler)
    for seed in range(6):
        data = Data.make(4, seed)
        weight = data.weight
        with Reads() as reads, accumulator.micro_batch(weight):
            accumulator.backward(loss_sum(model, data) * (float("inf") if seed == 3 else 1))
        assert reads.names == ["_local_scalar_dense"] * accumulator.stepped
        if accumulator.stepped:
            assert accumulator.last.skipped == (seed == 3)


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
        assert reads.names == ["_local_scalar_dense"] * (seed == 2)
        with numbers.micro_batch(weight.item()):
            numbers.backward(loss_sum(by_numbers, data))
    assert tensors.last == numbers.last
    for one, other in zip(model.parameters(), by_numbers.parameters(), strict=True):
        assert torch.equal(one, other)


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
    """What decides about a step is summed on the host, and comes from no device."""
    assert run_ranks(RANKS, tmp_path, 2) == 2 * [[[]] * 6]
