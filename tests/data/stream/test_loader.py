"""Streams in real `DataLoader`s: processes of every kind, resumed, killed, and in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from tests.support.resuming import as_pickle, check_every_stop
from tests.support.streams import (
    TOKENS,
    Numbered,
    SplitsItself,
    numbers,
    same,
    shards_of,
    size_of,
)
from torchbudget import BudgetedIterableDataset, transforms
from torchbudget.errors import SampleError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SIZES = np.random.default_rng(0).integers(1, 60, 700)


def make(source: Any = None, **options: Any) -> BudgetedIterableDataset:
    arguments = {"cost": TOKENS, "budget": 400, "window": 128} | options
    return BudgetedIterableDataset(
        Numbered(SIZES) if source is None else source,
        **({"size": size_of, "collate_fn": same} | arguments),
    )


@pytest.mark.parametrize(
    "context", ["fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_persistent_workers_of_every_kind(context: str, sharded: bool) -> None:
    """Three epochs with `set_epoch`, each of all samples once, and each another order."""
    stream = make(shards_of(SIZES, [100, 350, 360]) if sharded else None)
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        epochs.append(list(loader))
        assert numbers(epochs[-1]) == list(range(len(SIZES)))
    assert epochs[0] != epochs[1] != epochs[2]
    stream.set_epoch(1)
    assert list(loader) == epochs[1]


@pytest.mark.parametrize("split", ["none", "workers", None])
def test_a_source_that_splits_itself_is_split_once(split: Any) -> None:
    loader = DataLoader(
        make(SplitsItself(list(Numbered(SIZES))), split=split), batch_size=None, num_workers=3
    )
    assert numbers(list(loader)) == list(range(len(SIZES)))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"look_ahead": 6000}, {"batches_per_epoch": 90}])
def test_a_stateful_loader_goes_on_at_every_batch(workers: int, options: Any) -> None:
    """The rest equals the rest."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        return stateful(make(**options), batch_size=None, num_workers=workers)

    whole = check_every_stop(loader, file=as_pickle, every=13 if workers else 2)
    assert len(whole) > 50


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.filterwarnings("ignore:epoch . starts over:torchbudget.errors.RepeatedSamplesWarning")
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("sharded", "options"), [(True, {}), (False, {}), (True, {"batches_per_epoch": 9})]
)
def test_a_stateful_loader_goes_on_between_epochs(
    sharded: bool, options: Any, persistent: bool
) -> None:
    """All workers begin the next epoch, though none was asked for a batch of the last one."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    sizes = SIZES[:150]
    source = shards_of(sizes, [30, 60]) if sharded else Numbered(sizes)

    def loader() -> Any:
        stream = make(source, **options)
        return stateful(stream, batch_size=None, num_workers=2, persistent_workers=persistent)

    uninterrupted = loader()
    epochs = [list(uninterrupted) for _ in range(3)]
    for done in (1, 2):
        stopped, resumed = loader(), loader()
        assert [list(stopped) for _ in range(done)] == epochs[:done]
        resumed.load_state_dict(as_pickle(stopped.state_dict()))
        assert [list(resumed) for _ in range(done, 3)] == epochs[done:]


# ---------------------------------------------------------------------- transforms, threads


def jitter(sample: Any) -> Any:
    number, size = sample
    return number, size, float(transforms.rng().random())


def slow_in_pieces(sample: Any) -> Any:
    time.sleep(0.0005 * (sample[0] % 3))
    return sample


@pytest.mark.parametrize("threads", [0, 1, 8])
@pytest.mark.parametrize("workers", [0, 3])
def test_augmentations_do_not_depend_on_workers_or_threads(threads: int, workers: int) -> None:
    """What a transform draws is a function of (seed, epoch, position)."""
    plain = make(transforms=[slow_in_pieces, jitter], window=700)
    expected = sorted(one for batch in plain for one in batch)
    stream = make(transforms=[slow_in_pieces, jitter], threads=threads, window=700)
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    # Torch has made lists of them.
    found = sorted(tuple(one) for batch in loader for one in batch)
    assert found == expected
    stream.set_epoch(1)
    other = [one for batch in stream for one in batch]
    assert {one[2] for one in other}.isdisjoint(one[2] for one in expected)
    stream.close()


def test_threads_run_at_a_time_and_end() -> None:
    """Eight wait for each other; none is left when the stream is closed, or broken off."""
    before = set(threading.enumerate())
    eight = threading.Barrier(8)

    def meet(sample: Any) -> Any:
        eight.wait(60)
        return sample

    source = Numbered(SIZES[:640])
    with make(source, window=640, transforms=[meet], threads=8) as stream:
        assert numbers(list(stream)) == list(range(640))
        assert set(threading.enumerate()) == before
        next(iter(stream))
        assert set(threading.enumerate()) != before
    assert set(threading.enumerate()) == before


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
    with pytest.raises(SampleError, match=r"item 7 cannot be made: ValueError: no such"):
        list(DataLoader(stream, batch_size=None, num_workers=workers))
    stream = make(**options, on_error="skip")
    found = numbers(list(DataLoader(stream, batch_size=None, num_workers=workers)))
    assert found == [number for number in range(len(SIZES)) if number % 100 != 7]
    assert stream.skipped_samples.failed == 7


def test_a_size_that_raises() -> None:
    def size(sample: Any) -> int:
        return {}[0] if sample[0] == 30 else sample[1]

    with pytest.raises(Exception, match="sample 30 has no size"):
        list(make(size=size))
    stream = make(size=size, on_error="skip")
    assert numbers(list(stream)) == [number for number in range(len(SIZES)) if number != 30]
    assert stream.skipped_samples.failed == 1


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


# ---------------------------------------------------------------------- bytes


# ---------------------------------------------------------------------- ranks
