"""An epoch of training, and an evaluation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.train.test_fit import Training, loss_of, samples, tokens
from torchbudget import GradAccumulator, PadCollate, evaluate, train_epoch


def test_an_evaluation_is_that_of_the_whole() -> None:
    """Whatever the batches, in evaluation mode, which is then what it was."""
    training = Training()
    model = training.model
    model.head.eval()
    modes = [module.training for module in model.modules()]
    found = evaluate(model, training.validation, loss_of, weight=tokens)
    assert [module.training for module in model.modules()] == modes
    [batch] = DataLoader(samples(20, 9), batch_size=20, collate_fn=PadCollate())
    model.eval()
    assert found == pytest.approx(loss_of(model, batch).item() / batch.num_tokens, rel=1e-6)
    mean = evaluate(
        model, training.validation, lambda m, b: loss_of(m, b) / tokens(b), weight=tokens, mean=True
    )
    assert mean == pytest.approx(found, rel=1e-6)
    assert math.isnan(evaluate(model, [], loss_of))


def test_tensors_and_a_last_incomplete_step() -> None:
    """Plain tensors weigh their samples; what is left of a step is taken at the end."""
    model = nn.Linear(3, 1)
    accumulator = GradAccumulator(torch.optim.SGD(model.parameters(), lr=0.1), model, steps=2)
    steps = train_epoch(
        model,
        torch.ones(10, 3).split(4),
        lambda m, batch: m(batch).square().sum(),
        accumulator,
        device="cpu",
    )
    assert [step.weight for step in steps] == [8, 2]
