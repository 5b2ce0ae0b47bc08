"""A cache that workers share: never over its bytes, right after any worker's death."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from tests.support.dying_workers import no_signals_of_workers
from torchbudget import SampleCache
from torchbudget.errors import BudgetError, OptionError, SampleError


class Reads:
    """Samples of their own sizes, each a function of its index; reading is counted."""

    def __init__(self, sizes: Any) -> None:
        self.sizes = list(sizes)
        self.reads = torch.zeros(len(self.sizes), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        wave = torch.arange(self.sizes[index], dtype=torch.int32) + index
        return {"wave": wave, "number": index, "name": f"sample {index}"}


def first(samples: list[Any]) -> Any:
    return samples[0]


def check(samples: list[Any], sizes: Any) -> None:
    for sample in samples:
        index = sample["number"]
        assert sample["wave"].equal(torch.arange(sizes[index], dtype=torch.int32) + index)
        assert sample["name"] == f"sample {index}"


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(1000, 60_000))
def test_bytes_are_never_over(sizes: list[int], budget: int) -> None:
    """And what is kept is hit, each time."""
    cache = SampleCache(Reads(sizes), budget)
    for _ in range(2):
        check([cache[index] for index in range(len(sizes))], sizes)
        assert cache.nbytes <= budget
    assert cache.hits == cache.kept
    assert cache.misses == 2 * len(sizes) - cache.kept


@pytest.mark.parametrize(
    "context", ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
)
def test_workers_share_it(context: str) -> None:
    """In the second epoch the hit rate is the kept share, over all workers."""
    sizes = np.random.default_rng(0).integers(800, 1200, 400)
    data = Reads(sizes)
    cache = SampleCache(data, 4 * int(sizes.sum()) // 2)
    for _ in range(2):
        hits = cache.hits
        options: Any = {"num_workers": 2, "multiprocessing_context": context}
        loader = DataLoader(cache, batch_size=1, shuffle=True, collate_fn=first, **options)
        check(list(loader), sizes)
        assert cache.nbytes <= cache.budget
    assert cache.hits - hits == cache.kept
    assert 150 < cache.kept < 210
    assert int(data.reads.sum()) == cache.misses


class Deadly(Reads):
    """The worker that reads a certain sample dies, while it reads or while it writes."""

    where = "read"

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        if index == 37 and get_worker_info() is not None and self.reads[37] == 1:
            if self.where == "read":
                os.kill(os.getpid(), signal.SIGKILL)
            sample["deadly"] = Killing()
        return sample


class Killing:
    """Kills the process that pickles it."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return Killing, ()


# What a dead worker had sent is not received.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("where", ["read", "write"])
@pytest.mark.slow
def test_a_killed_worker_leaves_it_right(where: str) -> None:
    """The epoch ends with torch's error; the cache goes on, and nothing in it is torn."""
    sizes = np.random.default_rng(0).integers(800, 1200, 100)
    data = Deadly(sizes)
    data.where = where
    cache = SampleCache(data, "4MiB")

    loader: Any = DataLoader(cache, batch_size=1, collate_fn=first, num_workers=2)
    # Torch's own error, or that of a connection that broke.
    with no_signals_of_workers(), pytest.raises((RuntimeError, OSError, EOFError)):
        list(loader)
    for _ in range(2):
        found = list(loader)
        check(found, sizes)
        assert [sample["number"] for sample in found] == list(range(100))
    assert cache.kept == 100


@pytest.mark.parametrize("huge", [torch.zeros(1).expand(2**46), np.broadcast_to(0.0, 2**46)])
def test_a_sample_of_many_terabytes_is_not_copied(huge: Any) -> None:
    """One that only seems to have them: it is returned, and not kept."""
    cache = SampleCache([huge], "1MiB")
    assert [cache[0].shape for _ in range(2)] == [(2**46,)] * 2
    assert cache.kept == 0


def test_errors_name_the_sample() -> None:
    cache = SampleCache([1, {"generator": (one for one in ())}], "1MiB")
    with pytest.raises(SampleError, match="sample 1, of type dict, must be picklable"):
        cache[1]
    assert cache[0] == 1


def test_what_cannot_be() -> None:
    with pytest.raises(BudgetError, match="must exceed the table"):
        SampleCache(Reads([1] * 1000), 8000)
    with pytest.raises(BudgetError, match=r"this machine cannot allocate .* for a cache"):
        SampleCache(Reads([1]), 2**62)
    with pytest.raises(OptionError, match="map-style"):
        SampleCache(iter([1]), "1MiB")  # type: ignore[arg-type]
    cache = SampleCache(Reads([1, 2]), "1MiB")
    with pytest.raises(IndexError, match="out of range for 2 samples"):
        cache[2]
    assert cache[-1]["number"] == 1
    assert "1 of 2 samples" in repr(cache)
