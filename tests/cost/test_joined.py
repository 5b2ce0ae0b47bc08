"""Measuring steps that ranks take together."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

JOINED = """
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchbudget import measure_cost
from torchbudget.machine.process_tree import process_memory

warnings.simplefilter("ignore")
dist.init_process_group("gloo")


def batch_of(n, size):
    return torch.ones(n, size, 8)


def trained(method):
    # Parameters and buffers after each step, and the cost that was measured in between.
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(
        nn.Flatten(0, 1), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1)
    )
    if sys.argv[2] == "sharded":
        for part in (model[1], model[4], model):
            fully_shard(part)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found, cost = [], None
    for number in range(10):
        if number == 2 and method:
            resident = [None] * dist.get_world_size()
            dist.all_gather_object(resident, process_memory().resident_bytes)
            budget = max(resident) + (40 + dist.get_rank()) * 2**20
            cost = measure_cost(
                step, batch_of, max_size=64, min_size=2, method=method, budget=budget
            )
        step(torch.randn(3, 5, 8))
        found += [getattr(p, "to_local", lambda: p)().tolist() for p in model.parameters()]
        found += [b.tolist() for b in model.buffers()]
    return found, cost


if dist.get_rank() == 1:
    ballast = torch.ones(60 * 2**20, dtype=torch.uint8)  # it must take smaller batches

expected, _ = trained(None)
told = []
for method in ("trace", "auto") if sys.argv[2] == "sharded" else ("trace", "run", "auto"):
    found, cost = trained(method)
    sampled = [(p.n, p.size, p.peak_bytes, p.held_out) for p in cost.probes]
    notes = [note for note in cost.notes if "not traced" in note]
    same = cost.batch_bytes([1, 9], [20, 64]).tolist()
    told.append([found == expected, same, cost.margin, sampled, notes])
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(told))
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("wrapped", ["sharded", "replicated"])
def test_ranks_measure_together(wrapped: str, tmp_path: Path) -> None:
    """They run the same shapes, though one has less memory left, and find one cost.

    Parameters, shards, buffers and the optimizer's state are restored bit for bit.
    """
    found = run_ranks(JOINED, tmp_path, 2, wrapped)
    assert all(restored for rank in found for restored, *_ in rank)
    assert all(rank == found[0] for rank in found)
    assert not any(notes for *_, notes in found[0])


ONE_FAILS = """
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchbudget import measure_cost
from torchbudget.errors import CostError, RankError

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def batch_of(n, size):
    if dist.get_rank() == 1:
        raise ValueError("no such file")
    return torch.ones(n, size, 8)


said = []
for method in ("trace", "auto"):
    try:
        measure_cost(step, batch_of, max_size=200, method=method, budget="1GiB")
    except (CostError, RankError) as error:
        said.append(str(error))
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(said))
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_no_rank_waits_for_one_that_failed(tmp_path: Path) -> None:
    """All raise: the one that failed its own error, the other one with its number and its text."""
    first, second = run_ranks(ONE_FAILS, tmp_path, 2)
    assert len(first) == len(second) == 2
    assert all("rank 1 failed" in said and "no such file" in said for said in first)
    assert all("make_batch(" in said and "rank 1" not in said for said in second)
