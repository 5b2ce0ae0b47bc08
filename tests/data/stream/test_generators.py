"""Ranks, workers and resumed runs see the same samples, whatever draws random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tests.support.resuming import check_every_stop
from tests.support.streams import (
    TOKENS,
    Indexed,
    Numbered,
    loader_of,
    numbers,
    processes_of,
    same,
    size_of,
)
from torchbudget import BudgetedIterableDataset, transforms
from torchbudget.errors import OptionError, UnevenRanksError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SIZES = np.random.default_rng(4).integers(2, 60, 300)
DRAWS = {
    "random": random.random,
    "numpy": np.random.random,
    "normal": lambda: abs(np.random.randn()) % 1,
    "torch": lambda: float(torch.rand(())),
    "rng": lambda: float(transforms.rng().random()),
}


def crop(draw: str, sample: Any) -> Any:
    number, size = sample
    return number, 1 + int(DRAWS[draw]() * (size - 1))


def twice(draw: str, sample: Any) -> list[Any]:
    return [crop(draw, sample), crop(draw, sample)]


def half(draw: str, sample: Any) -> bool:
    return bool(DRAWS[draw]() < 0.5)


def failing(draw: str, sample: Any) -> Any:
    if DRAWS[draw]() < 0.1:
        raise ValueError("a bad sample")
    return sample


KINDS = {
    "crop": lambda draw: partial(crop, draw),
    "expand": lambda draw: transforms.expand(partial(twice, draw)),
    "drop": lambda draw: transforms.keep_if(partial(half, draw)),
}


def stream_of(transform: Any, source: Any = None, **options: Any) -> BudgetedIterableDataset:
    options = {"size": size_of, "window": 64, "collate_fn": same} | options
    source = Numbered(SIZES) if source is None else source
    return BudgetedIterableDataset(
        source, TOKENS, 300, transforms=[transform] if transform else [], **options
    )


@pytest.mark.parametrize("look_ahead", [None, 40_000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draw", DRAWS)
def test_ranks_see_the_same_samples(draw: str, kind: str, look_ahead: int | None) -> None:
    """Whatever their global generators stood at, and drew in between."""
    transform = KINDS[kind](draw)
    make = partial(stream_of, transform, num_replicas=2, rank=0, window=50, look_ahead=look_ahead)
    found: list[list[Any]] = []
    for rank in processes_of(make, 2):
        for worker in rank:
            random.seed(len(found))
            torch.manual_seed(len(found))
            np.random.seed(len(found))
            found.append([])
            for batch in worker:
                found[-1].append(batch)
                for other in DRAWS.values():
                    if other is not DRAWS["rng"]:
                        other()
    alone = list(stream_of(transform, window=50, look_ahead=look_ahead))
    together = [batch for worker in found for batch in worker]
    assert sorted(s for batch in together for s in batch) == sorted(s for b in alone for s in b)
    assert len({len(worker) for worker in found[::2]}) == 1


@pytest.mark.parametrize("source", [None, "map"])
@pytest.mark.parametrize("look_ahead", [None, 20_000])
def test_the_process_keeps_its_own_numbers(source: Any, look_ahead: int | None) -> None:
    """Bit for bit, the second normal number of NumPy's included; in the middle of an epoch, too."""

    def drawn() -> list[float]:
        return [
            random.gauss(0, 1),
            float(np.random.randn()),
            float(torch.randn(())),
            random.random(),
        ]

    def seed() -> None:
        random.seed(5)
        torch.manual_seed(5)
        np.random.seed(5)
        np.random.randn()

    seed()
    expected = [drawn() for _ in range(100)]
    seed()
    data = Indexed(list(Numbered(SIZES))) if source == "map" else Shuffles("numpy")
    stream = stream_of(partial(crop, "torch"), data, look_ahead=look_ahead)
    found = [drawn() for _, _ in zip(range(100), iter(stream), strict=False)]
    assert found == expected[: len(found)]
    assert len(found) > 15


# ---------------------------------------------------------------------- sources that draw


