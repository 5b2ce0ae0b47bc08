"""Streams in real `DataLoader`s: processes of every kind, resumed, killed, and in threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support import streams
from tests.support.resuming import as_pickle
from tests.support.streams import TOKENS, Numbered, loader_of, numbers, shards_of
from torchbudget import BudgetedIterableDataset
from torchbudget.errors import OptionError, SampleError, StateError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SIZES = np.random.default_rng(0).integers(1, 60, 700)


def make(source: Any = None, **options: Any) -> BudgetedIterableDataset:
    source = Numbered(SIZES) if source is None else source
    return streams.make(source, **{"budget": 400, "window": 128} | options)


def stacked(samples: Any) -> Any:
    return torch.tensor(samples)


@pytest.mark.parametrize(
    "context", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_persistent_workers_of_every_kind(context: str, sharded: bool) -> None:
    """Three epochs with `set_epoch`, each of all samples once, and each another order."""
    stream = make(shards_of(SIZES, [100, 350, 360]) if sharded else None)
    loader = loader_of(stream, 2, persistent_workers=True, multiprocessing_context=context)
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        epochs.append(list(loader))
        assert numbers(epochs[-1]) == list(range(len(SIZES)))
    assert epochs[0] != epochs[1] != epochs[2]
    stream.set_epoch(1)
    assert list(loader) == epochs[1]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("sharded", "options"), [(True, {}), (False, {}), (True, {"batches_per_epoch": 9})]
)
def test_a_stateful_loader_goes_on_between_epochs(
    sharded: bool, options: Any, persistent: bool
) -> None:
    """All workers begin the next epoch, though none was asked for a batch of the last one.

    With `batches_per_epoch`, new workers do not know where those before have ended: it is said.
    """
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    sizes = SIZES[:150]
    source = shards_of(sizes, [30, 60]) if sharded else Numbered(sizes)

    def loader() -> Any:
        stream = make(source, **options)
        return stateful(stream, batch_size=None, num_workers=2, persistent_workers=persistent)

    uninterrupted = loader()
    if options and not persistent:
        list(uninterrupted)
        with pytest.raises(StateError, match="persistent_workers=True"):
            list(uninterrupted)
        return
    epochs = [list(uninterrupted) for _ in range(3)]
    for done in (1, 2):
        stopped, resumed = loader(), loader()
        assert [list(stopped) for _ in range(done)] == epochs[:done]
        resumed.load_state_dict(as_pickle(stopped.state_dict()))
        assert [list(resumed) for _ in range(done, 3)] == epochs[done:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("options", [{}, {"batches_per_epoch": 4}, {"window": 4096}])
@pytest.mark.parametrize("every", [1, 4])
def test_set_epoch_after_the_state_of_an_epochs_end(
    workers: int, persistent: bool, options: Any, every: int
) -> None:
    """Saved after the last batch or after the loop; the rest of its own epoch is empty."""
    if workers and not persistent and "batches_per_epoch" in options:
        pytest.skip("new workers do not know where those before have ended")
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def made() -> tuple[BudgetedIterableDataset, Any]:
        arguments = {"size": lambda _: 8, "window": 16, "collate_fn": list} | options
        stream = BudgetedIterableDataset(range(64), TOKENS, 64, shuffle=False, **arguments)
        loader = {"num_workers": workers, "persistent_workers": persistent}
        return stream, stateful(stream, batch_size=None, snapshot_every_n_steps=every, **loader)

    def epochs(made: Any, first: int, last: int) -> list[list[int]]:
        found = []
        for epoch in range(first, last):
            made[0].set_epoch(epoch)
            found.append(sorted(int(n) for batch in made[1] for n in batch))
        return found

    whole = epochs(made(), 0, 3)
    running = made()
    states = [as_pickle(running[1].state_dict()) for _ in running[1]][-1:]
    states.append(as_pickle(running[1].state_dict()))
    for state, first in ((states[0], 0), (states[0], 1), (states[1], 1)):
        resumed = made()
        resumed[1].load_state_dict(state)
        found, expected = epochs(resumed, first, 3), [[], *whole[1:]][first:]
        assert found == expected, first
    # A state within the epoch after the loaded end.
    stopped, resumed = made(), made()
    stopped[1].load_state_dict(states[0])
    stopped[0].set_epoch(1)
    begun = list(islice(stopped[1], 3))
    resumed[1].load_state_dict(as_pickle(stopped[1].state_dict()))
    [rest] = epochs(resumed, 1, 2)
    assert sorted([*rest, *(int(n) for batch in begun for n in batch)]) == whole[1]


# ---------------------------------------------------------------------- transforms, threads


def test_threads_run_at_a_time_and_end() -> None:
    """Eight wait for each other; none is left when the stream is closed, or broken off."""
    before = set(threading.enumerate())
    eight = threading.Barrier(8)

    def meet(sample: Any) -> Any:
        eight.wait(60)
        return sample

    source = Numbered(SIZES[:640])
    with closing(make(source, window=640, transforms=[meet], threads=8)) as stream:
        assert numbers(list(stream)) == list(range(640))
        assert set(threading.enumerate()) <= before
        batches = iter(stream)
        next(batches)
        assert set(threading.enumerate()) != before
    assert set(threading.enumerate()) <= before


def fail_at_7(sample: Any) -> Any:
    if sample[0] % 100 == 7:
        raise ValueError("no such recording")
    return sample


@pytest.mark.parametrize("threads", [0, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises(threads: int, workers: int) -> None:
    """An error that names it, or a counted skip."""
    options: dict[str, Any] = {"transforms": [fail_at_7], "threads": threads}
    stream = make(**options)
    with pytest.raises(SampleError, match=r"item 7 of shard 0 cannot be transformed: .*no such"):
        list(DataLoader(stream, batch_size=None, num_workers=workers))
    stream = make(**options, on_error="skip")
    found = numbers(list(DataLoader(stream, batch_size=None, num_workers=workers)))
    assert found == [number for number in range(len(SIZES)) if number % 100 != 7]
    assert stream.skipped_samples.failed == 7


class Broken:
    """Ends with an error in its middle."""

    def __iter__(self) -> Iterator[Any]:
        yield from islice(Numbered(SIZES), 40)
        raise OSError("the disk is gone")


def test_sources_that_break() -> None:
    """In the middle, before their length, or missing: an error that says where."""
    with pytest.raises(SampleError, match=r"shard 0, cannot be read: OSError: the disk is gone"):
        list(make(Broken()))
    with pytest.raises(SampleError, match=r"shard 0, cannot be read: FileNotFoundError"):
        list(make([Path("/no/such/shard").open]))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, stacked])
def test_a_loader_that_would_batch_again_is_refused(workers: int, collate: Any) -> None:
    """Whoever collates: a loader without `batch_size=None` would yield shapes (1, n, …)."""
    source = [[[0] * 5] * 40] * 3
    stream = BudgetedIterableDataset(source, TOKENS, 400, size=len, collate_fn=collate)
    with pytest.raises(OptionError, match="batch_size=None"):
        next(iter(DataLoader(stream, num_workers=workers)))
