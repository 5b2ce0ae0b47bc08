"""Accelerate: `prepare` of the adapter, on real processes; and what is refused without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.cells import RecordProperty, assert_epochs_grow, check_rows
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
    ),
]

SCRIPT = """
import itertools, json, sys
from pathlib import Path
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from tests.integrations.cells import EPOCHS, LENGTHS, STOP, each_cell, ids, loader_of, name_of
from torchbudget.errors import OptionError, StateError
from torchbudget.integrations.accelerate import prepare

dist.init_process_group("gloo")
folder = Path(sys.argv[1])
results = {}


def accelerator_of(**options):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def save(accelerator, path):
    accelerator.wait_for_everyone()  # others may read what was there
    accelerator.save_state(path)
    accelerator.wait_for_everyone()


def run(source, workers, kind=DataLoader, **options):
    accelerator = accelerator_of(**options)
    loader = prepare(accelerator, loader_of(source, workers, kind))
    assert accelerator.prepare(loader) is loader
    return {"whole": [[*ids(loader)] for _ in range(EPOCHS)], **resumed(source, workers, kind)}


def resumed(source, workers, kind):
    \"\"\"An epoch, a part of the second one, a checkpoint; and what comes after it.\"\"\"
    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers, kind))
    stopped = [*ids(loader)] + [*itertools.islice(ids(loader), STOP)]
    saved = folder / name_of(source, workers, kind.__name__)
    save(accelerator, saved)

    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers, kind))
    accelerator.load_state(saved)
    rest = [[*ids(loader)] for _ in range(1, EPOCHS)]
    save(accelerator, saved)  # between epochs

    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers, kind))
    accelerator.load_state(saved)
    assert [*ids(loader)] not in rest  # the fourth epoch
    return {"stopped": stopped, "resumed": sum(rest, [])}


def watched(accelerator, skipping):
    \"\"\"What comes; within the loop, no position is saved.\"\"\"
    for batch in ids(skipping):
        try:
            accelerator.save_state(folder / "within")
        except StateError as error:
            assert "skip_first_batches returned another loader" in str(error)
        else:
            raise AssertionError("a position was saved, of which loop?")
        yield batch


def check_saved(path, source, workers):
    \"\"\"The fourth epoch of a run that was saved after three.\"\"\"
    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers))
    accelerator.load_state(path)
    return [*ids(loader)]


def skipping(source, workers):
    \"\"\"The idiom of Accelerate's examples.\"\"\"
    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers))
    whole = [[*ids(loader)] for _ in range(EPOCHS)]
    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers))
    resumed = []
    for epoch in range(1, EPOCHS):
        loader.set_epoch(epoch)
        active = accelerator.skip_first_batches(loader, STOP) if epoch == 1 else loader
        resumed += watched(accelerator, active) if epoch == 1 else ids(active)
    path = folder / name_of("skipping", source, workers)
    save(accelerator, path)  # between epochs
    assert [*ids(loader)] == check_saved(path, source, workers)
    return {"whole": whole, "stopped": whole[0] + whole[1][:STOP], "resumed": resumed}


for options in ({}, {"even_batches": False}, {"split_batches": True}):
    for name, result in each_cell(lambda *cell: run(*cell, **options)).items():
        results[name_of(name, options)] = result
for name, result in each_cell(lambda *cell: run(*cell, StatefulDataLoader)).items():
    results[name_of(name, "StatefulDataLoader")] = result
for name, result in each_cell(skipping).items():
    results[name_of(name, "skip_first_batches")] = result
try:
    prepare(accelerator_of(dispatch_batches=True), loader_of("sampler", 0))
except OptionError as error:
    results["dispatch_batches"] = str(error)
ranks = dist.get_world_size()
given = {"num_replicas": ranks + 1, "rank": 0}
try:
    prepare(accelerator_of(), loader_of("stream", 0, **given))
except OptionError as error:
    results["other ranks"] = str(error)
accelerator = accelerator_of()
accelerator.state.parallelism_config = ParallelismConfig(tp_size=ranks)  # it needs GPUs itself
whole = prepare(accelerator, loader_of("sampler", 0, num_replicas=1, rank=0))
assert sorted(sum(ids(whole), [])) == [*range(len(LENGTHS))]
if ranks > 1:
    try:
        prepare(accelerator, loader_of("sampler", 0))
    except OptionError as error:
        assert "pass num_replicas=1, rank=0" in str(error)
    else:
        raise AssertionError("processes of one model got different batches")
(folder / f"{dist.get_rank()}.json").write_text(json.dumps(results))
"""


@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_under_each_option(
    ranks: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Epochs, `save_state`, `load_state` and `skip_first_batches`; what dispatches is refused."""
    found = run_ranks(SCRIPT, tmp_path, ranks, within_s=540)
    assert len(found[0]) == 22
    assert_epochs_grow(found[0]["sampler, 0, {}"])
    for one in found:
        assert one["dispatch_batches"].startswith("dispatch_batches=True has")
    for rank, one in enumerate(found):
        assert f"pass num_replicas={ranks}, rank={rank}" in one["other ranks"]
    rows = {
        "{}": "Accelerate: default",
        "{'even_batches': False}": "Accelerate: `even_batches=False`",
        "{'split_batches': True}": "Accelerate: `split_batches=True`",
        "skip_first_batches": "Accelerate: `skip_first_batches`",
        "StatefulDataLoader": "Accelerate: `StatefulDataLoader`",
    }
    check_rows(found, rows, record_property)
