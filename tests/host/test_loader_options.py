"""The results, the refusals and the side effects of `loader_options` and `host_bytes`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchbudget as tb
from tests.support.memory_groups import SHM
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from torchbudget.errors import BudgetError, OptionError
from torchbudget.host.options import LoaderOptions, host_bytes
from torchbudget.random_state import RandomState

SIZES = np.random.default_rng(0).integers(5, 400, 600)
ROOMY = tb.MemoryBudget(host="64GiB")


@pytest.fixture(autouse=True)
def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial ends after the batches that it always makes."""
    monkeypatch.setattr("torchbudget.host.options._TRIAL_S", 0.0)


class Counted:
    """Samples that are read in workers only."""

    reads_here = False

    def __init__(self, fields: int = 1) -> None:
        self.fields, self.reads, self.parent = fields, 0, os.getpid()

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        assert os.getpid() != self.parent or self.reads_here
        fields = (torch.full((int(SIZES[index]), 8), float(index)),) * self.fields
        return dict(enumerate(map(torch.clone, fields))) | {"index": index}


def sampler(budget: int = 2**17, **options: Any) -> tb.MemoryBudgetBatchSampler:
    return tb.MemoryBudgetBatchSampler(SIZES, tb.PaddedCost(unit_bytes=32), budget, **options)


def stream(budget: Any = 4000) -> tb.BudgetedIterableDataset:
    texts = [["x" * int(size) for size in SIZES[:200]], ["y" * int(size) for size in SIZES[200:]]]
    return tb.BudgetedIterableDataset(
        texts, tb.PaddedCost(unit_bytes=1), budget, size=len, collate_fn=list
    )


def options(budget: Any = ROOMY, given: Any = None, **others: Any) -> LoaderOptions:
    chosen = {"dataset": Counted(), "collate_fn": tb.PadCollate(), "max_workers": 2} | others
    return tb.loader_options(sampler() if given is None else given, budget, **chosen)


def test_a_stock_loader_takes_them() -> None:
    """Every sample comes once with them; they are a dict that can be pickled."""
    dataset, ours = Counted(), sampler()
    chosen = options(given=ours, dataset=dataset)
    assert (chosen["num_workers"], chosen["prefetch_factor"]) == (2, 8)
    assert chosen["persistent_workers"]
    loader = DataLoader(dataset, batch_sampler=ours, collate_fn=tb.PadCollate(), **chosen)
    found = torch.cat([batch["index"] for batch in loader])
    assert sorted(found.tolist()) == list(range(len(SIZES)))
    again = pickle.loads(pickle.dumps(chosen))  # noqa: S301
    assert dict(again) == dict(chosen)
    for name in ("total", "batches in flight", "64 GiB", "limited by"):
        assert name in again.explain()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_nothing_here_is_changed(start: str) -> None:
    """No sample is read in this process, no generator moves, and the sampler stays in its place."""
    dataset, ours = Counted(), sampler()
    taken = iter(ours)
    for _ in range(3):
        next(taken)
    at, state, children = ours.state_dict(), RandomState.take(), multiprocessing.active_children()
    options(given=ours, dataset=dataset, max_workers=1, multiprocessing_context=start)
    assert dataset.reads == 0
    assert ours.state_dict() == at
    now = RandomState.take()
    assert state.cpu.equal(now.cpu)
    assert (state.python, state.numpy) == (now.python, now.numpy)
    assert multiprocessing.active_children() == children


def test_a_stream_is_not_read_here() -> None:
    """Its epoch and position stay, its loader yields all of it, and several batches are tried."""
    ours = stream(tb.MemoryBudget(device=4000, host="64GiB"))
    at = ours.state_dict()
    chosen = tb.loader_options(ours, ours.budget, max_workers=2)
    assert ours.state_dict() == at
    found = [len(text) for batch in DataLoader(ours, batch_size=None, **chosen) for text in batch]
    assert sorted(found) == sorted(SIZES.tolist())


def test_it_refuses_with_the_smallest_budget_that_would_do() -> None:
    """That budget is then accepted, and leaves no worker."""
    with pytest.raises(BudgetError, match=r"even without workers.* limits=") as refused:
        options(tb.MemoryBudget(host="10MiB"))
    least = int(str(refused.value).partition("MemoryBudget(host=")[2].partition(")")[0])
    chosen = options(tb.MemoryBudget(host=int(least * 1.02)))
    assert chosen["num_workers"] == 0
    assert (chosen["prefetch_factor"], chosen["persistent_workers"]) == (None, False)
    with pytest.raises(BudgetError, match=r"max_batch_size=.*look_ahead="):
        tb.loader_options(stream(), tb.MemoryBudget(host="10MiB"))


