"""Ranks that train together: killed, broken off, ended, failing, or with memory that creeps up."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.rank_scripts import error_of, join, tell
from tests.support.trainings import (
    After,
    BrokenOff,
    Creeping,
    Plateau,
    Training,
    at_step,
    loss_of,
    samples,
    tokens,
)
from torchbudget import BudgetedIterableDataset, GradAccumulator, MemoryMonitor, PaddedCost, fit
from torchbudget.distributed import gathered
from torchbudget.errors import RankError
from torchbudget.machine.process_tree import process_memory
from torchbudget.train.step import Step


def killed(files: str, fault: str, number: str) -> list[Any]:
    """Two ranks; one is killed in step 2, in an evaluation, or while step 4 is written; or none."""
    (rank, _), victim, save = join(), int(number), torch.save
    processes = gathered(os.getpid())

    def kill() -> None:
        os.kill(processes[victim], signal.SIGKILL)
        while psutil.pid_exists(processes[victim]):
            time.sleep(0.01)

    def save_and_kill(state: Any, file: Any, **options: Any) -> None:
        if isinstance(file, io.BytesIO):  # of a tensor that is pickled
            save(state, file, **options)
            return
        whole = io.BytesIO()
        save(state, whole)
        file.write(whole.getvalue()[:4096])
        file.flush()
        kill()
        file.write(whole.getvalue()[4096:])

    training, callbacks = Training(), []
    if rank == victim and fault == "step":
        callbacks = [at_step(2, kill)]
    elif rank == victim and fault == "evaluation":
        training.model.register_forward_pre_hook(
            lambda model, _: None if model.training else kill()
        )
    elif rank == 0 and fault == "write":  # the one that writes
        callbacks = [at_step(4, lambda: setattr(torch, "save", save_and_kill))]
    error, start = [], time.monotonic()
    try:
        training.fit(*callbacks, folder=files)
    except (RankError, RuntimeError) as raised:
        error = [type(raised).__name__]
    result = [training.model.head.weight.tolist(), error, time.monotonic() - start]
    if fault != "none":
        tell(result)
        os._exit(0)
    return result


def source(shard: int, num_shards: int) -> Iterator[dict[str, Tensor]]:
    return iter(samples([24, 7][shard], shard))


class WithoutState(Plateau):
    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("no average yet")
        return super().state_dict()


def fit_together(name: str) -> dict[str, Any]:
    """Two ranks that train, are broken off, end, fail, and have other folders or callbacks."""
    (rank, _), files = join(), Path(name)
    seen: list[int] = []
    found: dict[str, Any] = {"weights": {"sampler": [], "uneven": []}, "ended": []}

    def criterion(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch.num_samples)
        return loss_of(model, batch)

    def train(kind: str, name: str, *callbacks: Any) -> Training:
        training = Training()
        loader, accumulator = training.loader, training.accumulator
        if kind == "uneven":
            stream = BudgetedIterableDataset(
                source, PaddedCost(unit_bytes=1), 60, size="x", window=6, uneven=True
            )
            loader = DataLoader(stream, batch_size=None)
            accumulator = GradAccumulator(training.optimizer, training.model, steps=2)
        torch.manual_seed(100 + rank)  # every rank drops others
        training.history = fit(
            training.model, loader, criterion, accumulator, epochs=2, weight=tokens,
            folder=files / name, checkpoint_steps=1, callbacks=callbacks,
        )  # fmt: skip
        return training

    for kind, weights in found["weights"].items():
        seen.clear()
        weights.append(train(kind, f"{kind} whole").model.head.weight.tolist())
        found["seen"] = len(seen)
        for stop in (3, 4, 5, 6):
            with contextlib.suppress(BrokenOff):
                train(kind, f"{kind} at {stop}", After(stop))
            resumed = train(kind, f"{kind} at {stop}", After(0))
            weights.append(resumed.model.head.weight.tolist())

    def ends(record: Any) -> bool:
        return rank == 1 and isinstance(record, Step) and record.number == 2

    def fails(record: Any) -> None:
        if ends(record):
            raise RuntimeError("no such metric")

    def refused(name: str, *callbacks: Any) -> str:
        return error_of(lambda: train("sampler", name, *callbacks))

    found["ended"] = [train("sampler", "ended", ends).history for _ in range(2)]
    found["failed"] = refused("fails", fails)
    found["no state"] = refused("no state", WithoutState(Training().optimizer))
    found["callbacks"] = refused("callbacks", *[Plateau(Training().optimizer)][rank:])
    train("sampler", f"node {rank}")
    found["folders"] = refused(f"node {rank}")
    # The checkpoint of two ranks, on one of them alone, as if it had other ranks.
    state = torch.load(files / "uneven at 3" / "last.pt", weights_only=True)
    state["ranks"][1]["is_over"] = not state["ranks"][0]["is_over"]
    state["ranks"] = [*state["ranks"], state["ranks"][0]]
    if rank == 0:
        (files / "three").mkdir()
        torch.save(state, files / "three" / "last.pt")
    dist.barrier()
    found["other number"] = refused("three")
    return found


def creep() -> list[Any]:
    """Two ranks of which one leaks; both plan with its margin."""
    rank, _ = join()
    torch.manual_seed(0)
    resident = torch.tensor(process_memory().resident_bytes)
    dist.all_reduce(resident, dist.ReduceOp.MAX)
    run = Creeping(leaks=rank == 1, resident_bytes=int(resident))
    refused = error_of(lambda: run.fit(MemoryMonitor() if rank == 0 else None, epochs=1))
    with MemoryMonitor(replan=run.sampler, replan_batches=5) as monitor:
        run.fit(monitor, epochs=2)
    return [refused, run.sampler.plan.rules.cost.margin, run.numbers]


KEPT: list[Any] = []


def example(*argv: str) -> str:
    """What a script of `examples/` prints; its model and its group are kept until the rank ends."""
    with patch.object(sys, "argv", [*argv]), contextlib.redirect_stdout(io.StringIO()) as printed:
        KEPT.append(runpy.run_path(argv[0], run_name="__main__"))
    return printed.getvalue()
