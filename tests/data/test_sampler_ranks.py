"""A sampler on several ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks, torchrun
from tests.support.samplers import LENGTHS, counted, sampler_of
from torchbudget.errors import UnevenRanksError


def test_an_uneven_number_is_refused_before_the_first_batch() -> None:
    """Samples that stand alone and are no multiple of the ranks': `len` and `iter` say so.

    No rank has drawn a batch by then, and `drop_last=True` is the way out that they name.
    """
    options: dict[str, Any] = {"max_batch_size": 1, "num_replicas": 2}
    for rank in range(2):
        with pytest.raises(UnevenRanksError, match="3 samples that need 3 micro-batches"):
            len(sampler_of([1, 2, 3], rank=rank, **options))
        with pytest.raises(UnevenRanksError, match="drop_last=True"):
            next(iter(sampler_of([1, 2, 3], rank=rank, **options)))
    those = [sampler_of([1, 2, 3], rank=rank, drop_last=True, **options) for rank in range(2)]
    assert [len(sampler) for sampler in those] == [1, 1]
    drawn = [list(sampler) for sampler in those]
    assert [len(batches) for batches in drawn] == [1, 1]
    assert drawn[0] != drawn[1]


SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
import torch.distributed as dist
from torchbudget import MemoryBudgetBatchSampler, PaddedCost

sizes = np.array(json.loads(sys.argv[2]))
cost = PaddedCost(unit_bytes=1)
before = MemoryBudgetBatchSampler(sizes, cost, 1000)
dist.init_process_group("gloo")
sampler = MemoryBudgetBatchSampler(sizes, cost, 1000, samples_per_step=64)
found = {
    "before": [before.rank, before.num_replicas],
    "ranks": [sampler.rank, sampler.num_replicas],
    "len": len(sampler),
    "steps": list(sampler.steps),
    "batches": list(sampler),
    "explicit": [sampler.rank, MemoryBudgetBatchSampler(sizes, cost, 1000, rank=0).rank],
}
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_torch_distributed(ranks: int, tmp_path: Path) -> None:
    """Each process takes its own part: as many batches each, every sample once."""
    start = torchrun if ranks == 2 else run_ranks
    found = start(SCRIPT, tmp_path, ranks, json.dumps(LENGTHS.tolist()))
    assert [one["ranks"] for one in found] == [[rank, ranks] for rank in range(ranks)]
    assert [one["before"] for one in found] == [[rank, ranks] for rank in range(ranks)]
    assert [one["explicit"] for one in found] == [[rank, 0] for rank in range(ranks)]
    assert len({(one["len"], tuple(one["steps"])) for one in found}) == 1
    assert {len(one["batches"]) for one in found} == {found[0]["len"]}
    drawn = counted(batch for one in found for batch in one["batches"])
    assert drawn == Counter(range(300))
    for rank, one in enumerate(found):
        here = sampler_of(samples_per_step=64, num_replicas=ranks, rank=rank)
        assert list(here) == one["batches"]


def test_one_process_can_play_any_rank() -> None:
    """Given both, no process group is asked; given none, it is the only rank."""
    assert (sampler_of().num_replicas, sampler_of().rank) == (1, 0)
    parts = [list(sampler_of(num_replicas=3, rank=rank)) for rank in range(3)]
    assert len({len(part) for part in parts}) == 1
    assert counted(batch for part in parts for batch in part) == Counter(range(300))
