"""Memory that creeps up while a training runs: with the monitor's corrections it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchbudget.observe.lines import read_records

TRAINING = """
import json
import resource
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import torchbudget as tb
from tests.support.costs import measured
from torchbudget.machine.process_tree import process_memory

MIB = 2**20
monitored, folder = sys.argv[1] == "monitored", Path(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
tb.configure_allocators()
lengths = np.random.default_rng(0).integers(20, 100, 2000)
data = [{"x": torch.randint(100, (int(length),))} for length in lengths]
model = nn.Sequential(nn.Embedding(100, 2048), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.Linear(2048, 1))

def step(batch):
    F.softplus(model(batch["x"])).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None

def peak_of(n, size):
    with tb.peak_memory("cpu") as peak:
        step({"x": torch.ones(n, size, dtype=torch.int64)})
    return peak.bytes

peak_of(4, 100)
fixed = peak_of(1, 1)
unit = (peak_of(8, 100) - fixed) // 800
cost = measured(tb.PaddedCost(fixed_bytes=fixed, unit_bytes=unit), margin=0.02)
budget = fixed + 120 * MIB
sampler = tb.MemoryBudgetBatchSampler(lengths, cost, budget, window=16, seed=1)
loader = DataLoader(data, batch_sampler=sampler, collate_fn=tb.PadCollate())

memory = process_memory()
status = open("/proc/self/status").read()
data_bytes = int(status.partition("VmData:")[2].split()[0]) * 1024
limit = data_bytes + int(float(sys.argv[3]) * budget) - memory.resident_bytes
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

leaked, numbers = [], []
most = int(0.3 * budget) // MIB  # batches that leak a MiB each
print(json.dumps(["begun", most, budget]), flush=True)
monitor = tb.MemoryMonitor(budget, path=folder / "run.jsonl", replan=sampler, replan_batches=2)
with monitor if monitored else nullcontext():
    while len(numbers) < most + 20:
        for batch in sampler.tracked(loader):
            batch_measured = monitor.batch(batch.num_samples, batch.padded_size)
            with batch_measured if monitored else nullcontext():
                if len(leaked) < most:
                    leaked.append(bytearray(b"1") * MIB)
                step(batch)
            numbers.append(batch.num_samples * batch.padded_size[0])
            if len(numbers) == most + 20:
                break
print(json.dumps(["ended", len(leaked), np.mean(numbers[:5]), np.mean(numbers[-20:])]), flush=True)
"""


LIMIT = 1.1  # of allocations, as a share of the budget


def training(how: str, folder: Path, limit: float) -> subprocess.CompletedProcess[str]:
    """Under a limit of allocations, as a share of the budget."""
    return subprocess.run(
        [sys.executable, "-c", TRAINING, how, str(folder), str(limit)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits Linux's data segment")
def test_a_leak_under_a_hard_limit(tmp_path: Path) -> None:
    """1 MiB a batch, 30 % of the budget in all, under a limit of 10 % more than it: alone it dies.

    Monitored, batches become smaller, no peak is 10 % above the budget, and the training ends. The
    data segment that is limited also has what is free in the heap. The cost is what two steps took,
    with a margin.
    """
    monitored = training("monitored", tmp_path, LIMIT)
    assert not monitored.returncode, monitored.stderr
    begun, ended = map(json.loads, monitored.stdout.splitlines())
    assert ended[:2] == ["ended", begun[1]]
    assert ended[3] < 0.2 * ended[2]
    batches = [one for one in read_records(tmp_path / "run.jsonl") if one["event"] == "batch"]
    assert len(batches) == begun[1] + 20
    assert batches[-1]["bytes"] > 1.2 * batches[-1]["predicted_bytes"]
    assert max(one["bytes"] for one in batches) <= 1.1 * begun[2]
    alone = training("alone", tmp_path, LIMIT)
    assert [json.loads(line)[0] for line in alone.stdout.splitlines()] == ["begun"]
    assert "can't allocate memory" in alone.stderr or "MemoryError" in alone.stderr
