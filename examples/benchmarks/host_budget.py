"""Does a `DataLoader` with `loader_options` stay within the host's budget, and fill it?

Question: four data sets, workers that fork and workers that do not, several budgets: how near to
the budget does the memory of the whole tree of processes come? How near is the prediction? And are
the options as fast as the best of a search?

Command: PYTHONPATH=. python examples/benchmarks/host_budget.py [--samples N] [--budgets K]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, 24 GiB, Python 3.11, torch 2.13.0 CPU; up to 17 other
processes ran on both, so that not all that may be prefetched was, and speeds were not measured. Of
the command's rows these were run:

    data             start    MiB  workers  prefetch  shared    pss   peak  one more  predicted
    arrays            fork    400        5         6      61  0.798  0.950     0.994      1.041
    arrays            fork    250        3         7      44  0.783  0.973     1.054      1.024
    arrays            fork    800        8         8     105  0.700  0.808         –      1.037
    files             fork    400        5         6      60  0.782  0.960     1.064      1.036
    files             fork    250        3         7      44  0.755  0.969     1.101      1.027
    files             fork    800        8         8     101  0.641  0.778         –      1.113
    objects           fork    400        1         8       6  0.734  0.836     1.217      1.062
    objects           fork    250        0         0       0  0.541  0.663     1.066      0.984
    mapped            fork    400        5         7      71  0.921  0.976     1.029      1.025
    stream            fork    400        5         4      40  0.827  0.985     1.046      1.009
    arrays           spawn    900        3         8      49  0.888  0.945     1.205      1.047
    arrays           spawn    600        1         8      20  0.646  0.728     1.031      1.024
    files            spawn    900        4         8      63  0.754  0.849         –      1.024
    files            spawn    600        3         8      49  0.833  0.957     1.115      1.006
    stream           spawn    900        2         8      33  0.680  0.744     1.009      1.059
    highest pss / budget ≤ 1: 0.921, holds
    highest peak / budget ≤ 1: 0.985, holds
    least that one more worker needs / budget ≥ 1: 0.994, DOES NOT HOLD
    least peak / budget where a worker takes less than 0.2 of it ≥ 0.8: 0.950, holds
    predicted / peak, at least ≥ 0.9: 0.984, holds
    predicted / peak, at most ≤ 1.1: 1.113, DOES NOT HOLD

Every row is a process of its own that asks for options, with at most 8 workers (4 where they do not
fork), makes a stock loader with them, and loops over six epochs so slowly that all that may be
prefetched is. Another process, which imports nothing of this library, reads every 20 ms the
proportional set size of the tree and what `/dev/shm`, a mount of the row's own, has in use. `peak`
is the anonymous memory of the tree, its libraries once, and all of that shared memory, mapped by a
process or not; `pss` what the processes map: both as shares of the budget, and `predicted` as one
of the peak. `one more` is what one more worker would need, by the prediction, where fewer were
taken than may be. For a stream the largest batch of the trial stands for all. Pages of the mapped
data file do not count, since the kernel takes them back. Each worker collects its garbage once when
it starts, as in a long run it does at some time: that copies what it had in common with its parent.
The budget is what the process has before its loader is made and `MiB` for loading; what one more
worker needs is what may be left of it, by a second trial, which differs from the first by about
1 %. The search times every number of workers up to 4 over whole epochs, half a second each.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from _common import Results, options
from torch.utils.data import DataLoader

import torchbudget as tb
from tests.support.host_cells import DATA, Cell, dataset_of, own_shared_memory, sampler_of

MIB = {"fork": (400, 250, 800), "spawn": (900, 600, 1400)}
WORKERS = {"fork": 8, "spawn": 4}
KINDS = (*DATA, "stream")
SEARCHED = 4
LITTLE = 0.2  # of the budget


def cells(budgets: int, starts: int, kinds: int, **given: Any) -> Iterator[Cell]:
    """Every data set, start and budget."""
    for start in [*MIB][:starts]:
        for data in KINDS[:kinds]:
            for mib in MIB[start][:budgets]:
                yield Cell(data=data, start=start, mib=mib, workers=WORKERS[start], **given)


def run(cell: Cell, mount: list[str]) -> dict[str, Any]:
    """What a process that loads as the cell says has needed."""
    with tempfile.TemporaryDirectory() as folder:
        done = replace(cell, folder=folder).run(*mount)
        assert not done.returncode, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def epoch_s(loader: Any, seconds: float) -> float:
    """Seconds of an epoch after one that warms up; of several where they are short."""
    for _ in loader:
        pass
    began, epochs = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in loader:
            pass
        epochs += 1
    return (time.perf_counter() - began) / epochs


def speed_of_the_choice(data: str, samples: int, seconds: float) -> tuple[int, int, float]:
    """Workers that were chosen, those that are the fastest, and the ratio of the speeds."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        cell = Cell(data=data, start="fork", folder=folder, samples=samples, batch_mib=2)
        dataset, sampler, collate = dataset_of(cell), sampler_of(cell), tb.PadCollate()
        gc.collect()
        chosen = tb.loader_options(
            sampler,
            tb.MemoryBudget(host="16GiB"),
            dataset=dataset,
            collate_fn=collate,
        )["num_workers"]
        times: dict[int, list[float]] = {n: [] for n in range(max(SEARCHED, chosen) + 1)}
        for _ in range(3):
            for n, found in times.items():
                loader: Any = DataLoader(
                    dataset,
                    batch_sampler=sampler,
                    collate_fn=collate,
                    num_workers=n,
                    persistent_workers=n > 0,
                )
                found.append(epoch_s(loader, seconds))
                del loader
    medians = {n: statistics.median(found) for n, found in times.items()}
    best = min(medians, key=medians.__getitem__)
    return chosen, best, medians[best] / medians[chosen]


