"""What `loader_options` returns, refuses and leaves alone."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import resource
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchbudget as tb
from tests.support.memory_groups import SHM
from torchbudget.errors import BudgetError, OptionError
from torchbudget.random_state import RandomState

SIZES = np.random.default_rng(0).integers(5, 400, 600)
ROOMY = tb.MemoryBudget(host="64GiB")


class Counted:
    """Samples that know in which process they were read."""

    def __init__(self) -> None:
        self.reads = 0
        self.parent = os.getpid()

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int):
        self.reads += 1
        assert os.getpid() != self.parent or self.reads_here
        return {"x": torch.full((int(SIZES[index]), 8), float(index)), "index": index}

    reads_here = False


def sampler(budget: int = 2**17, **options) -> tb.MemoryBudgetBatchSampler:
    return tb.MemoryBudgetBatchSampler(SIZES, tb.PaddedCost(unit_bytes=32), budget, **options)


def options(budget: tb.MemoryBudget = ROOMY, given=None, **others) -> tb.LoaderOptions:
    chosen = {"dataset": Counted(), "collate_fn": tb.PadCollate(), "trial_s": 0} | others
    return tb.loader_options(sampler() if given is None else given, budget, **chosen)


@pytest.mark.parametrize("trial_s", [0, 0.4])
def test_a_stock_loader_takes_them(trial_s) -> None:
    """Every sample comes once with them, and they are a frozen mapping."""
    dataset, ours = Counted(), sampler()
    chosen = options(given=ours, dataset=dataset, max_workers=2, trial_s=trial_s)
    assert set(chosen) == {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers"}
    with pytest.raises((AttributeError, TypeError)):
        chosen["num_workers"] = 9  # type: ignore[index]
    dataset.reads_here = True
    loader = DataLoader(dataset, batch_sampler=ours, collate_fn=tb.PadCollate(), **chosen)
    found = torch.cat([batch["index"] for batch in loader])
    assert sorted(found.tolist()) == list(range(len(SIZES)))
    explained = chosen.explain()
    assert all(name in explained for name in ("total", "batches in flight", "64 GiB", "limited by"))
    assert sum(size for _, size in chosen.needs.parts) == chosen.needs.total_bytes
    if not trial_s:
        assert chosen["num_workers"] == 2
        assert chosen["prefetch_factor"] == 8


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_nothing_here_is_changed(start) -> None:
    """No sample is read in this process, no generator moves, and the sampler stays in its place."""
    dataset, ours = Counted(), sampler()
    taken = iter(ours)
    for _ in range(3):
        next(taken)
    at, state, children = ours.state_dict(), RandomState.take(), multiprocessing.active_children()
    options(given=ours, dataset=dataset, max_workers=1, trial_s=0.2, multiprocessing_context=start)
    assert dataset.reads == 0
    assert ours.state_dict() == at
    now = RandomState.take()
    assert state.cpu.equal(now.cpu)
    assert (state.python, state.numpy) == (now.python, now.numpy)
    assert multiprocessing.active_children() == children


def test_a_stream_is_not_read_here() -> None:
    """Its epoch and position stay, and its loader yields all of it."""
    texts = [["x" * int(size) for size in SIZES[:200]], ["y" * int(size) for size in SIZES[200:]]]
    stream = tb.BudgetedIterableDataset(
        texts,
        tb.PaddedCost(unit_bytes=1),
        tb.MemoryBudget(device=4000, host="64GiB"),
        size=len,
        collate_fn=list,
    )
    at = stream.state_dict()
    chosen = tb.loader_options(stream, stream.budget, max_workers=2, trial_s=0.2)
    assert stream.state_dict() == at
    found = [len(text) for batch in DataLoader(stream, batch_size=None, **chosen) for text in batch]
    assert sorted(found) == sorted(SIZES.tolist())


def test_a_stream_is_predicted_by_several_batches() -> None:
    """However long its worker takes to start, and however little time there is."""
    texts = [["x" * int(size) for size in SIZES]]
    stream = tb.BudgetedIterableDataset(
        texts, tb.PaddedCost(unit_bytes=1), 2000, size=len, collate_fn=list
    )
    chosen = tb.loader_options(stream, ROOMY, max_workers=1, trial_s=0)
    assert chosen.needs.basis == "the largest of 8 batches that were read"


def test_it_refuses_with_the_smallest_budget_that_would_do() -> None:
    """That budget is then accepted, and leaves no worker."""
    with pytest.raises(BudgetError, match=r"even without workers.* host_batch_bytes=") as refused:
        options(tb.MemoryBudget(host="10MiB"))
    least = int(str(refused.value).partition("MemoryBudget(host=")[2].partition(")")[0])
    chosen = options(tb.MemoryBudget(host=int(least * 1.02)))
    assert chosen["num_workers"] == 0
    assert not chosen["persistent_workers"]
    assert chosen["prefetch_factor"] is None


def test_a_stream_is_refused_by_what_it_has() -> None:
    """It has no `host_batch_bytes=`; `look_ahead=` and `max_batch_size=` make it smaller."""
    stream = tb.BudgetedIterableDataset(
        [["x" * int(size) for size in SIZES]], tb.PaddedCost(unit_bytes=1), 4000, size=len
    )
    with pytest.raises(BudgetError, match=r"max_batch_size=.*look_ahead=") as refused:
        tb.loader_options(stream, tb.MemoryBudget(host="10MiB"), trial_s=0)
    assert "host_batch_bytes" not in str(refused.value)


@pytest.mark.slow
def test_shared_memory_limits_what_is_prefetched() -> None:
    """The budget's share of /dev/shm holds the window of batches; too little of it: no workers."""
    roomy = options(max_workers=2)
    batch = 2**17
    chosen = options(tb.MemoryBudget(host="64GiB", shared=6 * batch), max_workers=2)
    assert chosen.needs.shared_bytes <= 6 * batch < roomy.needs.shared_bytes
    assert chosen["num_workers"] >= 1
    assert str(SHM) in chosen.limited_by
    chosen = options(tb.MemoryBudget(host="64GiB", shared=batch), max_workers=2)
    assert chosen["num_workers"] == 0
    assert str(SHM) in chosen.limited_by