def test_shared_memory_limits_what_is_prefetched(caplog: pytest.LogCaptureFixture) -> None:
    """The budget's share of /dev/shm holds the window of batches; too little of it: no workers."""
    roomy, batch = options(), 2**17
    chosen = options(tb.MemoryBudget(host="64GiB", shared=6 * batch))
    assert chosen.needs.shared_bytes <= 6 * batch < roomy.needs.shared_bytes
    assert chosen["num_workers"] >= 1
    assert str(SHM) in chosen.limited_by
    assert not caplog.text
    chosen = options(tb.MemoryBudget(host="64GiB", shared=batch))
    assert chosen["num_workers"] == 0
    assert str(SHM) in chosen.limited_by
    assert "no worker fits" in caplog.text


@contextmanager
def free_files(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + number, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_open_files_limit_what_is_prefetched() -> None:
    """Every tensor in flight is an open file; where none fit, batches are loaded in the loop."""
    roomy = options()
    with free_files(40):
        chosen = options()
    assert chosen.needs.descriptors <= 40 < roomy.needs.descriptors
    assert chosen["num_workers"] == 2
    assert chosen.limited_by.startswith("open files")  # not the number of workers
    with free_files(100):
        chosen = options(dataset=Counted(fields=60))
    assert chosen["num_workers"] == chosen.needs.descriptors == 0
    assert chosen.limited_by.startswith("open files")


def test_a_loader_with_options_of_ones_own_can_be_asked_about() -> None:
    """What it needs follows from its options; a stream of one batch is read again and again."""
    cost, source = tb.PaddedCost(unit_bytes=1), [[torch.zeros(8192)]]
    of_one, of_none = (
        tb.BudgetedIterableDataset(source, cost, 16_384, size=len, drop_last=drops)
        for drops in (False, True)
    )
    needs = host_bytes(DataLoader(of_one, batch_size=None, num_workers=2))
    assert needs.shared_bytes == int(1.06 * 6 * 32768)  # six batches in whole pages, and a margin
    assert "total" in str(needs)
    with pytest.raises(OptionError, match="drop_last=True drops all"):
        host_bytes(DataLoader(of_none, batch_size=None))
    for wrong in (DataLoader(TensorDataset(torch.zeros(64, 9)), 8), SIZES):
        with pytest.raises(OptionError, match="must come from a MemoryBudgetBatchSampler"):
            host_bytes(wrong)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budget": tb.MemoryBudget(device="1GiB")}, BudgetError, "the host's bytes"),
        ({"budget": "1GiB"}, BudgetError, "the host's bytes"),
        ({"dataset": None}, OptionError, "map-style data set.* dataset=NoneType"),
        ({"dataset": [1, 2, 3]}, OptionError, "3"),
        ({"given": [[0], [1]]}, OptionError, "batch_sampler=list"),
        ({"given": stream()}, OptionError, "leave both out"),
        ({"multiprocessing_context": "threads"}, ValueError, "fork"),
        ({"max_workers": 0}, OptionError, "max_workers"),
        ({"ranks_per_machine": 0}, OptionError, "ranks_per_machine"),
        ({"reserve": -5}, BudgetError, "expected between 0"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(change, error, message) -> None:
    """With what was expected and what came."""
    started = set(multiprocessing.active_children())
    with pytest.raises(error, match=message):
        options(**change)
    assert set(multiprocessing.active_children()) <= started


def test_a_sample_that_cannot_be_read_raises_here() -> None:
    """The trial's worker passes on what the data set raises, as a loader's does."""

    class Broken(Counted):
        def __getitem__(self, index: int) -> Any:
            raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        options(dataset=Broken())


def test_a_cache_counts_as_if_it_is_full() -> None:
    """A trial sees the first samples that it keeps, and others follow."""
    dataset, full = Counted(), "sample caches, once they are full"
    dataset.reads_here = True
    cache = tb.SampleCache(dataset, tb.MiB(256))
    loader = DataLoader(cache, batch_sampler=sampler(), collate_fn=tb.PadCollate())
    empty = host_bytes(loader)
    assert dict(empty.parts)[full] == pytest.approx(tb.MiB(256), abs=tb.MiB(1))
    for index in range(len(cache)):
        cache[index]
    kept = dict(empty.parts)[full] - dict(host_bytes(loader).parts)[full]
    assert kept == pytest.approx(cache.nbytes, abs=tb.MiB(1))  # it is here by now
    little = tb.MemoryBudget(host=empty.total_bytes - tb.MiB(128))
    with pytest.raises(BudgetError, match=full):
        options(little, dataset=cache)
    del cache, loader
    plain = DataLoader(dataset, batch_sampler=sampler(), collate_fn=tb.PadCollate())
    assert full not in dict(host_bytes(plain).parts)


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_share_data_get_equal_numbers_of_workers(tmp_path: Path) -> None:
    """The smallest of any rank; what fails on one fails on all. Ranks given by hand are alone."""
    first, second = run_ranks(script("planning.workers_of_ranks"), tmp_path, 2)
    assert (first[0], second[0]) == (1, 1)
    assert first[1] == "another rank, where no more workers fit"
    assert (first[2], second[2]) == (2, 1)
    assert first[3].startswith("RankError: rank 1 failed, see its traceback: BudgetError")
    assert second[3].startswith("BudgetError: even without workers")
