"""What does it cost to agree on the end of an epoch at every batch?

Question: two ranks train on a stream of which each has its own number of batches. How much longer
does an epoch take under `stop_together`, which sums one number a batch over gloo, than without?
For a step that takes no time, and for one of a millisecond and more.

Command: PYTHONPATH=. python examples/benchmarks/stop_together.py [--batches N] [--repetitions R]
[--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU; `--batches 1000`,
beside other work, which shows most where ranks wait for each other.

    width  batches  without, ms  with, ms  a step, µs   ratio  µs a batch
    0        1,000           16       473          16  30.346         457
    128      1,000          115       954         115   8.271         839
    256      1,000          603     1,380         603   2.290         778
    512      1,000        3,733     4,631       3,733   1.273         899

A step multiplies matrices of `width`², forward and backward; one thread a rank. Both ranks have as
many batches here, so that the loops are alike with and without; they begin together. `µs a batch`
is the difference of the medians. A rank also waits for the other one within a step where their
gradients are summed; here nothing is summed, so that all waiting for the slower rank of each batch
counts for `stop_together`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _common import Results, alternate, median, options, ratio
from torch.utils.data import DataLoader

from torchbudget import BudgetedIterableDataset, PaddedCost
from torchbudget.data.stream.dataset import stop_together

RANKS = 2
WIDTHS = (0, 128, 256, 512)


def texts(batches: int, _number: int, _shards: int) -> Iterator[bytes]:
    """Samples of one length, four of which make a batch."""
    return repeat(b"text", 4 * batches)


def epoch(width: int, batches: int, *, together: bool) -> Callable[[], None]:
    """An epoch of a rank, which all begin together."""
    weight = torch.randn(width, width, requires_grad=True)
    values = torch.randn(width, width)
    stream = BudgetedIterableDataset(
        partial(texts, batches), PaddedCost(unit_bytes=1), 16, size=len, collate_fn=len, uneven=True
    )

    def work() -> None:
        stream.set_epoch(0)
        loader = DataLoader(stream, batch_size=None)
        dist.barrier()
        for _ in stop_together(loader) if together else loader:
            if width:
                (values @ weight).sum().backward()

    return work


def rank_main(rank: int, settings: argparse.Namespace, folder: str) -> None:
    """Time an epoch with and without, in turns; the first rank writes what was found."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    rows = []
    for width in WIDTHS:
        runs = {
            name: epoch(width, settings.batches, together=name == "with")
            for name in ("without", "with")
        }
        times = alternate(runs, settings.repetitions)
        without, with_it = median(times["without"]), median(times["with"])
        rows.append(
            {
                "width": width,
                "batches": settings.batches,
                "without, ms": 1e3 * without,
                "with, ms": 1e3 * with_it,
                "a step, µs": 1e6 * without / settings.batches,
                "ratio": ratio(times["with"], times["without"]),
                "µs a batch": 1e6 * (with_it - without) / settings.batches,
            }
        )
    if not rank:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still need the interpreter


def main() -> None:
    settings = options(__doc__, batches=3000, repetitions=5)
    results = Results(
        {
            "width": ",d",
            "batches": ",d",
            "without, ms": ",.0f",
            "with, ms": ",.0f",
            "a step, µs": ",.0f",
            "ratio": ".3f",
            "µs a batch": ",.0f",
        }
    )
    with TemporaryDirectory() as folder:
        mp.spawn(rank_main, (settings, folder), nprocs=RANKS)
        for row in json.loads(Path(folder, "rows.json").read_text()):
            results.row(**row)
    results.finish(settings.json)


if __name__ == "__main__":
    main()
