"""A whole training step of modules, as most tests of measuring take one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from torchbudget import MeasuredCost, measure_cost
from torchbudget.machine.process_tree import process_memory

Step = Callable[[Any], None]
SGD: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1)


def step_of(
    loss_of: Callable[[Any], torch.Tensor],
    *parts: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer] = SGD,
) -> Step:
    """The loss's backward, a step of an optimizer over all parts, and no gradients that stay."""
    trained = optimizer(nn.ModuleList(parts).parameters())

    def step(batch: Any) -> None:
        loss_of(batch).backward()
        trained.step()
        trained.zero_grad()

    return step


def ones(n: int, size: int) -> torch.Tensor:
    """A batch of 32 numbers for each unit."""
    return torch.ones(n, size, 32)


def measured_with(mib: int, step: Step, make_batch: Any = ones, **options: Any) -> MeasuredCost:
    """The cost under a budget of so many MiB more than this process takes."""
    budget = process_memory().resident_bytes + mib * 2**20
    return measure_cost(step, make_batch, budget=budget, **options)


def of_shape(make_batch: Callable[[int, Any], Any], shape: tuple[int, ...]) -> Any:
    """The batch of a shape `(n, *size)`, as tracers ask for it."""
    n, *size = shape
    return make_batch(n, tuple(size) if len(size) > 1 else size[0])
