"""Streams in real `DataLoader`s: processes of every kind, resumed, killed, and in threads."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from tests.support.dying_workers import no_signals_of_workers
from tests.support.ranks import run_ranks
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
from torchbudget import BudgetedIterableDataset, MemoryBudget, PaddedCost, transforms, trim_malloc
from torchbudget.errors import OversizeError, SampleError

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


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_workers_see_each_sample_once(workers: int) -> None:
    loader = DataLoader(make(), batch_size=None, num_workers=workers)
    assert numbers(list(loader)) == list(range(len(SIZES)))


@pytest.mark.parametrize("split", ["none", "workers", None])
def test_a_source_that_splits_itself_is_split_once(split: Any) -> None:
    loader = DataLoader(
        make(SplitsItself(list(Numbered(SIZES))), split=split), batch_size=None, num_workers=3
    )
    assert numbers(list(loader)) == list(range(len(SIZES)))


def part(shard: int, num_shards: int) -> Iterator[Any]:
    return iter(list(enumerate(SIZES.tolist()))[shard::num_shards])


def test_a_function_of_its_shard() -> None:
    loader = DataLoader(make(part), batch_size=None, num_workers=3)
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


@pytest.mark.parametrize("drawn", [0, 2, 5])
def test_an_epoch_after_one_that_was_broken_off(drawn: int) -> None:
    """With a number of batches an epoch goes on where the last one ended, if it came to its end.

    Else it is the epoch that another stream begins with.
    """
    whole, stream, other = (make(batches_per_epoch=5) for _ in range(3))
    first, second = list(whole), list(whole)
    assert list(islice(stream, drawn)) == first[:drawn]
    stream.set_epoch(1)
    other.set_epoch(1)
    assert list(stream) == (second if drawn == 5 else list(other))


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


def test_the_cause_is_kept() -> None:
    with pytest.raises(SampleError) as raised:
        list(make(transforms=[fail_at_7]))
    assert isinstance(raised.value.__cause__, ValueError)
    assert "fail_at_7" in str(raised.traceback[-1]) or raised.value.__cause__.__traceback__


def test_a_size_that_raises() -> None:
    def size(sample: Any) -> int:
        return {}[0] if sample[0] == 30 else sample[1]

    with pytest.raises(Exception, match="sample 30 has no size"):
        list(make(size=size))
    stream = make(size=size, on_error="skip")
    assert numbers(list(stream)) == [number for number in range(len(SIZES)) if number != 30]
    assert stream.skipped_samples.failed == 1


def test_a_size_that_raises_beside_one_that_is_too_large() -> None:
    """In one window: both are skipped, each is counted as what it is, and no batch is too large."""

    def size(sample: Any) -> int:
        return {}[0] if sample[0] == 30 else 1000 if sample[0] == 31 else sample[1]

    stream = make(size=size, on_error="skip", oversize="skip")
    batches = list(stream)
    assert numbers(batches) == [number for number in range(len(SIZES)) if number not in (30, 31)]
    assert (stream.skipped_samples.failed, stream.skipped_samples.oversize) == (1, 1)
    with pytest.raises(OversizeError, match="1 of 127 samples are over the budget alone"):
        list(make(size=size, on_error="skip"))


class Broken:
    """Ends with an error in its middle."""

    def __iter__(self) -> Iterator[Any]:
        yield from islice(Numbered(SIZES), 40)
        raise OSError("the disk is gone")


class Short(list[Any]):
    """Says that it holds more than it does."""

    def __len__(self) -> int:
        return 200


def missing() -> Any:
    return Path("/no/such/shard").open()


def test_sources_that_break() -> None:
    """In the middle, before their length, or missing: an error that says where."""
    with pytest.raises(SampleError, match=r"shard 0, cannot be read: OSError: the disk is gone"):
        list(make(Broken()))
    shards = shards_of(SIZES, [300])
    with pytest.raises(SampleError, match=r"shard 1, ended, 200 items were expected"):
        list(make([shards[0], Short(shards[1][:100])], shuffle=False))
    with pytest.raises(SampleError, match=r"shard 0, cannot be read: FileNotFoundError"):
        list(make([missing]))


def die(sample: Any) -> Any:
    if sample[0] == 300 and get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


@pytest.mark.slow
def test_a_killed_worker_is_no_hang() -> None:
    loader = DataLoader(make(transforms=[die]), batch_size=None, num_workers=2)
    with (
        no_signals_of_workers(),
        pytest.raises(RuntimeError, match=r"killed by signal|exited unexpectedly"),
    ):
        list(loader)


def test_nothing_is_left_behind() -> None:
    """No process when a loader is broken off."""
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    batches = iter(DataLoader(make(), batch_size=None, num_workers=2))
    next(batches)
    del batches
    gc.collect()
    assert {child.pid for child in me.children(recursive=True)} <= before


# ---------------------------------------------------------------------- bytes


class Blobs:
    """Samples of 1 KB to 50 MB, in any order."""

    def __init__(self, n: int) -> None:
        rng = np.random.default_rng(1)
        self.sizes = np.exp(rng.uniform(np.log(1e3), np.log(50e6), n)).astype(int).tolist()

    def __iter__(self) -> Iterator[Any]:
        for size in self.sizes:
            yield {"blob": torch.zeros(size, dtype=torch.uint8)}


def blob_size(sample: Any) -> int:
    return len(sample["blob"])


def begin(worker: int) -> None:
    trim_malloc()  # or else the heap keeps blocks of any size
    global before  # noqa: PLW0603  (of this worker)
    before = psutil.Process().memory_info().rss


def measured(batch: list[Any]) -> tuple[int, int]:
    return psutil.Process().memory_info().rss - before, len(batch)


def blobs(**options: Any) -> BudgetedIterableDataset:
    return BudgetedIterableDataset(
        Blobs(300), PaddedCost(unit_bytes=1), 60_000_000, size=blob_size, **options
    )


def test_the_look_ahead_is_bounded_in_bytes() -> None:
    """Counted, and in the resident memory of a real worker.

    Beside the bound there is the sample that did not fit any more: 50 MB at the most.
    """
    stream = blobs(look_ahead="100MB", collate_fn=len)
    reader = iter(stream)
    assert sum(reader) == 300
    assert 50e6 < reader.windows.largest_buffered_bytes <= 100e6
    stream = blobs(look_ahead="100MB", collate_fn=measured)
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=1,
        worker_init_fn=begin,
        multiprocessing_context="spawn",  # a fork has the free blocks of all tests before
    )
    found = list(loader)
    assert sum(n for _, n in found) == 300
    assert 50e6 < max(rss for rss, _ in found) < 100e6 + 50e6 + 20e6


class Wide:
    """Samples of 20 MB, of which a transform takes a fortieth."""

    def __iter__(self) -> Iterator[Any]:
        for number in range(160):
            yield {"blob": torch.full((20_000_000,), number % 256, dtype=torch.uint8)}


def crop(sample: Any) -> Any:
    return {"blob": sample["blob"][100:500_100]}


def crops(sample: Any) -> list[Any]:
    return [{"blob": sample["blob"][start : start + 500_000]} for start in (0, 1_000_000)]


@pytest.mark.parametrize("transform", [crop, transforms.expand(crops)])
@pytest.mark.slow
def test_crops_do_not_keep_the_whole_alive(transform: Any) -> None:
    """In the resident memory of a real worker: 1.2 times the look-ahead, and one sample.

    A window of 100 crops keeps 2 GB alive otherwise.
    """
    options: dict[str, Any] = {"size": blob_size, "window": 100, "transforms": [transform]}
    stream = BudgetedIterableDataset(
        Wide(), TOKENS, 5_000_000, look_ahead="60MB", collate_fn=measured, **options
    )
    loader = DataLoader(
        stream,
        batch_size=None,
        num_workers=1,
        worker_init_fn=begin,
        multiprocessing_context="spawn",
    )
    found = list(loader)
    assert sum(n for _, n in found) == 160 * (1 if transform is crop else 2)
    assert 40e6 < max(rss for rss, _ in found) < 1.2 * 60e6 + 20e6


def test_a_share_of_the_hosts_budget_is_the_look_ahead() -> None:
    stream = BudgetedIterableDataset(
        Blobs(20),
        PaddedCost(unit_bytes=1),
        MemoryBudget(device=60_000_000, host=400_000_000),
        size=blob_size,
        collate_fn=len,
    )
    reader = iter(stream)
    assert sum(reader) == 20
    assert reader.windows.largest_buffered_bytes <= 100_000_000


# ---------------------------------------------------------------------- ranks

RANKS = """
import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.data.stream.test_loader import make, part
from torchbudget import stop_together

dist.init_process_group("gloo")
shared = list(DataLoader(make(), batch_size=None, num_workers=2))
uneven = list(stop_together(DataLoader(make(part, uneven=True), batch_size=None, num_workers=1)))
apart = dist.new_group([dist.get_rank()])  # each rank alone: none waits for another one
alone = stop_together(DataLoader(make(part, uneven=True), batch_size=None), group=apart)
found = [shared, uneven, list(alone)]
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
"""


@pytest.mark.distributed
def test_real_ranks_and_workers(tmp_path: Path) -> None:
    """Once over three ranks of two workers each, as many on each; and an end that is agreed."""
    found = run_ranks(RANKS, tmp_path, 3)
    shared = [one[0] for one in found]
    assert numbers([batch for rank in shared for batch in rank]) == list(range(len(SIZES)))
    assert len(set(map(len, shared))) == 1
    assert len({len(one[1]) for one in found}) == 1
    assert numbers([batch for one in found for batch in one[2]]) == list(range(len(SIZES)))
