"""Accelerate: `prepare` of the adapter, and Accelerate's own, on real processes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.cells import (
    RecordProperty,
    Refused,
    Row,
    assert_epochs_grow,
    check_rows,
)
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.peer,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
    ),
]

OWN = "Accelerate, its own `prepare`"
INSTEAD = "torchbudget.integrations.accelerate.prepare"
SHARDED = Refused("ShardedTwiceError", ["BatchSamplerShard, by prepare()", INSTEAD])
DISPATCHED = Refused("ShardedTwiceError", ["prepare() with dispatch_batches=True", INSTEAD])
RECOUNTED = Refused("OptionError", ["use_stateful_dataloader=True", INSTEAD])
SPLIT = Refused("ValueError", ["split_batches==True"])  # Accelerate's own

SCRIPT = """
import itertools, json, sys
from pathlib import Path
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from tests.integrations.cells import EPOCHS, LENGTHS, each_cell, ids, loader_of, name_of, story
from torchbudget.errors import OptionError, ShardedTwiceError, StateError
from torchbudget.integrations.accelerate import prepare

dist.init_process_group("gloo")
folder, numbers, STOP = Path(sys.argv[1]), itertools.count(), 5
results = {}


def accelerator_of(**options):
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def save(accelerator, path):
    accelerator.wait_for_everyone()  # others may read what was there
    accelerator.save_state(path)
    accelerator.wait_for_everyone()


def run(source, workers, kind=DataLoader, **options):
    \"\"\"A run in parts: saved in the loop, and, without workers, between epochs.\"\"\"
    def part(state, stop):
        accelerator = accelerator_of(**options)
        loader = prepare(accelerator, loader_of(source, workers, kind))
        assert accelerator.prepare(loader) is loader
        if state is not None:
            accelerator.load_state(state)
        epochs, left = [], stop
        while loader.iteration < EPOCHS and left != 0:
            epochs.append([])
            for batch in ids(loader):
                epochs[-1].append(batch)
                left = left and left - 1
                if left == 0 and (workers or not loader.end_of_dataloader):
                    break
        path = folder / str(next(numbers))
        save(accelerator, path)
        return epochs, path

    return story(part)


def check_a_loop_that_is_broken_off():
    \"\"\"The next one starts the epoch over, unless another epoch was chosen.\"\"\"
    loader = prepare(accelerator_of(), loader_of("sampler", 2))
    first = next(ids(loader))
    assert next(ids(loader)) == first
    whole = [*ids(loader)]
    assert whole == [*ids(prepare(accelerator_of(), loader_of("sampler", 0)))]
    assert whole[0] == first
    second = next(ids(loader))
    loader.set_epoch(0)
    assert [*ids(loader)] == whole
    assert next(ids(loader)) == second


def refused(source, workers):
    try:
        prepare(accelerator_of(dispatch_batches=True), loader_of(source, workers))
    except OptionError as error:
        return type(error).__name__, str(error)


def by_itself(source, workers, **options):
    \"\"\"Accelerate's own `prepare`, and how its examples resume.\"\"\"
    def prepared():
        return accelerator_of(**options).prepare(loader_of(source, workers))

    try:
        loader = prepared()
        whole = [[*ids(loader)] for _ in range(EPOCHS)]
    except (OptionError, ShardedTwiceError, ValueError) as error:
        return type(error).__name__, str(error)
    loader = prepared()
    resumed = [*ids(loader)] + [*itertools.islice(ids(loader), STOP)]
    loader = prepared()
    for epoch in range(1, EPOCHS):
        loader.set_epoch(epoch)
        active = accelerator_of().skip_first_batches(loader, STOP) if epoch == 1 else loader
        resumed += ids(active)
    return {"whole": whole, "in_parts": [resumed]}


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


def skipping(source, workers):
    \"\"\"The idiom of Accelerate's examples.\"\"\"
    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers))
    whole = [[*ids(loader)] for _ in range(EPOCHS)]
    accelerator = accelerator_of()
    loader = prepare(accelerator, loader_of(source, workers))
    resumed = whole[0] + whole[1][:STOP]
    for epoch in range(1, EPOCHS):
        loader.set_epoch(epoch)
        active = accelerator.skip_first_batches(loader, STOP) if epoch == 1 else loader
        resumed += watched(accelerator, active) if epoch == 1 else ids(active)
    return {"whole": whole, "in_parts": [resumed]}


check_a_loop_that_is_broken_off()
OTHERS = {"even_batches": False, "split_batches": True, "use_seedable_sampler": True,
          "data_seed": 1, "non_blocking": True}
STATEFUL, DISPATCH = {"use_stateful_dataloader": True}, {"dispatch_batches": True}
for setting, cell in {
    "default": run,
    "others": lambda *cell: run(*cell, **OTHERS),
    "stateful": lambda *cell: run(*cell, StatefulDataLoader, **STATEFUL),
    "skip_first_batches": skipping,
    "dispatch_batches": refused,
    "by itself": by_itself,
    "by itself, split": lambda *cell: by_itself(*cell, split_batches=True),
    "by itself, dispatch": lambda *cell: by_itself(*cell, **DISPATCH),
    "by itself, stateful": lambda *cell: by_itself(*cell, **STATEFUL),
}.items():
    for name, result in each_cell(cell).items():
        results[name_of(name, setting)] = result
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

ROWS = {
    "default": Row("Accelerate"),
    "others": Row(
        "Accelerate: `even_batches`, `split_batches`, `use_seedable_sampler`, `data_seed`, "
        "`non_blocking`"
    ),
    "stateful": Row("Accelerate: `use_stateful_dataloader=True`, `StatefulDataLoader`"),
    "skip_first_batches": Row("Accelerate: `skip_first_batches`"),
    "dispatch_batches": Row(
        "Accelerate: `dispatch_batches=True`",
        Refused("OptionError", ["dispatch_batches=True", "DataLoaderConfiguration"]),
    ),
    "by itself, split": Row(f"{OWN}: `split_batches=True`", SPLIT),
}
BY_ITSELF = {
    1: {
        "by itself": Row(OWN),
        "by itself, dispatch": Row(f"{OWN}: `dispatch_batches=True`"),
        "by itself, stateful": Row(f"{OWN}: `use_stateful_dataloader=True`", RECOUNTED),
    },
    2: {
        "by itself": Row(OWN, SHARDED, DISPATCHED),
        "by itself, dispatch": Row(f"{OWN}: `dispatch_batches=True`", DISPATCHED),
        "by itself, stateful": Row(f"{OWN}: `use_stateful_dataloader=True`", SHARDED, DISPATCHED),
    },
}


@pytest.mark.timeout(600)  # all cells of a framework
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_sample_comes_once_under_each_option(
    ranks: int, tmp_path: Path, record_property: RecordProperty
) -> None:
    """Epochs, `save_state`, `load_state`, `skip_first_batches`; or an error names the setting."""
    found = run_ranks(SCRIPT, tmp_path, ranks, within_s=540)
    assert_epochs_grow(found, "default")
    for rank, one in enumerate(found):
        assert f"pass num_replicas={ranks}, rank={rank}" in one["other ranks"]
    check_rows(found, ROWS | BY_ITSELF[ranks], record_property)
