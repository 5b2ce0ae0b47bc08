"""How often the loops read a tensor's value: as in `test_synchronizations.py`, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.large_steps import Data, loss_sum, make_model
from tests.support.reads import Reads, sgd
from torchbudget import GradAccumulator, evaluate, fit, train_epoch
from torchbudget.train import loop as loop_module
from torchbudget.train import step as step_module
from torchbudget.train.step import Step

BATCHES = [Data.make(4, seed) for seed in range(8)]
WEIGHTS = {id(batch): batch.weight for batch in BATCHES}


def number_of(batch: Data) -> int:
    """The labels that count, without a read."""
    return WEIGHTS[id(batch)]


def tensor_of(batch: Data) -> Tensor:
    """The same as a tensor, which stands for one on a device."""
    return (batch.y != -100).sum()


@pytest.fixture
def made() -> tuple[nn.Module, GradAccumulator]:
    model = make_model("CNN")
    return model, GradAccumulator(sgd(model), model, steps=2, max_norm=0.1)


def unread(steps: list[Step]) -> int:
    """How many numbers of steps are tensors still."""
    return sum(isinstance(value, Tensor) for step in steps for value in vars(step).values())


def test_an_epoch_reads_no_step_until_many_are_there(
    made: tuple[nn.Module, GradAccumulator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all of them at once: numbers that stay on the device take memory there."""
    monkeypatch.setattr(loop_module, "_UNREAD", 3)
    model, accumulator = made
    with Reads() as reads:
        steps = train_epoch(model, BATCHES, loss_sum, accumulator, weight=number_of)
    assert len(steps) == 4
    assert reads.names == ["tolist"]
    assert unread(steps) == 2
    assert all(type(step.loss) is float for step in steps)


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
