"""Optimizers that train other weights than they return, as schedule-free ones do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch

from tests.train.test_fit import Training, assert_equal, loss_of, tokens
from torchbudget import GradAccumulator, evaluate
from torchbudget.train.step import Step


class ScheduleFree(Training):
    """A training whose optimizer averages weights instead of lowering the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = schedulefree.AdamWScheduleFree(self.model.parameters(), lr=0.03)
        self.accumulator = GradAccumulator(self.optimizer, self.model, steps=self.sampler)

    def validated(self) -> float:
        return evaluate(self.model, self.validation, loss_of, weight=tokens)


def test_the_returned_weights_are_validated_saved_and_left(tmp_path: Path) -> None:
    run = ScheduleFree()
    epochs = run.fit(epochs=2, folder=tmp_path)
    assert not run.optimizer.param_groups[0]["train_mode"]
    assert run.validated() == epochs[-1].validation
    best = torch.load(tmp_path / "best.pt")
    torch.testing.assert_close(best, run.model.state_dict(), rtol=0, atol=0)
    run.optimizer.train()
    assert run.validated() != epochs[-1].validation


@pytest.mark.parametrize("at", [[1], [4, 5], [8]])
def test_stopped_and_resumed_is_uninterrupted(at: list[int], tmp_path: Path) -> None:
    """At the end of an epoch, where the weights change, and within one: bit for bit."""
    torch.manual_seed(11)
    whole = ScheduleFree()
    expected = whole.fit()
    torch.manual_seed(11)
    for stop in [*at, math.inf]:
        part = ScheduleFree()
        found = part.fit_until(Step, stop, folder=tmp_path)
    assert_equal(part.model, whole.model)
    assert [one.validation for one in found] == [one.validation for one in expected]


def test_a_training_that_was_ended_returns_them_again(tmp_path: Path) -> None:
    """By a callback, in the middle of an epoch; the next call only loads what was saved."""

    def ends(record: Any) -> bool:
        return isinstance(record, Step) and record.number == 3

    run, again = ScheduleFree(), ScheduleFree()
    run.fit(folder=tmp_path, callbacks=[ends])
    again.fit(folder=tmp_path)
    assert_equal(again.model, run.model)
