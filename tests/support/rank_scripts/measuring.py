"""Ranks that measure steps together, and one that cannot."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.rank_scripts import error_of, join
from tests.support.steps import step_of
from torchbudget import measure_cost
from torchbudget.machine.process_tree import process_memory


def batch_of(n: int, size: int) -> torch.Tensor:
    return torch.ones(n, size, 8)


def trained(wrapped: str, method: Any) -> Any:
    """Parameters and buffers after each step, and the cost that was measured in between."""
    torch.manual_seed(dist.get_rank())
    model: Any = nn.Sequential(
        nn.Flatten(0, 1), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1)
    )
    if wrapped == "sharded":
        for part in (model[1], model[4], model):
            fully_shard(part)
    else:
        model = DistributedDataParallel(model)
    adam = torch.optim.AdamW
    step = step_of(lambda batch: model(batch).square().mean(), model, optimizer=adam)
    found, cost = [], None
    for number in range(10):
        if number == 2 and method:
            resident: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(resident, process_memory().resident_bytes)
            budget = max(resident) + (40 + dist.get_rank()) * 2**20
            cost = measure_cost(
                step, batch_of, max_size=64, min_size=2, method=method, budget=budget
            )
        step(torch.randn(3, 5, 8))
        found += [getattr(p, "to_local", lambda p=p: p)().tolist() for p in model.parameters()]
        found += [b.tolist() for b in model.buffers()]
    return found, cost


def together(wrapped: str) -> Any:
    """Whether all is as it was, and what was found, by each method; then one rank fails."""
    warnings.simplefilter("ignore")
    rank, _ = join()
    ballast = torch.ones(rank * 60 * 2**20, dtype=torch.uint8)  # it must take smaller batches
    expected, _ = trained(wrapped, None)
    told = []
    for method in ("trace", "auto") if wrapped == "sharded" else ("trace", "run", "auto"):
        found, cost = trained(wrapped, method)
        sampled = [(p.n, p.size, p.peak_bytes, p.held_out) for p in cost.probes]
        notes = [note for note in cost.notes if "not traced" in note]
        same = cost.batch_bytes([1, 9], [20, 64]).tolist()
        told.append([found == expected, same, cost.margin, sampled, notes])
    del ballast
    model = DistributedDataParallel(nn.Linear(8, 8))
    step = step_of(lambda batch: model(batch).square().mean(), model)

    def failing(n: int, size: int) -> torch.Tensor:
        if rank == 1:
            raise ValueError("no such file")
        return batch_of(n, size)

    options: dict[str, Any] = {"max_size": 200, "budget": "1GiB"}
    said = [
        error_of(lambda method=method: measure_cost(step, failing, method=method, **options))
        for method in ("trace", "auto")
    ]
    return told, said
