"""Sources of numbered samples, and what their streams are checked with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, Subset, get_worker_info

from tests.support.resuming import as_json
from torchbudget import BudgetedIterableDataset, PaddedCost
from torchbudget.data.stream.cursor import StreamCursor, WorkerSlot
from torchbudget.data.stream.position import StreamLoop

TOKENS = PaddedCost(unit_bytes=1)


# ---------------------------------------------------------------------- sources


class Numbered:
    """Samples (number, size), read again and again."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = np.asarray(sizes).tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(list(enumerate(self.sizes)))


class SplitsItself(IterableDataset[Any]):
    """Splits itself by worker, as torch's documentation teaches."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(self.samples[first::step])


def shards_of(sizes: Any, cuts: list[int]) -> list[Any]:
    """Lists of consecutive samples."""
    samples = list(Numbered(sizes))
    bounds = [0, *sorted(cut % (len(samples) + 1) for cut in cuts), len(samples)]
    return [samples[a:b] for a, b in pairwise(bounds)]


SOURCES: dict[str, Callable[[list[Any]], Any]] = {
    "iterable": lambda samples: Numbered([size for _, size in samples]),
    "map": lambda samples: Subset(samples, range(len(samples))),
    "shards": lambda samples: samples,
    "function": lambda samples: lambda shard, shards: iter(samples[shard::shards]),
    "splits itself": SplitsItself,
}
KINDS = (*SOURCES,)


def source_of(kind: str, sizes: Any, cuts: list[int]) -> Any:
    """A source of one of the `KINDS`."""
    return SOURCES[kind](shards_of(sizes, cuts) if kind == "shards" else list(Numbered(sizes)))


# ---------------------------------------------------------------------- functions of a sample


def size_of(sample: Any) -> Any:
    size = sample[1]
    return tuple(size) if isinstance(size, list) else size


def same(sample: Any) -> Any:
    return sample


# ---------------------------------------------------------------------- batches


def numbers(batches: list[list[Any]]) -> list[int]:
    """The samples' numbers, sorted."""
    return sorted(number for batch in batches for number, _ in batch)


class OneProcess:
    """What one worker of one rank reads, without starting it."""

    def __init__(self, stream: BudgetedIterableDataset, slot: WorkerSlot) -> None:
        self.stream = stream
        self.slot = slot
        self.reader: StreamLoop | None = None

    def __iter__(self) -> StreamLoop:
        self.reader = self._new_reader()
        return self.reader

    def _new_reader(self) -> StreamLoop:
        position = self.stream._position
        loaded, position.loaded = position.loaded, None
        state = position.where() if loaded is None else position.start
        return position.loop_at(state, self.slot)

    def state_dict(self) -> dict[str, Any]:
        at = self._new_reader() if self.reader is None else self.reader
        return at.state.to_plain(seeks=self.stream._options.source.may_seek)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.set_epoch(state["epoch"])  # an end of it stays one, as in a worker
        self.stream.load_state_dict(state)


def processes_of(
    make: Callable[[], BudgetedIterableDataset], workers: int
) -> list[list[OneProcess]]:
    """Each worker of each rank, with a stream of its own."""
    ranks = make().num_replicas
    return [
        [
            OneProcess(make(), WorkerSlot(worker=worker, workers=workers, rank=rank, ranks=ranks))
            for worker in range(workers)
        ]
        for rank in range(ranks)
    ]


def loader_of(stream: BudgetedIterableDataset, workers: int, **options: Any) -> DataLoader[Any]:
    """A plain `DataLoader` that leaves samples as they are."""
    return DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=same, **options)


def tracked_loop(
    stream: BudgetedIterableDataset, workers: int = 0, **options: Any
) -> Iterator[Any]:
    """A tracked loop over such a loader."""
    return stream.tracked(loader_of(stream, workers, **options))


def workers_of(state: Any) -> list[dict[str, Any]]:
    """Where each worker stands, in the state of a stream; of the only rank that it has."""
    [processes] = [state[name] for name in state if name == "processes" or name[:5] == "rank "]
    return [StreamCursor(state["epoch"], *row)._asdict() for row in processes[0]["workers"]]


# ---------------------------------------------------------------------- 400 samples, in loops

SIZES = np.random.default_rng(2).integers(1, 60, 400)


def make(source: Any = "iterable", **options: Any) -> BudgetedIterableDataset:
    """A stream of a source, or of the 400 samples as one of the `KINDS`."""
    if isinstance(source, str):
        if source == "splits itself":
            options["split"] = "workers"
        source = source_of(source, SIZES, [30, 31, 200])
    given = {"cost": TOKENS, "budget": 300, "size": size_of, "window": 64, "collate_fn": same}
    return BudgetedIterableDataset(source, **given | options)


def begun_at(done: int, workers: int = 2, **options: Any) -> tuple[list[Any], Any]:
    """A whole epoch's batches, and a stream that begins after so many of them."""
    running = make(**options)
    whole = list(loader_of(make(**options), workers))
    list(islice(tracked_loop(running, workers), done))
    stream = make(**options)
    stream.load_state_dict(as_json(running.state_dict()))
    return whole, stream
