"""What is run under each framework, and what must hold of it: one cell is a source and workers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader

from tests.support.rank_scripts import tell
from torchbudget import BudgetedIterableDataset, MemoryBudgetBatchSampler, PaddedCost

gc.freeze()  # frameworks collect after each training, which takes 0.3 s for what is imported by now

Part: TypeAlias = Callable[[Any, int | None], tuple[list[list[list[int]]], Any]]

# Windows and a budget of which each epoch has a batch more than the one before, on 1 and 2 ranks.
OPTIONS = {"window": 24, "seed": 3}
BUDGET = 600
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 203), 1, 400).astype(np.int64).tolist()
EPOCHS = 3
# Batches after which runs stop, are saved and go on: within epochs, and at their ends (`None`).
STOPS: list[list[int | None]] = [[None], [1, 3, None, 6, None]]
ONCE: list[list[int | None]] = [[5, None]]
SOURCES = ("sampler", "stream")
# Sources and workers by the number of ranks: with workers where there are several.
CELLS = {ranks: [(one, workers) for one in SOURCES] for ranks, workers in ((1, 0), (2, 2))}


def ids_of(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A batch that every framework can move: the numbers of its samples."""
    return {"ids": torch.tensor([number for number, _ in samples])}


def loader_of(
    source: str, workers: int, kind: type[DataLoader[Any]] = DataLoader, **options: Any
) -> DataLoader[Any]:
    """A loader over 203 samples, each with its number."""
    options = OPTIONS | options
    collate_fn, budget = options.pop("collate_fn", ids_of), options.pop("budget", BUDGET)
    cost, samples = PaddedCost(unit_bytes=1), list(enumerate(LENGTHS))
    forked = {"multiprocessing_context": "fork"} if workers else {}
    if source == "sampler":
        sampler = MemoryBudgetBatchSampler(LENGTHS, cost, budget, **options)
        return kind(
            samples, batch_sampler=sampler, collate_fn=collate_fn, num_workers=workers, **forked
        )
    shards = [samples[number::4] for number in range(4)]
    stream = BudgetedIterableDataset(
        shards, cost, budget, size=itemgetter(1), collate_fn=collate_fn, **options
    )
    return kind(stream, batch_size=None, num_workers=workers, **forked)


def ids(batches: Iterable[Any]) -> Iterator[list[int]]:
    """The samples of each batch, as it comes."""
    for batch in batches:
        yield batch["ids"].tolist()


@dataclass(frozen=True)
class Refused:
    """An error, before a batch was trained on that others had lost; its text names these."""

    error: str
    names: Sequence[str]

    def check(self, of_ranks: list[Any]) -> None:
        """It was raised on each rank, as name and text."""
        for raised, text in of_ranks:
            assert raised == self.error
            assert [name for name in self.names if name not in text] == []


@dataclass(frozen=True)
class Right:
    """The story holds; a run that was stopped and resumed may be a part of it."""

    resumed: bool = True

    def check(self, of_ranks: list[dict[str, Any]]) -> None:
        """Each sample once an epoch, equal counts, other orders; resumed equals uninterrupted.

        Args:
            of_ranks: of each rank, its epochs `whole`, and the batches of the runs `in_parts`.
        """
        for epoch in range(EPOCHS):
            batches = [one["whole"][epoch] for one in of_ranks]
            assert sorted(chain(*chain(*batches))) == list(range(len(LENGTHS)))
            assert len({len(one) for one in batches}) == 1
        for one in of_ranks:
            assert len({str(epoch) for epoch in one["whole"]}) == EPOCHS
            for batches in one["in_parts"] if self.resumed else ():
                assert batches == [*chain(*one["whole"])]


def story(part: Part, stops: Sequence[Sequence[int | None]] = STOPS) -> dict[str, Any]:
    """Train in one piece, and in parts that are stopped, saved, and go on in a new run.

    Args:
        part: trains from a state (`None`: from the beginning) for a number of batches (`None`: to
            the end of the third epoch); returns its batches, epoch by epoch, and the state then.
        stops: of each run in parts; `None` stands for the end of an epoch.
    """
    whole = part(None, None)[0]
    ends = [*accumulate(map(len, whole))]
    in_parts = []
    for numbers in stops:
        batches, state = [], None
        for number in numbers:
            done = len(batches)
            until = number or next(end for end in ends if end > done) - done
            epochs, state = part(state, until)
            batches += chain(*epochs)
        in_parts.append([*batches, *chain(*part(state, None)[0])])
    return {"whole": whole, "in_parts": in_parts}


def write_cells(settings: dict[str, Callable[[str, int], Any]]) -> None:
    """Run each setting in each cell, and write what comes of it as this rank's result."""
    cells = CELLS[int(os.environ["WORLD_SIZE"])]
    tell({name: [run(*cell) for cell in cells] for name, run in settings.items()})
