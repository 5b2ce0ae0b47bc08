"""Ragged shapes on a GPU: `python -m tests.gpu.epoch CASE MIB [--batches N]` prints their figures.

With `--batches 100000` it is the long run, which prints its figures so far every 1,000 batches.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tests.support.commands import printed_by
from tests.support.training_cases import CASES, Training
from torchbudget import (
    MeasuredCost,
    MemoryBudgetBatchSampler,
    configure_allocators,
    limit_device_memory,
    measure_cost,
    parse_bytes,
)
from torchbudget.machine.device import device_memory
from torchbudget.machine.peaks import peak_memory

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


def printed_json(*arguments: Any, expandable: str = "True") -> Any:
    """The last line that another process of Python prints, with such segments of the allocator."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    stated = dict.fromkeys(names, f"expandable_segments:{expandable}")
    return json.loads(printed_by(arguments, **stated).splitlines()[-1])


def outside_bytes() -> int:
    """What this process uses outside torch's allocator."""
    memory = device_memory("cuda")
    return memory.outside_bytes(memory.source.figures())


def sizes_of(training: Training) -> Any:
    """Of 8,000 samples: log-normal, an eighth of the largest on average, on every axis."""
    ends = np.atleast_1d(training.max_size)
    rng = np.random.default_rng(0)
    sizes = np.clip(ends * rng.lognormal(-2, 0.8, (8000, len(ends))), 1, ends).astype(int)
    return sizes if len(ends) > 1 else sizes[:, 0]


def shapes_of(training: Training, cost: MeasuredCost, budget: int) -> Iterator[tuple[int, Any]]:
    """The shapes of the planned batches, epoch after epoch."""
    sizes = sizes_of(training)
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in sampler:
            size = sizes[batch].max(0)
            yield len(batch), tuple(size.tolist()) if size.ndim else int(size)


def run(
    training: Training, cost: MeasuredCost, budget: int, batches: int = 120
) -> dict[str, float | int]:
    """The peak over the budget, failures and retries of so many batches; printed every 1,000."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, samples, began_s = torch.cuda.memory_stats(), 0, time.perf_counter()

    def figures(number: int) -> dict[str, float | int]:
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()
        return {
            "batches": number,
            "samples a second": samples / (time.perf_counter() - began_s),
            "share": (torch.cuda.max_memory_reserved() + outside_bytes()) / budget,
            "failures": after["num_ooms"] - before["num_ooms"],
            "retries": after["num_alloc_retries"] - before["num_alloc_retries"],
        }

    shapes = itertools.islice(shapes_of(training, cost, budget), batches)
    for number, (n, size) in enumerate(shapes):
        if number % 1000 == 999:
            print(json.dumps(figures(number)), flush=True)  # noqa: T201
        samples += n
        training.step(training.make_batch(n, size))
    return figures(batches)


def errors_of(training: Training, cost: MeasuredCost, budget: int, number: int = 40) -> list[float]:
    """How far so many planned batches are from what was predicted, each on an empty cache.

    The prediction has what shapes in turn keep reserved beyond the largest of them; one step alone
    does not, so that it is added here.
    """
    in_turn = next(note for note in cost.notes if "added for alternating shapes" in note)
    reserve = parse_bytes(in_turn.partition(" are added")[0])
    errors = []
    for n, size in itertools.islice(shapes_of(training, cost, budget), number):
        device_memory("cuda").source.empty_cache()
        with peak_memory("cuda") as peak:
            training.step(training.make_batch(n, size))
        predicted = int(dataclasses.replace(cost, margin=0.0).batch_bytes(n, size))
        errors.append(predicted / (peak.bytes + reserve) - 1)
    return errors


def measured(training: Training, budget: int) -> MeasuredCost:
    return measure_cost(
        training.step, training.make_batch, max_size=training.max_size, budget=budget
    )


def epoch(name: str, budget: int, batches: int = 120) -> dict[str, Any]:
    """Figures of batches that are not limited, then of some that are; measured before both."""
    training = on_card(name)
    cost = measured(training, budget)
    errors = np.abs(errors_of(training, cost, budget))
    free = run(training, cost, budget, batches)
    limit_device_memory(budget, "cuda")
    limited = run(training, cost, budget)
    return {"free": free, "limited": limited, "error": float(np.median(errors))}


if __name__ == "__main__":
    configure_allocators()  # whose variables the environment may have stated otherwise
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("mib", type=int, help="the budget")
    parser.add_argument("--batches", type=int, default=120)
    given = parser.parse_args()
    print(json.dumps(epoch(given.case, given.mib * MIB, given.batches)))  # noqa: T201
