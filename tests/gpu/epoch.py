"""An epoch of ragged shapes on a GPU: `python -m tests.gpu.epoch CASE MIB` prints its figures."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import Any

import numpy as np
import torch

from tests.support.training_cases import CASES, Training
from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    configure_allocators,
    limit_device_memory,
    measure_cost,
)
from torchbudget.machine.device import device_memory

MIB = 2**20


def on_card(name: str) -> Training:
    """A case with its model and its batches on the GPU; in bfloat16 where its name says so."""
    made = CASES[name]()
    made.model.to("cuda")

    def make_batch(n: int, size: Any) -> Any:
        return {key: tensor.cuda() for key, tensor in made.make_batch(n, size).items()}

    def step(batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=name.endswith("bfloat16")):
            return made.step(batch)

    return dataclasses.replace(made, make_batch=make_batch, step=step)


def outside_bytes() -> int:
    """What this process uses outside torch's allocator."""
    memory = device_memory("cuda")
    return memory.outside_bytes(memory.source.figures())


def run(
    training: Training, cost: MeasuredCost, budget: int, batches: int = 120
) -> dict[str, float | int]:
    """Figures of so many batches: the peak over the budget, failures, retries."""
    ends = np.atleast_1d(training.max_size)
    rng = np.random.default_rng(0)
    sizes = np.clip(ends * rng.lognormal(-2, 0.8, (8000, len(ends))), 1, ends).astype(int)
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    samples = 0
    for batch in itertools.islice(sampler, batches):
        samples += len(batch)
        size = tuple(sizes[batch].max(0).tolist())
        training.step(training.make_batch(len(batch), size if len(size) > 1 else size[0]))
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return {
        "samples": samples,
        "share": (torch.cuda.max_memory_reserved() + outside_bytes()) / budget,
        "failures": after["num_ooms"] - before["num_ooms"],
        "retries": after["num_alloc_retries"] - before["num_alloc_retries"],
    }


def epoch(name: str, budget: int) -> dict[str, dict[str, float | int]]:
    """Figures of an epoch that is not limited, then of one that is; measured before both."""
    training = on_card(name)
    cost = measure_cost(
        training.step, training.make_batch, max_size=training.max_size, budget=budget
    )
    free = run(training, cost, budget)
    limit_device_memory(budget, "cuda")
    return {"free": free, "limited": run(training, cost, budget)}


if __name__ == "__main__":
    configure_allocators()  # whose variables the environment may have stated otherwise
    print(json.dumps(epoch(sys.argv[1], int(sys.argv[2]) * MIB)))  # noqa: T201  (its result)
