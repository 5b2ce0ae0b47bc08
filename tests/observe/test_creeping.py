"""Memory that creeps up while a training runs: with the monitor's corrections it ends."""

from __future__ import annotations

import multiprocessing
import resource
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import torchbudget as tb
from tests.support.costs import measured
from torchbudget.machine.process_tree import process_memory, read_fields
from torchbudget.observe.report import recorded_runs
from torchbudget.units import KiB, MiB

LIMIT = 1.1  # of allocations, as a share of the budget
LEAKS = 0.3  # of the budget, 4 MiB with each batch
ROOM = MiB(480)  # of batches: with the process's own memory, leaks are about a half of it
LEFT = 20  # batches after the last one that leaks
TOKEN = KiB(400)  # bytes of a step


def train(monitored: bool, path: Path) -> None:
    """Train under a hard limit; at the end, save the number of tokens in each batch."""
    lengths = np.random.default_rng(0).integers(20, 100, 400)
    fixed = process_memory().resident_bytes
    cost = measured(tb.PaddedCost(fixed_bytes=fixed, unit_bytes=TOKEN), margin=0.02)
    budget = fixed + ROOM
    sampler = tb.MemoryBudgetBatchSampler(lengths, cost, budget, window=16, seed=1)
    # The limited data segment also has what is free in the heap.
    limit = read_fields(Path("/proc/self/status"))["VmData"] + int(LIMIT * budget) - fixed
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    most = int(LEAKS * budget) // MiB(4)
    leaked: list[bytearray] = []
    tokens: list[int] = []
    monitor = tb.MemoryMonitor(budget, path=path, replan=sampler, replan_batches=2)
    with monitor if monitored else nullcontext():
        while len(tokens) < most + LEFT:
            for batch in sampler:
                size = int(lengths[batch].max())
                tokens.append(len(batch) * size)
                with monitor.batch(len(batch), size) if monitored else nullcontext():
                    if len(leaked) < most:
                        leaked.append(bytearray(b"1") * MiB(4))
                    bytearray(b"1") * (tokens[-1] * TOKEN)
    np.save(path.with_suffix(".npy"), tokens)


@pytest.mark.slow
def test_a_leak_under_a_hard_limit(tmp_path: Path) -> None:
    """30 % of the budget leaks under a limit of 10 % more than it: alone the training dies.

    Monitored, batches become smaller, no peak is 10 % above the budget, and the training ends.
    """
    codes = []
    for monitored in (True, False):
        arguments = monitored, tmp_path / f"{monitored}.jsonl"
        process = multiprocessing.get_context("spawn").Process(target=train, args=arguments)
        process.start()
        process.join()
        codes.append(process.exitcode)
    assert codes == [0, 1]  # of a MemoryError
    tokens = np.load(tmp_path / "True.npy")
    assert tokens[-LEFT:].mean() < 0.7 * tokens[:5].mean()
    [run] = recorded_runs(tmp_path / "True.jsonl")
    assert len(run.batches) == len(tokens)
    assert max(one["bytes"] for one in run.batches) <= LIMIT * run.begin["budget"]["device"]
    assert run.batches[-1]["bytes"] > 1.2 * run.batches[-1]["predicted_bytes"]
