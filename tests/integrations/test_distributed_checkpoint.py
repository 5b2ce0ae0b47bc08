"""Positions in a checkpoint of torch.distributed.checkpoint, of ranks that are real processes.

It takes a state apart, keeps each value once, of any rank, and loads what the state has that it is
loaded into. So the state of a rank must be one value, under a name of its own where ranks differ.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.samplers import LENGTHS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = """
import json
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support import samplers, streams
from tests.support.tracked_streams import make

folder, files, by, saves = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
KINDS = {
    "sampler": partial(samplers.sampler_of, samples_per_step=50),
    "none": make,
    "workers": partial(make, "shards"),
    "ranks": partial(make, "function", batches_per_epoch=13),
}


class Run:
    def __init__(self, kind, workers):
        self.name, self.source = f"{kind}, {workers}", KINDS[kind]()
        of = samplers if kind == "sampler" else streams
        options = {"num_workers" if kind == "sampler" else "workers": workers}
        self.loader = of.loader_of(self.source, **options)
        torch.manual_seed(rank)
        model = torch.nn.Linear(2, 2)
        self.model = DistributedDataParallel(model) if by == "DDP" else fully_shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def batches(self):
        for batch in self.source.tracked(self.loader):
            yield [int(one if isinstance(one, int) else one[0]) for one in batch]

    def state(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments, "data": self.source}

    def total(self):
        weights = get_state_dict(self.model, self.optimizer)[0]["weight"]
        return getattr(weights, "full_tensor", lambda: weights)().sum().item()

    @property
    def place(self):
        return Path(files, self.name)


def save(run):
    batches, before = run.batches(), []
    for batch in islice(batches, 5):
        run.model(torch.ones(1, 2)).sum().backward()
        run.optimizer.step()
        before.append(batch)
    dcp.save(run.state(), checkpoint_id=run.place)
    return {"before": before, "total": run.total(), "rest": list(batches)}


def load(run):
    state = run.state()
    try:
        dcp.load(state, checkpoint_id=run.place)
        set_state_dict(
            run.model, run.optimizer,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )
        return {"total": run.total(), "rest": list(run.batches())}
    except BaseException as error:  # dcp's own is no Exception
        return {"refused": str(error)}


found = {}
for kind in KINDS:
    for workers in (0, 2):
        run = Run(kind, workers)
        found[run.name] = (save if saves == "True" else load)(run)
        dist.barrier()
Path(folder, f"{rank}.json").write_text(json.dumps(found))
"""


def run(folder: Path, ranks: int, by: str, *, saves: bool) -> list[Any]:
    own = folder / f"{saves}, {ranks}"
    own.mkdir()
    return run_ranks(SCRIPT, own, ranks, folder, by, saves)


@pytest.mark.parametrize("by", ["DDP", "FSDP2"])
def test_the_same_ranks_go_on_with_the_same_batches(by: str, tmp_path: Path) -> None:
    """With the sampler or stream itself in the state, without a name for each rank."""
    begun = run(tmp_path, 2, by, saves=True)
    resumed = run(tmp_path, 2, by, saves=False)
    assert len(begun[0]) == 8
    for name in begun[0]:
        for one, other in zip(begun, resumed, strict=True):
            assert other[name]["rest"] == one[name]["rest"], name
            assert other[name]["total"] == one[name]["total"]
    assert begun[0]["ranks, 2"]["rest"] != begun[1]["ranks, 2"]["rest"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_take_every_sample_once_or_refuse(
    ranks: int, tmp_path: Path
) -> None:
    begun = run(tmp_path, 2, "FSDP2", saves=True)
    resumed = run(tmp_path, ranks, "FSDP2", saves=False)
    for name in begun[0]:
        refused = {one[name].get("refused") for one in resumed}
        if name.startswith("ranks"):
            expected = f"Missing key in checkpoint state_dict: data.rank 0 of {ranks}"
            assert all(expected in text for text in refused)
        elif refused == {None}:
            parts = [one[name]["before"] for one in begun] + [one[name]["rest"] for one in resumed]
            counted = Counter(chain(*chain(*parts)))
            assert counted == Counter(range(len(LENGTHS) if "sampler" in name else 400)), name
        else:
            assert not name.startswith("sampler")
            assert all(f"ranks: saved 2, now {ranks}" in text for text in refused), refused
