"""Train under Ray Train, lose workers, and go on with other numbers of them.

    python examples/elastic_ray.py

Three trainers of 2, 1 and 3 workers follow each other. In the first two, a worker is killed within
the epoch, and the next trainer continues from Ray's last checkpoint. Steps since that checkpoint
are repeated. The counts of samples are saved with it: at the end each sample was trained on once.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader

import torchbudget as tb


def train(config: dict[str, Any]) -> None:
    """Train on one of the workers, whose process group Ray has initialised."""
    torch.manual_seed(0)  # equal weights on all workers
    lengths = torch.randint(2, 60, (config["samples"],))
    data = [
        {"ids": torch.full((length,), length % 50), "index": number}
        for number, length in enumerate(lengths.tolist())
    ]
    sampler = tb.MemoryBudgetBatchSampler(
        lengths, tb.PaddedCost(unit_bytes=1), 400, samples_per_step=32
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=tb.PadCollate(), num_workers=2)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    accumulator = tb.GradAccumulator(optimizer, model, steps=sampler)
    counts = torch.zeros(config["epochs"], len(data), dtype=torch.int64)
    pending = torch.zeros(len(data), dtype=torch.int64)  # samples of this step on this worker

    steps, lost_at = 0, None
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        model.load_state_dict(state["model"])
        accumulator.load_training_state(state["training"])
        sampler.load_state_dict(state["data"])
        counts, steps = state["counts"], state["steps"]
    if config["lost_after"] is not None:
        lost_at = steps + config["lost_after"]

    while (epoch := sampler.epoch) < config["epochs"]:
        for batch in sampler.tracked(loader):
            pending[batch["index"]] += 1
            with accumulator.micro_batch(weight=batch.num_samples):
                output = model(batch["ids"]).squeeze(-1) * batch.mask
                accumulator.backward(output.sum(dim=1).square().sum())
            if not accumulator.stepped:
                continue
            steps += 1
            dist.all_reduce(pending)
            counts[epoch] += pending
            pending.zero_()
            if steps == lost_at and dist.get_rank() == dist.get_world_size() - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if steps % config["checkpoint_steps"] and sampler.epoch == epoch:
                continue
            state = {
                "model": model.state_dict(),
                "training": accumulator.training_state(),
                "data": sampler.state_dict(),  # the same on all workers
                "counts": counts,
                "steps": steps,
            }
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if dist.get_rank() == 0:
                    torch.save(state, Path(folder, "state.pt"))
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"steps": steps}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train under Ray Train, and lose workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--samples", type=int, default=1000)
    add("--epochs", type=int, default=2)
    add("--checkpoint-steps", type=int, default=5)
    add("--workers", type=int, nargs="+", default=[2, 1, 3], help="of one trainer after another")
    add("--lost-after", type=int, default=13, help="steps of a trainer before it loses a worker")
    options = parser.parse_args()

    ray.init(num_cpus=max(options.workers) + 1, include_dashboard=False)
    with tempfile.TemporaryDirectory() as storage:
        for number, workers in enumerate(options.workers, 1):
            is_last = number == len(options.workers)
            config = vars(options) | {"lost_after": None if is_last else options.lost_after}
            trainer = TorchTrainer(
                train,
                train_loop_config=config,
                scaling_config=ray.train.ScalingConfig(num_workers=workers),
                # With the name of an earlier run, it continues from the last checkpoint of that.
                run_config=ray.train.RunConfig(name="elastic", storage_path=storage),
            )
            try:
                result = trainer.fit()
            except ray.train.TrainingFailedError:
                print(f"{workers} workers: one was lost")
        with result.checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
    for epoch, counts in enumerate(state["counts"]):
        print(f"epoch {epoch}: each sample {counts.min()} to {counts.max()} times")


if __name__ == "__main__":
    main()
