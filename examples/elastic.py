"""Train on machines that come and go, and count how often each sample was trained on.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=10 --rdzv-backend=c10d \
        --rdzv-endpoint=127.0.0.1:29400 examples/elastic.py run

Start this command in two terminals, one a machine. Kill the second one with its processes: the
first one goes on alone. Start the second one again, and both go on. `fit` continues from the last
checkpoint in the folder, on any number of ranks. Steps since that checkpoint are repeated. The
counts of samples are part of it: at the end each sample was trained on once in each epoch.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import torchbudget as tb
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step


class Counts:
    """How often each sample was trained on, by all ranks: a callback of `fit`, which saves it.

    Args:
        epochs: number of epochs.
        samples: number of samples N.

    Attributes:
        total: in steps that were taken, shape `(epochs, N)`.
        pending: in this step on this rank, shape `(N,)`.
    """

    def __init__(self, epochs: int, samples: int) -> None:
        self.total = torch.zeros(epochs, samples, dtype=torch.int64)
        self.pending = torch.zeros(samples, dtype=torch.int64)
        self.epoch = 0

    def __call__(self, record: Step | Epoch) -> None:
        if isinstance(record, Step):
            dist.all_reduce(self.pending)
            self.total[self.epoch] += self.pending
            self.pending.zero_()
        else:
            self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.epoch = state["total"], state["epoch"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train on machines that come and go.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, help="for checkpoints; all machines must see it")
    add("--samples", type=int, default=2000)
    add("--epochs", type=int, default=2)
    add("--checkpoint-steps", type=int, default=5)
    add("--workers", type=int, default=2, help="processes that load samples, on each rank")
    add("--step-s", type=float, default=0.1, help="seconds to sleep after each step")
    options = parser.parse_args()

    # If a machine is lost while ranks connect, the others wait this long, and not 30 minutes.
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    torch.manual_seed(0)  # equal weights on all ranks
    lengths = torch.randint(2, 60, (options.samples,))
    data: Any = [
        {"ids": torch.full((length,), length % 50), "index": number}
        for number, length in enumerate(lengths.tolist())
    ]
    sampler = tb.MemoryBudgetBatchSampler(
        lengths, tb.PaddedCost(unit_bytes=1), 400, samples_per_step=32
    )
    loader = DataLoader(
        data, batch_sampler=sampler, collate_fn=tb.PadCollate(), num_workers=options.workers
    )
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    counts = Counts(options.epochs, options.samples)

    def criterion(model: nn.Module, batch: Any) -> Tensor:
        counts.pending[batch["index"]] += 1
        output: Tensor = model(batch["ids"]).squeeze(-1) * batch.mask
        return output.sum(dim=1).square().sum()

    tb.fit(
        model,
        loader,
        criterion,
        tb.GradAccumulator(optimizer, model, steps=sampler),
        epochs=options.epochs,
        folder=options.folder,
        checkpoint_steps=options.checkpoint_steps,
        callbacks=[counts, lambda _: time.sleep(options.step_s)],
        progress=False,
    )
    if dist.get_rank() == 0:
        for epoch, total in enumerate(counts.total):
            print(f"epoch {epoch}: each sample {total.min()} to {total.max()} times")
    dist.barrier()
    # Not through the interpreter's shutdown, where torch 2.13 over gloo now and then aborts.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
