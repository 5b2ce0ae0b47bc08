"""Ranks, workers and resumed runs see the same samples, whatever draws random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.resuming import check_every_stop
from tests.support.streams import Numbered, make, numbers, processes_of, source_of
from torchbudget import BudgetedIterableDataset, transforms

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


KINDS = {
    "crop": lambda draw: partial(crop, draw),
    "expand": lambda draw: transforms.expand(partial(twice, draw)),
    "drop": lambda draw: transforms.keep_if(partial(half, draw)),
}


def stream_of(transform: Any, source: Any = None, **options: Any) -> BudgetedIterableDataset:
    source = Numbered(SIZES) if source is None else source
    return make(source, transforms=[transform] if transform else [], **options)


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
    data = source_of("map", SIZES, []) if source == "map" else Shuffles("numpy")
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


@pytest.mark.parametrize("look_ahead", [None, 20_000])
@pytest.mark.parametrize("draw", ["random", "numpy", "torch"])
def test_threads_that_draw_from_global_generators_draw_new_numbers(
    draw: str, look_ahead: int | None
) -> None:
    """In each window, though which sample gets which of them is a matter of time."""
    drawn: list[float] = []
    stream = stream_of(lambda sample: drawn.append(DRAWS[draw]()) or sample, threads=4,
                       look_ahead=look_ahead)  # fmt: skip
    assert numbers(list(stream)) == list(range(len(SIZES)))
    assert len(set(drawn)) == len(SIZES)
