"""Optimizer steps over 4,096 texts, in 1 GiB for the whole process.

    python examples/large_batch.py --budget 1GiB --samples-per-step 4096

The byte-level transformer of `train_text.py` learns docstrings of Python's standard library. The
cost of a micro-batch is measured; the sampler cuts each step's samples into micro-batches that fit;
`GradAccumulator` makes of them the step of the one large batch: the mean over all bytes of all of
its samples, clipped once. A row for each step tells loss, bytes of text, gradient norm,
micro-batches, seconds, and the peak of resident memory as the kernel counted it.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import torch
from torch.utils.data import DataLoader
from train_text import ByteData, at_least, docstrings, loss_sum, measured_cost, new_model

from torchbudget import (
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PadCollate,
    TorchBudgetError,
    memory_summary,
    parse_bytes,
    peak_memory,
    sizes_of,
)


def train(options: argparse.Namespace) -> None:
    """Measure, then train, a row for each step."""
    texts = list(islice(docstrings(options.seed), options.samples))
    data = ByteData(texts, options.max_length)
    model, optimizer = new_model(options)
    print(memory_summary(model, optimizer), end="\n\n")
    sampler = MemoryBudgetBatchSampler(
        sizes_of(data, "ids", progress=False),
        measured_cost(model, optimizer, options),
        options.budget_bytes,
        samples_per_step=options.samples_per_step,
        seed=options.seed,
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())
    accumulator = GradAccumulator(optimizer, model, steps=sampler, max_norm=1.0)

    names = (
        "step",
        "samples",
        "bytes",
        "micro-batches",
        "loss",
        "norm",
        "seconds",
        "peak / budget",
    )
    print("  ".join(names))
    highest, samples, began_s = 0, 0, time.perf_counter()
    for _ in range(options.epochs):
        for batch in loader:
            samples += batch.num_samples
            with (
                peak_memory(options.device) as peak,
                accumulator.micro_batch(weight=batch.num_tokens),
            ):
                accumulator.backward(loss_sum(model, batch))
            highest = max(highest, peak.bytes)
            if accumulator.stepped:
                step = accumulator.last
                cells = (
                    f"{step.number:,}",
                    f"{samples:,}",
                    f"{step.weight:,.0f}",
                    f"{step.micro_batches:,}",
                    f"{step.loss:.4f}",
                    f"{step.gradient_norm:.4f}",
                    f"{time.perf_counter() - began_s:.1f}",
                    f"{highest / options.budget_bytes:.3f}",
                )
                print("  ".join(map(str.rjust, cells, map(len, names))))
                highest, samples, began_s = 0, 0, time.perf_counter()
        accumulator.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train with large batches in little memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", default="1GiB", help="memory of this process")
    add("--samples", type=at_least(1), default=8192, help="docstrings to train on")
    add("--samples-per-step", type=at_least(1), default=4096, help="docstrings in a step")
    add("--epochs", type=at_least(1), default=1)
    add("--max-length", type=at_least(1), default=256, help="bytes at which docstrings are cut")
    add("--seed", type=at_least(0), default=0, help="of docstrings, weights and order")
    options = parser.parse_args()
    options.device = "cpu"
    torch.manual_seed(options.seed)
    try:
        options.budget_bytes = parse_bytes(options.budget)
        train(options)
    except TorchBudgetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
