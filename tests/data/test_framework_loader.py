"""Batches that are dealt to ranks, under frameworks that deal batches to processes: real ones."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
pytestmark = [pytest.mark.distributed, pytest.mark.peer, needs_accelerate]

SCRIPT = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchbudget import BudgetedIterableDataset, MemoryBudgetBatchSampler, PaddedCost
from torchbudget.errors import ShardedTwiceError

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
folder, lengths = Path(sys.argv[1]), json.loads(sys.argv[2])
cost, outcomes = PaddedCost(unit_bytes=1), {}


def first(batches):
    return batches[0]


def as_ones(samples):
    return torch.ones(len(samples))


def sampler_loader(workers=0, **options):
    sampler = MemoryBudgetBatchSampler(lengths, cost, 1000, **options)
    numbers = list(range(len(lengths)))
    return DataLoader(numbers, batch_sampler=sampler, num_workers=workers, collate_fn=as_ones)


def stream_loader(workers=0, batch_size=None, **options):
    shards = [[[0] * length for length in lengths[n::4]] for n in range(4)]
    stream = BudgetedIterableDataset(shards, cost, 1000, size=len, collate_fn=as_ones)
    collate = {} if batch_size is None else {"collate_fn": first}
    return DataLoader(stream, batch_size=batch_size, num_workers=workers, **collate, **options)


def prepared(loader, **options):
    configuration = DataLoaderConfiguration(**options)
    return Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)


def outcome(loader):
    try:
        return sum(len(batch) for batch in loader)
    except ShardedTwiceError as error:
        return str(error)


def tried(name, loader):
    outcomes[name] = outcome(loader)


def stateful(workers):
    \"\"\"A dispatcher that begins to read in `prepare` already, while it is half made.\"\"\"
    yield from prepared(stream_loader(workers), use_stateful_dataloader=True)


shards = {"even_batches": False, "dispatch_batches": False}
batch_size = 1 if ranks > 1 else None  # of several, Accelerate needs one; alone, it is refused
for workers in (0, 2):
    tried(f"sharded sampler, {workers}", prepared(sampler_loader(workers), **shards))
    loader = prepared(sampler_loader(workers), dispatch_batches=True)
    tried(f"dispatched sampler, {workers}", loader)
    tried(f"sharded stream, {workers}", prepared(stream_loader(workers, batch_size), **shards))
    loader = prepared(stream_loader(workers), dispatch_batches=False)
    tried(f"sharded stream, not batched, {workers}", loader)
tried("dispatched stream, 0", prepared(stream_loader()))
# Every process raises, not only the one that reads: the others would wait for it.
tried("dispatched stream, forked", prepared(stream_loader(2)))
if ranks > 1:  # refused before a worker starts, which would run this script again
    spawned = stream_loader(2, multiprocessing_context="spawn")
    tried("dispatched stream, spawned", prepared(spawned))
    for workers in (0, 2):
        tried(f"dispatched stream, stateful, {workers}", stateful(workers))
# All others are left alone.
tried("sampler, not prepared", sampler_loader())
tried("stream, not prepared", stream_loader(2))
tried("sampler, of one rank", prepared(sampler_loader(num_replicas=1, rank=0), **shards))
(folder / f"{rank}.json").write_text(json.dumps(outcomes))
"""
WRAPPERS = {
    "sharded sampler": "BatchSamplerShard",
    "sharded stream": "IterableDatasetShard",
    "dispatched": "DataLoaderDispatcher",
}


def outcomes_on(ranks: int, folder: Path) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, folder, ranks, LENGTHS.tolist())


@pytest.mark.slow
def test_each_way_to_deal_batches_twice_is_refused(tmp_path: Path) -> None:
    """The first `iter` names what deals again; what deals once yields every sample once."""
    found = outcomes_on(2, tmp_path)
    for case in found[0]:
        outcomes = [one[case] for one in found]
        wrapper = next((name for start, name in WRAPPERS.items() if case.startswith(start)), None)
        if wrapper is None:
            assert sum(outcomes) == len(LENGTHS)
            continue
        for message in outcomes:
            assert f"dealt to 2 ranks already, and accelerate's {wrapper}" in str(message)


def test_one_process_deals_nothing(tmp_path: Path) -> None:
    """There `prepare` is right as it is, with each setting."""
    (found,) = outcomes_on(1, tmp_path)
    assert set(found.values()) == {len(LENGTHS)}
