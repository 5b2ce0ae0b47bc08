"""Several ranks, one exact step: the byte-level transformer of `train_text.py` under torchrun.

    torchrun --nproc-per-node 2 examples/train_ddp.py --folder run

Every rank draws its part of each step from `MemoryBudgetBatchSampler`, at nearly the same cost and
in the same number of micro-batches; `GradAccumulator` sums gradients over them once a step, and
divides by the bytes of text of all ranks. `fit` trains, evaluates, saves; stop it at any time and
start it again with the same folder: it goes on with the step that comes next.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from train_text import ByteData, at_least, docstrings, loss_sum, measured_cost, new_model

from torchbudget import (
    GradAccumulator,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedBatch,
    fit,
    parse_bytes,
    sizes_of,
)
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step


def num_tokens(batch: PaddedBatch) -> int:
    return batch.num_tokens


def tell(record: Step | Epoch) -> None:
    """Print what happened, once."""
    if dist.get_rank():
        return
    if isinstance(record, Step):
        print(f"step {record.number}: loss {record.loss:.4f}, {record.micro_batches} micro-batches")
    else:
        print(f"epoch {record.number}: loss {record.loss:.4f}, held out {record.validation:.4f}")


def loader_of(
    data: ByteData, cost: object, options: argparse.Namespace, **order: object
) -> DataLoader[PaddedBatch]:
    sampler = MemoryBudgetBatchSampler(
        sizes_of(data, "ids", progress=False), cost, options.budget_bytes, **order
    )
    return DataLoader(data, batch_sampler=sampler, collate_fn=PadCollate())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on several ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--budget", default="640MiB", help="memory of each rank's process")
    add("--samples", type=at_least(1), default=768, help="docstrings to train on")
    add("--samples-per-step", type=at_least(1), default=256, help="docstrings in an optimizer step")
    add("--epochs", type=at_least(1), default=2)
    add("--max-length", type=at_least(1), default=1024, help="bytes at which docstrings are cut")
    add("--seed", type=at_least(0), default=0, help="of docstrings, weights and order")
    add("--folder", type=Path, help="for checkpoints and statistics, to go on from")
    options = parser.parse_args()
    options.device, options.budget_bytes = "cpu", parse_bytes(options.budget)

    dist.init_process_group("gloo")
    model, optimizer = new_model(options)
    # The cost of a step in this process; ranks must plan alike, so the first one's counts.
    told = [measured_cost(model, optimizer, options)]
    dist.broadcast_object_list(told)
    texts = list(islice(docstrings(options.seed), options.samples + options.samples // 8))
    train, held_out = (
        ByteData(part, options.max_length)
        for part in (texts[: options.samples], texts[options.samples :])
    )
    loader = loader_of(
        train, told[0], options, samples_per_step=options.samples_per_step, seed=options.seed
    )
    parallel: nn.Module = DistributedDataParallel(model)
    accumulator = GradAccumulator(optimizer, parallel, steps=loader.batch_sampler, max_norm=1.0)
    fit(
        parallel,
        loader,
        loss_sum,
        accumulator,
        epochs=options.epochs,
        weight=num_tokens,
        validation=loader_of(held_out, told[0], options, shuffle=False),
        folder=options.folder,
        checkpoint_steps=1,
        callbacks=[tell],
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
