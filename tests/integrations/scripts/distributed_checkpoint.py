"""A rank that saves its position with torch.distributed.checkpoint, or goes on from it."""

import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support import samplers, streams
from tests.support.rank_scripts import join, tell
from tests.support.streams import make

_, files, saves = sys.argv[1:]
join()
KINDS: dict[str, Any] = {
    "sampler": partial(samplers.sampler_of, samples_per_step=50),
    "none": make,
    "workers": partial(make, "shards"),
    "ranks": partial(make, "function", batches_per_epoch=13),
}


def batches(source: Any, kind: str, workers: int) -> Iterator[list[int]]:
    of: Any = samplers if kind == "sampler" else streams
    options = {"num_workers" if kind == "sampler" else "workers": workers}
    for batch in source.tracked(of.loader_of(source, **options)):
        yield [int(one if isinstance(one, int) else one[0]) for one in batch]


def save(kind: str, workers: int) -> Any:
    source = KINDS[kind]()
    left = batches(source, kind, workers)
    before = [*islice(left, 5)]
    dcp.save({"data": source}, checkpoint_id=Path(files, f"{kind}, {workers}"))
    return {"before": before, "rest": [*left]}


def load(kind: str, workers: int) -> Any:
    source = KINDS[kind]()
    try:
        dcp.load({"data": source}, checkpoint_id=Path(files, f"{kind}, {workers}"))
        return {"rest": [*batches(source, kind, workers)]}
    except BaseException as error:  # noqa: BLE001  (dcp's own is no Exception)
        return {"refused": str(error)}


found = {}
for kind, workers in product(KINDS, (0, 2)):
    found[f"{kind}, {workers}"] = (save if saves == "True" else load)(kind, workers)
    dist.barrier()
tell(found)
