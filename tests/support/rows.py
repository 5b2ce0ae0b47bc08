"""Rows of samples in models of transformers: each sample gives what it gives alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def check_as_alone(
    model: Any, samples: list[Any], batch: Any, parts: int, alone_of: Callable[[Any], Any]
) -> None:
    """Logits of one row, and of its parts, are those of samples alone to 1e-5; gradients to 1e-4.

    Args:
        model: a model in training mode.
        samples: those of the batch.
        batch: the row.
        parts: into how many it is split.
        alone_of: the model's arguments for one sample.
    """

    def gradients() -> list[Tensor | None]:
        found = [p.grad for p in model.parameters()]
        model.zero_grad()
        return found

    def of_each(part: Any, logits: Tensor) -> list[Tensor]:
        return [logits[place] for place in part._known.layouts["input_ids",].places]

    output = model(**batch)
    (output.loss * batch["labels"].ne(-100).sum()).backward()  # a mean over those labels
    together = gradients()
    with torch.no_grad():
        split = [one for part in batch.split(parts) for one in of_each(part, model(**part).logits)]
    whole = of_each(batch, output.logits)
    for sample, logits, of_part in zip(samples, whole, split, strict=True):
        alone = model(**alone_of(sample)).logits[0]
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-5)
        torch.testing.assert_close(of_part, alone, rtol=0, atol=1e-5)
        labels = sample.get("labels", sample["input_ids"])
        cross_entropy(alone[:-1], labels[1:], reduction="sum").backward()
    for mine, expected in zip(together, gradients(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
