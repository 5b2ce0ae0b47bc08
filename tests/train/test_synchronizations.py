"""How often the accumulator reads a tensor's value, which on a device waits for all of its work."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.large_steps import Data, accumulating, loss_sum, make_model, sgd
from tests.support.reads import Reads
from torchbudget import GradAccumulator, evaluate, fit
from torchbudget.train import step as step_module
from torchbudget.train.step import Step

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.1},
    "mean": {"mean": True},
    "divided": {"divisor": 8.0, "max_norm": float("inf")},
}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_nothing_is_read_until_it_is_asked_for(case: str, splits: bool) -> None:
    """No read in a micro-batch, none in a step; loss and norm take one, when one is first asked.

    Nor does `run_or_split` read anything of what it may have to restore.
    """
    accumulator, model = accumulating(steps=3, **OPTIONS[case])

    def train(part: tuple[Tensor, ...]) -> None:
        with accumulator.micro_batch(weight):
            loss = loss_sum(model, Data(*part))
            accumulator.backward(loss / weight if accumulator.mean else loss)

    for _ in range(3):
        with Reads() as reads:
            for seed in range(3):
                data = Data.make(4, seed)
                weight = data.weight
                reads.names.clear()
                run = partial(accumulator.run_or_split, train) if splits else train
                run((data.x, data.y))
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


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("scales", [False, True])
def test_weights_on_a_device_are_read_at_the_step(
    monkeypatch: pytest.MonkeyPatch, number: int, scales: bool
) -> None:
    """With what a scaler decides: one read a step; numbers as weights make the same step.

    Tensors on the CPU stand for those on a device. Of eight steps one has an infinite gradient,
    and one no weight.
    """
    monkeypatch.setattr(step_module, "waits", lambda _: True)
    made = []
    for _ in range(2):
        models = [make_model("CNN") for _ in range(number)]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scales else None
        options = {"steps": 2, "scaler": scaler, "max_norm": 0.1}
        made.append((models, GradAccumulator([*map(sgd, models)], models, **options)))
    for seed in range(16):
        data = Data.make(4, seed)
        weight = (data.y != -100).sum() * (seed not in (10, 11))
        if seed % 3 == 1:
            weight = weight[None, None]  # one number, in axes of its own
        infinite = torch.tensor(float("inf") if seed == 5 and scales else float(weight.item() > 0))
        for (models, accumulator), given in zip(made, (weight, weight.item()), strict=True):
            with Reads() as reads, accumulator.micro_batch(given):
                for model in models:
                    accumulator.backward(loss_sum(model, data) * infinite)
            reads_at_step = accumulator.stepped and (scales or given is weight)
            assert reads.names == ["tolist"] * reads_at_step
        tensors, numbers = (accumulator for _, accumulator in made)
        if tensors.stepped:
            assert str(tensors.last) == str(numbers.last)  # in which nan is like nan
            assert tensors.last.skipped == (seed == 11 or (scales and seed == 5))
    states = [
        [accumulator.training_state(), *(model.state_dict() for model in models)]
        for models, accumulator in made
    ]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"mean": True}, {"weight": 1e9}], ids=["mean", "weight"])
def test_weights_on_a_device_that_are_needed_sooner(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Where the loss is multiplied by them, or they end steps: one read for each micro-batch."""
    monkeypatch.setattr(step_module, "waits", lambda _: True)
    accumulator, model = accumulating(**options)
    for seed in range(4):
        data = Data.make(4, seed)
        number = data.weight
        weight = torch.tensor(number)
        with Reads() as reads, accumulator.micro_batch(weight, last=seed == 3):
            accumulator.backward(loss_sum(model, data) / (number if accumulator.mean else 1))
        assert len(reads.names) == 1


def test_a_step_is_a_plain_record() -> None:
    """Whether its numbers were read or not: fields, copies, pickles and text."""
    numbers = {"number": 1, "weight": 2.0, "micro_batches": 3, "skipped": False}
    late = Step(loss=torch.tensor(0.5), gradient_norm=torch.tensor(4.0), **numbers)
    plain = Step(loss=0.5, gradient_norm=4.0, **numbers)
    copied = pickle.loads(pickle.dumps(late))  # noqa: S301  (of this line)
    assert asdict(copied) == asdict(plain)
    assert copy.deepcopy(late) == replace(late, loss=0.5) == plain
    assert repr(late) == repr(plain)


# ---------------------------------------------------------------------- loops

BATCHES = [Data.make(4, seed) for seed in range(8)]
WEIGHTS = {id(batch): batch.weight for batch in BATCHES}


def number_of(batch: Data) -> int:
    """The labels that count, without a read."""
    return WEIGHTS[id(batch)]


def tensor_of(batch: Data) -> Tensor:
    """The same as a tensor, which stands for one on a device."""
    return (batch.y != -100).sum()


@pytest.mark.parametrize(("scales", "folder"), [(False, False), (True, False), (False, True)])
def test_a_training_reads_its_loss_once_an_epoch(
    tmp_path: Path, scales: bool, folder: bool
) -> None:
    """With a scaler once a step more, which is torch's; in a folder each step is written, after it.

    The epoch's loss is what the steps' losses sum up to, to the bit.
    """
    losses = []
    for option in range(2):  # the same training, with and without someone who reads each step
        model = make_model("CNN")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scales else None
        accumulator = GradAccumulator(sgd(model), model, steps=2, max_norm=0.1, scaler=scaler)
        counts: list[int] = []
        here = tmp_path / str(option) if folder else None

        def criterion(model: nn.Module, batch: Data, counts: list[int] = counts) -> Tensor:
            counts.append(len(reads.names))
            return loss_sum(model, batch)

        def ask(record: object) -> None:
            if isinstance(record, Step):
                assert record.loss == record.loss

        options: dict[str, Any] = {"epochs": 1, "weight": number_of, "folder": here}
        options["callbacks"] = [ask] * option
        with Reads() as reads:
            history = fit(model, BATCHES, criterion, accumulator, progress=False, **options)
        losses.append(history[0].loss)
        each = (counts[-1] - counts[0]) / 3  # three steps were taken between them
        assert each == scales + bool(folder or option)
        assert (
            len(reads.names) - counts[-1] <= 3 + scales
        )  # the last step, the epoch, and the files
    assert losses[0] == losses[1]
    if folder:
        lines = (tmp_path / "0" / "statistics.jsonl").read_text().splitlines()
        assert all(json.loads(line)["loss"] > 0 for line in lines)


@pytest.mark.parametrize("mean", [False, True])
def test_an_evaluation_reads_at_its_end(mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of weights on a device, whose sum is read; means are multiplied by each of them."""
    monkeypatch.setattr(step_module, "waits", lambda _: True)
    model = make_model("CNN")

    def criterion(model: nn.Module, batch: Data) -> Tensor:
        return loss_sum(model, batch) / (number_of(batch) if mean else 1)

    with Reads() as reads:
        by_numbers = evaluate(model, BATCHES, criterion, weight=number_of, mean=mean)
    assert reads.names == ["tolist"]
    with Reads() as reads:
        by_tensors = evaluate(model, BATCHES, criterion, weight=tensor_of, mean=mean)
    assert len(reads.names) == (len(BATCHES) + 1 if mean else 2)
    assert by_tensors == by_numbers
