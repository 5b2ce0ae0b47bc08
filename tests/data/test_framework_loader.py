"""Batches that are dealt to ranks, under loaders of Accelerate that deal them again.

Its other settings are rows of `tests/integrations/test_frameworks.py`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchbudget import BudgetedIterableDataset, PaddedCost
from torchbudget.errors import ShardedTwiceError

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
folder, lengths = Path(sys.argv[1]), json.loads(sys.argv[2])


def first(batches):
    return batches[0]


def outcome(workers, batch_size=None, context=None, **options):
    shards = [[[0] * length for length in lengths[n::4]] for n in range(4)]
    stream = BudgetedIterableDataset(
        shards, PaddedCost(unit_bytes=1), 1000, size=len, collate_fn=len)
    collate = {} if batch_size is None else {"collate_fn": first}
    loader = DataLoader(stream, batch_size=batch_size, num_workers=workers,
                        multiprocessing_context=context, **collate)
    configuration = DataLoaderConfiguration(**options)
    try:
        return int(sum(Accelerator(cpu=True, dataloader_config=configuration).prepare(loader)))
    except ShardedTwiceError as error:
        return str(error)


several = 1 if ranks > 1 else None  # Accelerate needs it of several processes only
outcomes = [outcome(workers, size, dispatch_batches=False)
            for workers in (0, 2) for size in (several, None)]
if ranks > 1:  # every process raises, before a worker starts, which would run this script again
    outcomes += [outcome(2, context="spawn")]
(folder / f"{rank}.json").write_text(json.dumps(outcomes))
"""


@pytest.mark.slow
def test_a_stream_that_is_dealt_twice_is_refused(tmp_path: Path) -> None:
    """On each rank the first `iter` names what deals again."""
    found = run_ranks(SCRIPT, tmp_path, 2, LENGTHS.tolist())
    names = [*["IterableDatasetShard"] * 4, "DataLoaderDispatcher"]
    for name, *messages in zip(names, *found, strict=True):
        for message in messages:
            assert f"split over 2 ranks already, and accelerate's {name}" in message


def test_one_process_deals_nothing(tmp_path: Path) -> None:
    """There `prepare` is right as it is."""
    (found,) = run_ranks(SCRIPT, tmp_path, 1, LENGTHS.tolist())
    assert set(found) == {len(LENGTHS)}
