"""How often the accumulator reads a tensor's value, which on a device waits for all of its work."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.large_steps import Data, loss_sum, make_model
from tests.support.ranks import run_ranks
from tests.support.reads import Reads, sgd
from tests.train.test_accumulator_ranks import COMMON
from torchbudget import GradAccumulator
from torchbudget.train import step as step_module
from torchbudget.train.step import Step, float64_device, in_float64

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
from tests.support.reads import Reads, sgd

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