def test_open_files_limit_what_is_prefetched() -> None:
    """Every tensor of a batch in flight is an open file by torch's default strategy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    roomy = options(max_workers=2)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 40, hard))
        chosen = options(max_workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert chosen.needs.descriptors <= 40 < roomy.needs.descriptors
    assert chosen["num_workers"] == 2
    assert chosen.limited_by.startswith("open files")  # not the number of workers


def test_without_workers_no_file_is_open() -> None:
    """Batches of so many tensors that no worker fits are loaded in the loop, not refused."""

    class Wide(Counted):
        def __getitem__(self, index: int):
            return {f"x{n}": torch.ones(int(SIZES[index])) for n in range(60)}

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, hard))
        chosen = options(dataset=Wide(), max_workers=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert chosen["num_workers"] == 0
    assert chosen.needs.descriptors == 0
    assert chosen.limited_by.startswith("open files")


@pytest.mark.slow
def test_more_is_never_predicted_to_need_less() -> None:
    """A worker more, or a batch prefetched more, needs more of everything.

    Batches are of 8 MiB, because what else a process holds differs by some MiB between trials.
    """

    class Large:
        def __len__(self) -> int:
            return len(SIZES)

        def __getitem__(self, index: int):
            return torch.ones(int(SIZES[index]), 512)

    dataset = Large()
    ours = tb.MemoryBudgetBatchSampler(SIZES, tb.PaddedCost(unit_bytes=2048), tb.MiB(8))
    needs = [
        tb.host_bytes(
            DataLoader(
                dataset,
                batch_sampler=ours,
                collate_fn=tb.PadCollate(),
                num_workers=workers,
                prefetch_factor=prefetch,
            ),
            trial_s=0,
        )
        for workers, prefetch in ((0, None), (1, 1), (1, 4), (2, 4))
    ]
    totals = [one.total_bytes for one in needs]
    assert all(b > a for a, b in pairwise(totals)), totals
    assert [one.shared_bytes for one in needs] == sorted(one.shared_bytes for one in needs)


@pytest.mark.slow
def test_any_loader_can_be_asked_about() -> None:
    """A shuffled one of torch's own is neither iterated nor moved, nor is its data copied."""
    dataset = TensorDataset(torch.zeros(64, 1000))
    generator = torch.Generator().manual_seed(5)
    for given in (None, generator):
        loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2, generator=given)
        before, own = torch.get_rng_state(), generator.get_state()
        needs = tb.host_bytes(loader, trial_s=0)
        assert before.equal(torch.get_rng_state())
        assert own.equal(generator.get_state())
        # Six batches of eight rows in whole pages, by the largest that was read.
        assert needs.shared_bytes == 6 * 32768
        assert "total" in str(needs)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budget": tb.MemoryBudget(device="1GiB")}, BudgetError, "the host's bytes"),
        ({"budget": "1GiB"}, BudgetError, "the host's bytes"),
        ({"dataset": None}, OptionError, "give dataset="),
        ({"dataset": iter([])}, OptionError, "give dataset="),
        ({"dataset": [1, 2, 3]}, OptionError, "3"),
        ({"given": [[0], [1]]}, OptionError, "host_bytes"),
        ({"collate_fn": 3}, OptionError, "collate_fn"),
        ({"worker_init_fn": 3}, OptionError, "worker_init_fn"),
        ({"multiprocessing_context": "threads"}, OptionError, "fork"),
        ({"max_workers": 0}, OptionError, "max_workers"),
        ({"ranks_per_machine": 0}, OptionError, "ranks_per_machine"),
        ({"trial_s": -1}, OptionError, "trial_s"),
        ({"trial_s": float("inf")}, OptionError, "trial_s"),
        ({"pin_memory": "yes"}, OptionError, "pin_memory"),
        ({"persistent_workers": 1}, OptionError, "persistent_workers"),
        ({"reserve": -5}, BudgetError, "expected between 0"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(change, error, message) -> None:
    """With what was expected and what came."""
    started = set(multiprocessing.active_children())
    with pytest.raises(error, match=message):
        options(**change)
    assert set(multiprocessing.active_children()) == started


def test_a_sample_that_cannot_be_read_raises_here() -> None:
    """The trial's worker passes on what the data set raises, as a loader's does."""

    class Broken(Counted):
        def __getitem__(self, index: int):
            raise ValueError("no such file")

    with pytest.raises(ValueError, match="no such file"):
        options(dataset=Broken())


@pytest.mark.slow
def test_the_chosen_options_can_be_pickled() -> None:
    """As checkpoints and launchers do."""
    chosen = options(max_workers=1)
    again = pickle.loads(pickle.dumps(chosen))  # noqa: S301
    assert dict(again) == dict(chosen)
    assert again.explain() == chosen.explain()


def test_a_cache_counts_as_if_it_is_full() -> None:
    """A trial sees the first samples that it keeps, and others follow."""
    dataset, full = Counted(), "sample caches, once they are full"
    dataset.reads_here = True
    cache = tb.SampleCache(dataset, tb.MiB(256))
    loader = DataLoader(cache, batch_sampler=sampler(), collate_fn=tb.PadCollate())
    empty = tb.host_bytes(loader, trial_s=0)
    assert dict(empty.parts)[full] == pytest.approx(tb.MiB(256), abs=tb.MiB(1))
    for index in range(len(cache)):
        cache[index]
    filled = tb.host_bytes(loader, trial_s=0)
    kept = dict(empty.parts)[full] - dict(filled.parts)[full]
    assert kept == pytest.approx(cache.nbytes, abs=tb.MiB(1))  # it is here by now
    little = tb.MemoryBudget(host=empty.total_bytes - tb.MiB(128))
    with pytest.raises(BudgetError, match=full):
        options(little, dataset=cache)
    del cache, loader
    assert full not in dict(tb.host_bytes(DataLoader(dataset), trial_s=0).parts)
