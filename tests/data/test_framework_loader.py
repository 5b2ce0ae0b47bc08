"""Batches that are dealt to ranks, under loaders of Accelerate that deal them again, and of Fabric.

Other settings of Accelerate are rows of `tests/integrations/test_frameworks.py`.
"""

from __future__ import annotations

import importlib.util
from itertools import chain
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS

needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
pytestmark = [pytest.mark.distributed, pytest.mark.peer]

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

FABRIC = """
import json, sys
from itertools import chain
from pathlib import Path
from lightning.fabric import Fabric
from tests.integrations.cells import loader_of
from torchbudget.errors import OptionError

fabric = Fabric(accelerator="cpu", devices=int(sys.argv[2]))
fabric.launch()
found = []
for source in ("sampler", "stream"):
    loader = loader_of(source, 2)
    dealt = loader.dataset if source == "stream" else loader.batch_sampler
    try:
        dealt.tracked(fabric.setup_dataloaders(loader, use_distributed_sampler=False))
    except OptionError as error:
        batches = map(fabric.to_device, dealt.tracked(loader))
        found.append([str(error), [*chain(*(batch["ids"].tolist() for batch in batches))]])
Path(sys.argv[1], f"{fabric.global_rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="it is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_loader_of_fabric(ranks: int, tmp_path: Path) -> None:
    """A tracked loop names it; the `DataLoader` inside yields each sample once, over all ranks."""
    for of_ranks in zip(*run_ranks(FABRIC, tmp_path, ranks, ranks), strict=True):
        assert sorted(chain(*(samples for _, samples in of_ranks))) == list(range(203))
        for told, _ in of_ranks:
            assert "_FabricDataLoader; of a wrapper, such as Fabric's, pass the DataLoader" in told


@needs_accelerate
@pytest.mark.slow
def test_a_stream_that_is_dealt_twice_is_refused(tmp_path: Path) -> None:
    """On each rank the first `iter` names what deals again."""
    found = run_ranks(SCRIPT, tmp_path, 2, LENGTHS.tolist())
    names = [*["IterableDatasetShard"] * 4, "DataLoaderDispatcher"]
    for name, *messages in zip(names, *found, strict=True):
        for message in messages:
            assert f"split over 2 ranks already, and accelerate's {name}" in message


@needs_accelerate
def test_one_process_deals_nothing(tmp_path: Path) -> None:
    """There `prepare` is right as it is."""
    (found,) = run_ranks(SCRIPT, tmp_path, 1, LENGTHS.tolist())
    assert set(found) == {len(LENGTHS)}
