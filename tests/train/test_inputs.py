"""Arguments that are refused, and what the error says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.large_steps import make_model, sgd
from torchbudget import GradAccumulator, evaluate
from torchbudget.errors import OptionError

PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"steps": 0}, "steps must be an int of at least 1"),
        ({"steps": True}, "steps must be an int of at least 1"),
        ({"steps": 2, "samples": 3}, "one of steps, samples and weight"),
        ({"samples": 0.5}, "samples must be an int of at least 1"),
        ({"weight": -1}, "weight must be a positive"),
        ({"max_norm": 0}, "max_norm must be"),
        ({"divisor": 0}, "divisor must be"),
        ({"optimizer": []}, "needs an optimizer"),
        ({"optimizer": 3}, "optimizer must be of Optimizer"),
        ({"module": [3]}, "module must be of Module"),
        ({"optimizer": torch.optim.LBFGS([torch.zeros(1)])}, "LBFGS"),
        ({"scheduler": PLATEAU}, "needs a metric"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], said: str) -> None:
    model = make_model("CNN")
    with pytest.raises(OptionError, match=said):
        GradAccumulator(**{"optimizer": sgd(model), "module": model} | arguments)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "3", True, torch.ones(2)])
def test_bad_weights(weight: Any) -> None:
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    with pytest.raises(OptionError, match="weight must be"), accumulator.micro_batch(weight=weight):
        pass
    with pytest.raises(OptionError, match="weight must be"):
        evaluate(model, [torch.ones(2, 3)], lambda *_: torch.ones(()), weight=lambda _: weight)


@pytest.mark.parametrize("loss", [1.5, (torch.ones(()),), {"loss": torch.ones(())}, None])
def test_losses_that_are_no_tensors(loss: Any) -> None:
    """As of `item()`, or of a model that returns its loss among others."""
    model = make_model("CNN")
    accumulator = GradAccumulator(sgd(model), model, steps=2)
    with pytest.raises(OptionError, match="scalar tensor"), accumulator.micro_batch(weight=1):
        accumulator.backward(loss)
    with pytest.raises(OptionError, match="scalar tensor"):
        evaluate(model, [torch.ones(2, 3)], lambda *_: loss)
