"""Several ranks, one exact step: the byte-level transformer of `train_text.py` under torchrun.

    torchrun --nproc-per-node 2 examples/train_ddp.py --folder run

Every rank gets its part of each step from `MemoryBudgetBatchSampler`, at nearly the same cost and
in the same number of micro-batches. `GradAccumulator` sums gradients over the ranks once a step and
divides by the bytes of text of all ranks. `fit` trains, evaluates and saves: stop it at any time
and start it again with the same folder, and it continues with the next step.
"""

from __future__ import annotations

import argparse
import os
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from train_text import ByteData, Transformer, docstrings, loss_sum, measured_cost

from torchbudget import (
    GradAccumulator,
    MeasuredCost,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    configure_allocators,
    fit,
    sizes_of,
)
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step


def num_tokens(batch: PaddedBatch) -> int:
    return batch.num_tokens


def log(record: Step | Epoch) -> None:
    """Print steps and epochs, on one rank."""
    if dist.get_rank():
        return
    if isinstance(record, Step):
        print(f"step {record.number}: loss {record.loss:.4f}, {record.micro_batches} micro-batches")
    else:
        print(f"epoch {record.number}: loss {record.loss:.4f}, held out {record.validation:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on several ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", default="640MiB", help="memory of each rank's process")
    add("--samples", type=int, default=768, help="docstrings to train on")
    add("--samples-per-step", type=int, default=256, help="docstrings in an optimizer step")
    add("--epochs", type=int, default=2)
    add("--max-length", type=int, default=1024, help="bytes at which docstrings are cut")
    add("--seed", type=int, default=0, help="of docstrings, weights and order")
    add("--folder", type=Path, help="for checkpoints and statistics, to continue from")
    options = parser.parse_args()

    configure_allocators()  # freed memory is returned: ragged batches need ever new shapes
    dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    model = Transformer(options.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # All ranks must plan with the same cost: the first one measures it.
    costs: list[MeasuredCost | None] = [None]
    if dist.get_rank() == 0:
        costs = [measured_cost(model, optimizer, options.max_length, options.budget)]
    dist.broadcast_object_list(costs)

    def loader_of(data: ByteData, **order: object) -> DataLoader[PaddedBatch]:
        sizes = sizes_of(data, "ids", progress=False)
        sampler = MemoryBudgetBatchSampler(sizes, costs[0], options.budget, **order)
        return DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())

    texts = docstrings(options.seed)
    data = ByteData(islice(texts, options.samples), options.max_length)
    held_out = ByteData(islice(texts, options.samples // 8), options.max_length)
    loader = loader_of(data, samples_per_step=options.samples_per_step, seed=options.seed)
    parallel = DistributedDataParallel(model)
    accumulator = GradAccumulator(optimizer, parallel, steps=loader.batch_sampler, max_norm=1.0)
    fit(
        parallel,
        loader,
        loss_sum,
        accumulator,
        epochs=options.epochs,
        weight=num_tokens,
        validation=loader_of(held_out, shuffle=False),
        folder=options.folder,
        checkpoint_steps=1,
        callbacks=[log],
    )
    dist.barrier()
    # Not through the interpreter's shutdown: torch 2.13 over gloo aborts there now and then, when a
    # thread that DDP's group keeps alive frees tensors ("terminate called without …").
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
