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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import torchbudget as tb
from torchbudget.host.options import host_bytes

ROOT = Path(__file__).parents[2]
CHANNELS = 16
DATA = ("arrays", "files", "objects", "mapped")


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
        order: of such a loader: "ours", the sampler's or the stream's, or "shuffle", torch's own.
            What it needs is asked of `host_bytes`.
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
    order: str = ""
    host_mib: int | None = None
    batch_mib: float = 4
    pause_s: float = 0.03
    watched: bool = True

    def command(self) -> list[str]:
        code = "from tests.support.host_cells import main\nif __name__ == '__main__': main()"
        return [sys.executable, "-c", code, json.dumps(asdict(self))]

    def run(self, *before: str) -> subprocess.CompletedProcess[str]:
        """Run the command after another one, such as that of `own_shared_memory`."""
        return subprocess.run(
            [*before, *self.command()],
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    def environment(self) -> dict[str, str]:
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


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
    """One array of all samples' values in memory."""

    def __init__(self, cell: Cell) -> None:
        self.ends = lengths(cell.samples).cumsum()
        self.values = np.ones((int(self.ends[-1]), CHANNELS), np.float32)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Any:
        start = int(self.ends[index - 1]) if index else 0
        values = self.values[start : self.ends[index]]
        return {"x": torch.from_numpy(values * np.float32(2)), "label": index}

    def __call__(self, shard: int, num_shards: int) -> Any:
        """The samples of a shard, as a stream reads them."""
        return map(self.__getitem__, range(shard, len(self), num_shards))


class Mapped(Arrays):
    """The same in a file that is mapped."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        path = Path(cell.folder) / "values.npy"
        np.save(path, self.values)
        self.values = np.load(path, mmap_mode="r")


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
    command = [sys.executable, "-S", script, str(os.getpid())]
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


def dataset_of(cell: Cell) -> Any:
    kinds: Any = {"arrays": Arrays, "files": Files, "objects": Objects, "mapped": Mapped}
    return kinds[cell.data](cell)


def sampler_of(cell: Cell) -> tb.MemoryBudgetBatchSampler:
    cost = tb.PaddedCost(unit_bytes=4 * CHANNELS)
    return tb.MemoryBudgetBatchSampler(
        lengths(cell.samples), cost, int(cell.batch_mib * 2**20), window=cell.samples // 4
    )


def stream_of(cell: Cell) -> tb.BudgetedIterableDataset:
    return tb.BudgetedIterableDataset(
        Arrays(cell),
        tb.PaddedCost(unit_bytes=4 * CHANNELS),
        int(cell.batch_mib * 2**20),
        size="x",
        look_ahead="8MiB",
    )


def loader_arguments(cell: Cell, dataset: Any, order: Any) -> dict[str, Any]:
    """Of the data set in this order, beside the options that are asked for."""
    if cell.data == "stream":
        return {"dataset": order, "batch_size": None}
    given = {"dataset": dataset, "collate_fn": tb.PadCollate()}
    if cell.order == "shuffle":
        return given | {"batch_size": 8, "shuffle": True}
    return given | {"batch_sampler": order}


def run(cell: Cell) -> dict[str, Any]:
    is_stream = cell.data == "stream"
    dataset = None if is_stream else dataset_of(cell)
    order: Any = stream_of(cell) if is_stream else sampler_of(cell)
    gc.collect()
    budget = host_budget(cell)
    plain = loader_arguments(cell, dataset, order)
    state = torch.get_rng_state()
    needs, one_more, options, explained = None, None, {}, ""
    if cell.plain is None:
        chosen = tb.loader_options(
            order,
            tb.MemoryBudget(host=budget),
            dataset=dataset,
            collate_fn=None if is_stream else tb.PadCollate(),
            worker_init_fn=collect,
            multiprocessing_context=cell.start,
            max_workers=cell.workers,
        )
        options, needs, explained = dict(chosen), chosen.needs, chosen.explain()
        if options["num_workers"] < cell.workers:
            one_more = bytes_of_one_more(cell, plain, options)
    else:
        workers, prefetch = cell.plain
        options = {
            "num_workers": workers,
            "prefetch_factor": prefetch,
            "multiprocessing_context": cell.start,
        }
        if cell.order:
            asked: Any = DataLoader(**plain, **options, worker_init_fn=collect)
            needs = host_bytes(asked)
    assert state.equal(torch.get_rng_state())
    warnings.filterwarnings("ignore", "This DataLoader will create")
    peaks: dict[str, int] = {}
    with peaks_of_this_tree(peaks) if cell.watched else nullcontext():
        labels = loop(DataLoader(**plain, **options, worker_init_fn=collect), cell)
    assert sorted(labels) == sorted([*range(cell.samples)] * cell.epochs)
    return {
        "budget": budget,
        "workers": options["num_workers"],
        "prefetch": options["prefetch_factor"] or 0 if "prefetch_factor" in options else 0,
        "predicted": None if needs is None else needs.total_bytes,
        "one_more": one_more,
        "predicted_shared": None if needs is None else needs.shared_bytes,
        "explained": explained,
        **peaks,
    }


def bytes_of_one_more(cell: Cell, plain: dict[str, Any], options: dict[str, Any]) -> int:
    """What a loader with one more worker would need, and as few batches ahead as there can be."""
    more = options | {
        "num_workers": options["num_workers"] + 1,
        "prefetch_factor": 1,
        "multiprocessing_context": cell.start,
    }
    needs = host_bytes(DataLoader(**plain, **more, worker_init_fn=collect))
    return needs.total_bytes


def host_budget(cell: Cell) -> int:
    if cell.host_mib is not None:
        return cell.host_mib * 2**20
    status = Path("/proc/self/status").read_text().splitlines()
    [resident] = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS")]
    return resident + cell.mib * 2**20


def main() -> None:
    """Run the cell of the command line; here, so that spawned workers find its classes."""
    given = json.loads(sys.argv[1])
    if given["plain"] is not None:
        given["plain"] = tuple(given["plain"])
    sys.stdout.write(json.dumps(run(Cell(**given))) + "\n")
