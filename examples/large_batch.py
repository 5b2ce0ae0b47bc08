"""Optimizer steps over 4,096 texts, in 1 GiB for the whole process.

    python examples/large_batch.py --budget 1GiB --samples-per-step 4096

The byte-level transformer of `train_text.py` learns docstrings of Python's standard library. The
cost of a micro-batch is measured, the sampler cuts the samples of each step into micro-batches that
fit, and `GradAccumulator` adds them up to the step of the one large batch: the mean over all bytes
of all its samples, clipped once. Each row of the table is a step: loss, bytes of text, gradient
norm, micro-batches, seconds, and the peak of resident memory as the kernel counted it.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import torch
from torch.utils.data import DataLoader
from train_text import ByteData, Transformer, docstrings, loss_sum, measured_cost

from torchbudget import (
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PadCollate,
    TorchBudgetError,
    configure_allocators,
    memory_summary,
    parse_bytes,
    sizes_of,
)
from torchbudget.machine.peaks import peak_memory

HEADER = "step  samples    bytes  micro-batches    loss    norm  seconds  peak / budget"


def train(options: argparse.Namespace) -> None:
    configure_allocators()  # freed memory is returned: ragged batches need ever new shapes
    torch.manual_seed(options.seed)
    data = ByteData(islice(docstrings(options.seed), options.samples), options.max_length)
    model = Transformer(options.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    print(memory_summary(model, optimizer), end="\n\n")

    sampler = MemoryBudgetBatchSampler(
        sizes_of(data, "ids"),
        measured_cost(model, optimizer, options.max_length, options.budget),
        options.budget,
        samples_per_step=options.samples_per_step,
        seed=options.seed,
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())
    accumulator = GradAccumulator(optimizer, model, steps=sampler, max_norm=1.0)

    print(HEADER)
    budget_bytes = parse_bytes(options.budget)
    highest, samples, began_s = 0, 0, time.perf_counter()
    for _ in range(options.epochs):
        for batch in loader:
            samples += batch.num_samples
            with peak_memory("cpu") as peak, accumulator.micro_batch(weight=batch.num_tokens):
                accumulator.backward(loss_sum(model, batch))
            highest = max(highest, peak.bytes)
            if accumulator.stepped:
                step = accumulator.last
                print(
                    f"{step.number:4,}  {samples:7,}  {step.weight:7,.0f}  "
                    f"{step.micro_batches:13,}  {step.loss:6.4f}  {step.gradient_norm:6.4f}  "
                    f"{time.perf_counter() - began_s:7.1f}  {highest / budget_bytes:13.3f}"
                )
                highest, samples, began_s = 0, 0, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train with large batches in little memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", default="1GiB", help="memory of this process")
    add("--samples", type=int, default=8192, help="docstrings to train on")
    add("--samples-per-step", type=int, default=4096, help="docstrings in an optimizer step")
    add("--epochs", type=int, default=1)
    add("--max-length", type=int, default=256, help="bytes at which docstrings are cut")
    add("--seed", type=int, default=0, help="of docstrings, weights and order")
    options = parser.parse_args()
    try:
        train(options)
    except TorchBudgetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
