"""Sources whose states lie, that start over, stay open, or make much that is freed."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.support.resuming import as_pickle, check_every_stop
from tests.support.streams import TOKENS, make, same, tracked_loop
from torchbudget import BudgetedIterableDataset

N = 60
ROOM = [[n] * (n * 7 % 23 + 1) for n in range(N)]


class Constant:
    """A source whose `state_dict` says nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(ROOM)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class Ignoring(Constant):
    """A source that counts, and whose `__iter__` starts over whatever was loaded."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        for self.place, sample in enumerate(ROOM):
            yield sample

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}


class Late(Ignoring):
    """A source that goes on some items after its place."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        start, self.place = self.place and self.place + 3, 0
        for self.place, sample in enumerate(ROOM[start:], start):
            yield sample


class Alike(Ignoring):
    """A source that starts over, of samples of one size."""

    def __iter__(self) -> Iterator[Any]:
        for self.place, number in enumerate(range(N)):
            yield [number] * 7


def nodes() -> Any:
    torchdata = pytest.importorskip("torchdata.nodes")
    return torchdata.Loader(torchdata.IterableWrapper(ROOM))


SOURCES: dict[str, Any] = {
    "constant": Constant, "ignoring": Ignoring, "late": Late, "alike": Alike, "nodes": nodes,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:'set_vital':UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SOURCES)
def test_a_state_is_believed_only_if_it_is_right(name: str, workers: int) -> None:
    """From any batch the rest is the rest, by the source's state or by skipping through it."""

    def make() -> BudgetedIterableDataset:
        options = {"size": len, "window": 16, "look_ahead": 9000, "collate_fn": same}
        return BudgetedIterableDataset(SOURCES[name](), TOKENS, 60, **options)

    loop = partial(tracked_loop, workers=workers)
    whole = check_every_stop(make, loop=loop, file=as_pickle, every=5 if workers else 2)
    assert len(whole) >= 8


class StartsOver:
    """An iterator whose `__iter__` starts over, as many classes that read files have."""

    def __iter__(self) -> Any:
        self.left = list(reversed(ROOM[:10]))
        return self

    def __next__(self) -> Any:
        if not self.left:
            raise StopIteration
        return self.left.pop()


class OnlyNext:
    """An iterable of an iterator without `__iter__`."""

    def __iter__(self) -> Any:
        class Items:
            left = StartsOver().__iter__()

            def __next__(self) -> Any:
                return next(self.left)

        return Items()


class Holder:
    """An iterable whose iterator is one that starts over."""

    def __iter__(self) -> Any:
        return iter(StartsOver())


@pytest.mark.parametrize("source", [OnlyNext, Holder, lambda: [StartsOver().__iter__, Holder()]])
@pytest.mark.parametrize("options", [{}, {"look_ahead": 3000}, {"look_ahead": 1}, {"window": 3}])
def test_an_iterator_is_not_begun_again_at_each_read(source: Any, options: Any) -> None:
    stream = BudgetedIterableDataset(source(), TOKENS, 60, size=len, collate_fn=list, **options)
    times = 2 if isinstance(stream._options.source.data, list) else 1
    for _ in range(2):
        found = Counter(sample[0] for batch in stream for sample in batch)
        assert found == dict.fromkeys(range(10), times)


class Opened:
    """A source that has a file open while it is read."""

    def __init__(self) -> None:
        self.open = 0

    def __iter__(self) -> Iterator[Any]:
        self.open += 1
        try:
            yield from ROOM
        finally:
            self.open -= 1


OPTIONS: list[dict[str, Any]] = [
    {}, {"threads": 2, "transforms": [same]}, {"num_replicas": 2, "rank": 0},
    {"batches_per_epoch": 30},
]  # fmt: skip


@pytest.mark.parametrize("how", ["plain", "loader", "tracked", "closed", "another epoch", "inner"])
@pytest.mark.parametrize("options", OPTIONS)
def test_sources_are_closed(how: str, options: dict[str, Any]) -> None:
    """At once where an epoch is broken off, without a collection of cycles."""
    source = Opened()
    stream = make(source, budget=60, size=len, window=16, collate_fn=list, **options)
    loader = DataLoader(stream, batch_size=None)
    gc.disable()
    try:
        for _ in range(5):
            batches: Any = {"loader": loader, "tracked": stream}.get(how, stream)
            batches = stream.tracked(loader) if how == "tracked" else iter(batches)
            next(batches)
            if how == "closed":
                stream.close()
                assert source.open == 0
            if how == "inner":
                next(iter(stream))
            assert source.open <= 1
            if how == "another epoch":
                stream.set_epoch(stream.epoch + 1)
            del batches
            assert source.open == 0
    finally:
        gc.enable()


NOISE = np.zeros(100_000)
SHARED: dict[str, Any] = {
    "array": lambda n: (n, NOISE),
    "views": lambda n: {"x": [n], "noise": NOISE[:]},
    "nested": lambda n: [n, {"deep": (NOISE, [NOISE])}],
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize("options", [{}, {"num_replicas": 2, "rank": 0}])
def test_an_object_that_samples_share_counts_once(kind: str, options: dict[str, Any]) -> None:
    """200 samples with the same 800 kB are in memory together: five batches of forty."""
    stream = BudgetedIterableDataset(
        range(200), TOKENS, 40, size=lambda _: 1, transforms=[SHARED[kind]], window=200,
        look_ahead="1MB", collate_fn=len, **options,
    )  # fmt: skip
    ranks = options.get("num_replicas", 1)
    assert len(list(stream)) == (5 if ranks == 1 else 3)


SCRIPT = Path(__file__).parents[2] / "support" / "script_freed.py"


@pytest.mark.parametrize(
    "kind", ["crops", *(pytest.param(k, marks=pytest.mark.slow) for k in ("lengths", "worker"))]
)
def test_freed_memory_goes_back(kind: str) -> None:
    """Items of 8 MB that become small samples: the process does not grow by their sum."""
    ran = subprocess.run(
        [sys.executable, SCRIPT, kind], capture_output=True, text=True, check=True, timeout=100
    )
    assert int(ran.stdout.split()[-1]) < 150 * 2**20, ran.stdout
