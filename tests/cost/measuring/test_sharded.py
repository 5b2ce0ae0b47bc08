"""Measuring a model that FSDP has sharded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks

SHARDED = """
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchbudget import measure_cost
from torchbudget.machine.host import process_memory

warnings.simplefilter("ignore")
dist.init_process_group("gloo")


def batch_of(n, size):
    return torch.ones(n, size, 8)


def trained(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    for part in (model[0], model[3], model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for number in range(10):
        if number == 2 and method:
            budget = process_memory().resident_bytes + 40 * 2**20
            measure_cost(step, batch_of, max_size=200, method=method, budget=budget)
        step(torch.ones(3, 5, 8))
        found += [p.to_local().flatten().tolist() for p in model.parameters()]
    return found


expected = trained(None)
told = [trained(method) == expected for method in ("run", "auto")]
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(told))
"""


@pytest.mark.distributed
def test_a_sharded_model_goes_on_as_before(tmp_path: Path) -> None:
    """Its local shards, and those of the optimizer's state, are restored bit for bit.

    On one rank: on several, each would choose batches by its own memory.
    """
    assert run_ranks(SHARDED, tmp_path, 1) == [[True, True]]
