"""A model of a class, with its training step and the box of shapes that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.training_cases import (
    ADAMW,
    Batch,
    MakeBatch,
    MakeOptimizer,
    Training,
    training,
)


@dataclass(frozen=True)
class Case(Training):
    """A `Training` that steps on 1 to `max_n` samples of `min_size` to `max_size`.

    Attributes:
        min_size: the smallest size on every axis.
        max_n: the most samples to compare; fewer where the step loops over them.
        multiple: what all patches, strides and windows of the layers divide; 1: there are none.
    """

    min_size: int = 1
    max_n: int = 256
    multiple: int = 1


def case(
    model: nn.Module,
    loss_of: Callable[[Any, Batch], torch.Tensor],
    make_batch: MakeBatch,
    max_size: int | tuple[int, ...],
    optimizer: MakeOptimizer = ADAMW,
    *,
    autocast: bool = False,
    min_size: int = 1,
    max_n: int = 256,
    multiple: int = 1,
) -> Case:
    made = training(model, loss_of, make_batch, max_size, optimizer, autocast=autocast)
    return Case(
        made.model,
        made.optimizer,
        made.step,
        made.make_batch,
        max_size,
        min_size=min_size,
        max_n=max_n,
        multiple=multiple,
    )


def lengths(n: int, longest: int) -> torch.Tensor:
    """Random lengths of n samples, at least one of which is the longest, shape `(n,)`."""
    drawn = torch.randint(1, longest + 1, (n,))
    drawn[0] = longest
    return drawn
