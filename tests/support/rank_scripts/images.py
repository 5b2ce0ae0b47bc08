"""Two ranks that train on texts with images, of which one has none in a micro-batch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.images_beside_text import collate, text_with_images, vision_model
from tests.support.rank_scripts import join
from torchbudget import GradAccumulator

# Images of the samples of each micro-batch, on each rank: a round in which one has none, first or
# last of the step; and a rank without any.
STEPS = {
    "last": ([[0, 2], [1, 0]], [[1, 1], [0, 0]]),
    "first": ([[0, 0], [1, 0]], [[2, 1], [0, 3]]),
    "never": ([[0, 0], [0, 0]], [[2, 1], [0, 3]]),
    "nobody": ([[0, 0], [0, 0]], [[0, 0], [0, 0]]),
}


def batches(model: Any, images: list[list[int]], rank: int) -> list[Any]:
    return [
        collate(
            [text_with_images(model, one, 100 * rank + 10 * k + i) for i, one in enumerate(own)]
        )
        for k, own in enumerate(images)
    ]


def summed(model: Any, batch: Any) -> Tensor:
    """The summed loss, of which the model has the mean."""
    return model(**batch).loss * batch["labels"].ne(-100).sum()


def no_image(model: Any) -> Tensor:
    """The smallest image, times 0: every parameter of the vision part has a gradient."""
    pixels = torch.zeros(4, 3 * 2 * 14 * 14)
    made = model.model.visual(pixels, torch.tensor([[1, 2, 2]])).pooler_output
    return 0 * made.sum()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def away(found: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest difference; one that is missing is 0."""
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if (a, b) != (None, None)]
    zeros = torch.zeros(())
    return max(
        float(((zeros if a is None else a) - (zeros if b is None else b)).abs().max())
        for a, b in pairs
    )


def gradients_of_steps() -> dict[str, Any]:
    """How far the gradient of two ranks is from one process's, for each way and step."""
    rank, ranks = join()
    model, found = vision_model().double(), {}
    for name, images in STEPS.items():
        every = [batches(model, own, number) for number, own in enumerate(images)]
        alone = copy.deepcopy(model)
        for batch in (batch.to(torch.float64) for own in every for batch in own):
            summed(alone, batch).backward()
        mine = [batch.to(torch.float64) for batch in every[rank]]

        def by_accumulator(mine: list[Any] = mine) -> nn.Module:
            parallel = DistributedDataParallel(copy.deepcopy(model))
            optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
            kept: list[Any] = []
            optimizer.register_step_pre_hook(lambda *_: kept.append(gradients(parallel)))
            accumulator = GradAccumulator(optimizer, parallel, steps=2)
            for batch in mine:
                with accumulator.micro_batch(weight=0.5 / ranks):
                    accumulator.backward(summed(parallel, batch))
            for parameter, own in zip(parallel.parameters(), kept[0], strict=True):
                parameter.grad = own
            return parallel

        def by_ddp(*, unused: bool, mine: list[Any] = mine) -> nn.Module:
            parallel = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=unused)
            for batch in mine:
                with parallel.no_sync() if batch is not mine[-1] else nullcontext():
                    loss = summed(parallel, batch)
                    if not unused and "pixel_values" not in batch:
                        loss = loss + no_image(parallel.module)
                    (ranks * loss).backward()  # DDP takes the mean over ranks
            return parallel

        expected = gradients(alone)
        ways = {
            "accumulator": by_accumulator(),
            "unused": by_ddp(unused=True),
            "image": by_ddp(unused=False),
        }
        vision = list(model.model.visual.parameters())
        found[name] = {way: away(gradients(one), expected) for way, one in ways.items()}
        found[name]["missing"] = sum(
            p.grad is None for p in ways["accumulator"].module.model.visual.parameters()
        )
        found[name]["of"] = len(vision)
    return found
