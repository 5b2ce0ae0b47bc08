"""A training's loading as a process of its own: options under a budget, a real loader, a loop.

`Cell.command()` runs one, which prints JSON.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

import torchbudget as tb
from tests.support.commands import ENVIRONMENT
from torchbudget.host.options import host_bytes

CHANNELS = 16
COST = tb.PaddedCost(unit_bytes=4 * CHANNELS)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One case.

    Attributes:
        data: one of `DATA`, or "stream".
        start: how workers start.
        folder: where the files of the data set are.
        mib: the host's budget, beyond what the process has before its loader is made.
        workers: at the most.
        samples: in the data set.
        epochs: that are read.
        plain: `num_workers` and `prefetch_factor` of a loader that nobody budgeted; they are used
            as they are.
        asks: `host_bytes` is asked what such a loader needs.
        host_mib: the whole budget, instead of `mib`.
        batch_mib: padded bytes of a batch on the host.
        pause_s: of the loop after each batch.
        watched: another process reads what this one and its workers have.
    """

    data: str
    start: str
    folder: str
    mib: int = 300
    workers: int = 4
    samples: int = 2000
    epochs: int = 2
    plain: tuple[int, int] | None = None
    asks: bool = False
    host_mib: int | None = None
    batch_mib: float = 4
    pause_s: float = 0.03
    watched: bool = True

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.support.host_cells", json.dumps(asdict(self))]

    def run(self, *before: str) -> subprocess.CompletedProcess[str]:
        """Run the command after another one, such as that of `own_shared_memory`."""
        command = [*before, *self.command()]
        return subprocess.run(
            command, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=600
        )


def own_shared_memory(mib: int) -> list[str]:
    """A command that runs what follows with a /dev/shm of its own; none where it may not."""
    if shutil.which("unshare") is None:
        return []
    names = ["--mount"] if os.geteuid() == 0 else ["--map-root-user", "--mount"]
    script = f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$@"'
    command = ["unshare", *names, "--propagation", "private", "sh", "-c", script, "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)
    return [] if tried.returncode else command


def lengths(samples: int) -> Any:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(5, 1, samples), 16, 2048).astype(np.int64)


class Arrays:
    """One array of all samples' values in memory, or mapped from a file."""

    def __init__(self, cell: Cell) -> None:
        self.ends = lengths(cell.samples).cumsum()
        self.values = np.ones((int(self.ends[-1]), CHANNELS), np.float32)
        if cell.data == "mapped":
            path = Path(cell.folder) / "values.npy"
            np.save(path, self.values)
            self.values = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        start = int(self.ends[index - 1]) if index else 0
        values = self.values[start : self.ends[index]]
        return {"x": torch.from_numpy(values * np.float32(2)), "label": index}

    def __call__(self, shard: int, num_shards: int) -> Any:
        """The samples of a shard, as a stream reads them."""
        return map(self.__getitem__, range(shard, len(self), num_shards))


class Files:
    """A file for each sample."""

    def __init__(self, cell: Cell) -> None:
        self.paths = [f"{cell.folder}/{index}.npy" for index in range(cell.samples)]
        for path, size in zip(self.paths, lengths(cell.samples).tolist(), strict=True):
            np.save(path, np.ones((size, CHANNELS), np.float32))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.from_numpy(np.load(self.paths[index])), "label": index}


class Objects(list[Any]):
    """Python objects: a list of dicts of lists of numbers, whose references are counted."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(
            {"x": [[float(index + j)] * 4 for j in range(size)], "label": index}
            for index, size in enumerate(lengths(cell.samples).tolist())
        )

    def __getitem__(self, index: Any) -> Any:
        row = super().__getitem__(index)
        return row | {"x": torch.tensor(row["x"]).repeat(1, CHANNELS // 4)}


def collect(worker: int) -> None:
    """A full garbage collection, which comes in every worker of a long run."""
    gc.collect()


@contextmanager
def peaks_of_this_tree(found: dict[str, int]) -> Any:
    """Fill in the peaks of this process and its descendants, as another process reads them."""
    script = str(Path(__file__).parent / "tree_reader.py")
    command = [sys.executable, script, str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        yield
        printed, _ = reader.communicate("\n")
    found.update(json.loads(printed))


def loop(loader: Any, cell: Cell) -> list[int]:
    """Two batches are alive at a time, as in any loop; what comes is counted."""
    labels: list[int] = []
    for _ in range(cell.epochs):
        for batch in loader:
            batch["x"].sum()  # maps its pages
            labels += batch["label"].tolist()
            time.sleep(cell.pause_s)
    return labels


DATA: dict[str, Any] = {"arrays": Arrays, "files": Files, "objects": Objects, "mapped": Arrays}


def dataset_of(cell: Cell) -> Any:
    return DATA[cell.data](cell)


def sampler_of(cell: Cell) -> tb.MemoryBudgetBatchSampler:
    bytes_ = int(cell.batch_mib * 2**20)
    return tb.MemoryBudgetBatchSampler(
        lengths(cell.samples), COST, bytes_, window=cell.samples // 4
    )


def run(cell: Cell) -> dict[str, Any]:
    order: Any
    collate = None
    if cell.data == "stream":
        dataset, bytes_ = None, int(cell.batch_mib * 2**20)
        order = tb.BudgetedIterableDataset(Arrays(cell), COST, bytes_, size="x", look_ahead="8MiB")
        arguments = {"dataset": order, "batch_size": None}
    else:
        dataset, order, collate = dataset_of(cell), sampler_of(cell), tb.PadCollate()
        arguments = {"dataset": dataset, "collate_fn": collate, "batch_sampler": order}
    gc.collect()
    resident = psutil.Process().memory_info().rss
    budget = cell.host_mib * 2**20 if cell.host_mib else resident + cell.mib * 2**20
    make = partial(DataLoader, **arguments, worker_init_fn=collect)
    state = torch.get_rng_state()
    needs, one_more = None, None
    options: dict[str, Any] = {"multiprocessing_context": cell.start}
    if cell.plain is not None:
        options |= {"num_workers": cell.plain[0], "prefetch_factor": cell.plain[1]}
        needs = host_bytes(make(**options)) if cell.asks else None
    else:
        chosen = tb.loader_options(
            order,
            tb.MemoryBudget(host=budget),
            dataset=dataset,
            collate_fn=collate,
            worker_init_fn=collect,
            multiprocessing_context=cell.start,
            max_workers=cell.workers,
        )
        needs = chosen.needs
        if chosen["num_workers"] < cell.workers:  # with as few batches ahead as there can be
            more = {"num_workers": chosen["num_workers"] + 1, "prefetch_factor": 1}
            one_more = host_bytes(make(**dict(chosen) | options | more)).total_bytes
        options = dict(chosen)
    assert state.equal(torch.get_rng_state())
    warnings.filterwarnings("ignore", "This DataLoader will create")
    peaks: dict[str, int] = {}
    with peaks_of_this_tree(peaks) if cell.watched else nullcontext():
        labels = loop(make(**options), cell)
    assert sorted(labels) == sorted([*range(cell.samples)] * cell.epochs)
    return {
        "budget": budget,
        "workers": options["num_workers"],
        "prefetch": options.get("prefetch_factor") or 0,
        "predicted": needs and needs.total_bytes,
        "one_more": one_more,
        "predicted_shared": needs and needs.shared_bytes,
        **peaks,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(Cell(**json.loads(sys.argv[1])))) + "\n")
