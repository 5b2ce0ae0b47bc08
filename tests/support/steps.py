"""A whole training step of modules, as most tests of measuring take one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

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