def main() -> None:
    asked = options(__doc__, samples=6000, budgets=3, starts=2, kinds=5, epochs=6, search_ms=500)
    results = Results(
        {
            "data": "",
            "start": "",
            "MiB": ",",
            "workers": "",
            "prefetch": "",
            "processes": "",
            "shared": ",.0f",
            "pss": ".3f",
            "peak": ".3f",
            "one more": ".3f",
            "predicted": ".3f",
        }
    )
    peaks, mapped, more, fills, predicted = [], [], [], [], []
    given = {
        "folder": "",
        "samples": asked.samples,
        "epochs": asked.epochs,
        "batch_mib": 2,
        "pause_s": 0.05,
    }
    mount = own_shared_memory(8192)
    for cell in cells(asked.budgets, asked.starts, asked.kinds, **given):
        found = run(cell, mount)
        predicted.append(found["predicted"] / found["total"])
        peaks.append(found["total"] / found["budget"])
        mapped.append(found["pss"] / found["budget"])
        row: dict[str, Any] = {"MiB": cell.mib, "pss": mapped[-1], "peak": peaks[-1]}
        if found["one_more"] is not None:
            more.append(found["one_more"] / found["budget"])
            row["one more"] = more[-1]
            if more[-1] - peaks[-1] < LITTLE:
                fills.append(peaks[-1])
        results.row(
            data=cell.data,
            start=cell.start,
            workers=str(found["workers"]),
            prefetch=str(found["prefetch"]),
            processes=str(found["processes"]),
            shared=found["shared"] / 2**20,
            predicted=predicted[-1],
            **row,
        )
    results.bar("highest pss / budget", max(mapped), 1)
    results.bar("highest peak / budget", max(peaks), 1)
    if more:
        results.bar("least that one more worker needs / budget", min(more), 1, at_least=True)
    if fills:
        what = f"least peak / budget where a worker takes less than {LITTLE} of it"
        results.bar(what, min(fills), 0.8, at_least=True)
    results.bar("predicted / peak, at least", min(predicted), 0.9, at_least=True)
    results.bar("predicted / peak, at most", max(predicted), 1.1)
    for data in ("files", "objects")[: asked.kinds if asked.search_ms else 0]:
        chosen, best, ratio = speed_of_the_choice(data, asked.samples, asked.search_ms / 1000)
        what = f"speed of the choice / best of a search, {data}, {chosen} and {best} workers"
        results.bar(what, ratio, 0.95, at_least=True)
    results.finish(asked.json)


if __name__ == "__main__":
    main()