class Shuffles:
    """A buffer that is shuffled by a global generator, as many write it by hand."""

    def __init__(self, draw: str) -> None:
        self.draw = draw

    def __iter__(self) -> Iterator[Any]:
        buffer: list[Any] = []
        for sample in Numbered(SIZES):
            buffer.append(sample)
            if len(buffer) > 20:
                yield buffer.pop(int(DRAWS[self.draw]() * len(buffer)))
        while buffer:
            yield buffer.pop(int(DRAWS[self.draw]() * len(buffer)))


@pytest.mark.parametrize("look_ahead", [None, 20_000])
@pytest.mark.parametrize("transform", [None, partial(crop, "numpy")])
@pytest.mark.parametrize("draw", ["random", "numpy", "normal", "torch"])
def test_a_source_that_shuffles_itself(draw: str, transform: Any, look_ahead: int | None) -> None:
    """Ranks and workers that all read it see one order: every sample once."""
    make = partial(
        stream_of, transform, Shuffles(draw), num_replicas=2, rank=0, look_ahead=look_ahead
    )
    found: list[Any] = []
    for rank in processes_of(make, 2):
        for number, worker in enumerate(rank):
            torch.manual_seed(number)
            random.seed(number)
            np.random.seed(number)
            for batch in worker:
                found.append(batch)
                random.random()
                torch.rand(3)
    assert numbers(found) == list(range(len(SIZES)))
    check_every_stop(partial(stream_of, transform, Shuffles(draw), look_ahead=look_ahead), every=5)


# ---------------------------------------------------------------------- threads


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("draw", ["random", "numpy", "torch"])
def test_threads_refuse_global_generators(draw: str, workers: int) -> None:
    """Their numbers would go to another sample in every run."""
    stream = stream_of(partial(crop, draw), threads=4)
    name = {"numpy": "numpy.random"}.get(draw, draw)
    with (
        stream,
        pytest.raises(OptionError, match=rf"generator of {name}.*transforms\.rng\(\)"),
    ):
        list(loader_of(stream, workers))


def worker_seen(sample: Any) -> Any:
    info = get_worker_info()
    return (*sample, -1 if info is None else info.id)


@pytest.mark.parametrize("threads", [0, 4])
def test_transforms_see_their_worker(threads: int) -> None:
    """The source does not, since all workers read it; in threads of the same process neither."""
    stream = stream_of(worker_seen, Sees(), threads=threads)
    found = [one for batch in loader_of(stream, 3) for one in batch]
    assert sorted(one[0] for one in found) == list(range(len(SIZES)))
    assert {one[2] for one in found} == {0, 1, 2}


class Sees:
    def __iter__(self) -> Iterator[Any]:
        for sample in Numbered(SIZES):
            assert get_worker_info() is None
            yield sample


# ---------------------------------------------------------------------- failures


def test_failures_that_are_skipped_are_not_shared() -> None:
    """A sample may fail on one rank alone, and the others would not know."""
    with pytest.raises(OptionError, match="split='ranks'"):
        stream_of(partial(failing, "rng"), on_error="skip", num_replicas=2, rank=0)
    alone = stream_of(partial(failing, "torch"), on_error="skip")
    found = list(alone)
    assert alone.skipped_samples.failed > 0
    assert len(numbers(found)) + alone.skipped_samples.failed == len(SIZES)


def test_transforms_that_leave_too_few_for_the_ranks() -> None:
    """Windows read on until all ranks have a sample; at the end the last round is dealt anew."""
    keep = transforms.keep_if(every_ninth)
    make = partial(stream_of, keep, num_replicas=8, rank=0, window=20)
    found = [b for rank in processes_of(make, 1) for one in rank for b in one]
    assert numbers(found) == list(range(0, len(SIZES), 9))
    few = partial(stream_of, transforms.keep_if(first_three), num_replicas=8, rank=0)
    with pytest.raises(UnevenRanksError):
        list(processes_of(few, 1)[0][0])


def every_ninth(sample: Any) -> bool:
    return sample[0] % 9 == 0


def first_three(sample: Any) -> bool:
    return sample[0] < 3
