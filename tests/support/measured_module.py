"""A user's module with steps to be measured."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

sys.stdout.write("the module is imported\n")


def to_measure(*, axes: int = 1, empty: bool = False) -> Any:
    """A step and a function that makes its batches; `empty` ones are the same for every shape."""
    model = torch.nn.Linear(16, 100)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(n: int, size: Any) -> torch.Tensor:
        sizes = (size,) if axes == 1 else size
        return torch.zeros(1, 1, 16) if empty else torch.zeros(n, *sizes, 16)

    return step, make_batch


two_axes = partial(to_measure, axes=2)
without_samples = partial(to_measure, empty=True)


def nothing() -> None:
    """No step."""


def broken() -> Any:
    """Fail in the user's own code."""
    raise RuntimeError("of the user's own")
