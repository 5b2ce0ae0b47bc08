"""What micro-batches leave until the optimizer's step, which the cost of one does not contain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchbudget import GradAccumulator, measure_cost
from torchbudget.errors import CostError
from torchbudget.machine.process_tree import process_memory

KINDS = {
    "graph": "gradients that keep their graph",
    "sparse": "sparse gradients",
    "outputs": "tensors in attributes, lists or closures",
    "attribute": "tensors in attributes, lists or closures",
    "of each sample": "tensors in attributes, lists or closures",
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, sparse=kind == "sparse")
        self.layer = nn.Linear(32, 32)
        self.kind = kind
        self.last: torch.Tensor | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.embedding(batch))
        if self.kind == "attribute":
            self.last = found.detach()
        return found


def step_of(kind: str, steps: int, looks: bool = False) -> Callable[[torch.Tensor], None]:
    model = Model(kind)
    kept: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = GradAccumulator(optimizer, module=model, steps=steps)

    def step(batch: torch.Tensor) -> None:
        with accumulator.micro_batch(weight=len(batch)):
            outputs = model(batch)
            if looks:
                torch.nonzero(batch)
            losses = outputs.square().sum((1, 2))
            accumulator.backward(losses.sum(), **{"create_graph": True} if kind == "graph" else {})
            if kind == "outputs":
                kept.append(outputs.detach())
            if kind == "losses":
                kept.append(losses.detach())
            if kind == "of each sample":
                model.layer.weight.grad_sample = torch.zeros(len(batch), 32, 32)  # type: ignore[assignment]
        if accumulator.stepped:
            kept.clear()

    return step


def measured(step: Callable[[torch.Tensor], None], method: Any) -> None:
    budget = process_memory().resident_bytes + 60 * 2**20
    make = lambda n, size: torch.ones((n, size), dtype=torch.int64)  # noqa: E731
    measure_cost(step, make, max_size=64, min_size=16, method=method, budget=budget)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("looks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_grows_is_refused(kind: str, looks: bool) -> None:
    """Each kind is named, whether the step is traced or only run; a trace alone refuses, too."""
    method = "auto" if looks or kind == "sparse" else "trace"  # which has no sparse tensors
    with pytest.raises(CostError, match=KINDS[kind]):
        measured(step_of(kind, 4, looks), method)


@pytest.mark.parametrize("kind", ["losses", "nothing"])
def test_what_hardly_grows_is_not(kind: str) -> None:
    """A loss for each sample, kept for a log, is within the least margin."""
    measured(step_of(kind, 4), "trace")


@pytest.mark.parametrize("kind", ["outputs", "attribute", "of each sample"])
def test_a_step_of_one_micro_batch_is_not(kind: str) -> None:
    """Nothing waits for a step there."""
    measured(step_of(kind, 1), "trace")
