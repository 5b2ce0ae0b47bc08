"""Streams over 400 samples, whose loops are tracked."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from tests.support.resuming import as_json
from tests.support.streams import TOKENS, loader_of, same, size_of, source_of, tracked_loop
from torchbudget import BudgetedIterableDataset

SIZES = np.random.default_rng(2).integers(1, 60, 400)


def make(kind: str = "iterable", **options: Any) -> BudgetedIterableDataset:
    options = {"size": size_of, "window": 64, "collate_fn": same} | options
    budget = options.pop("budget", 300)
    if kind == "splits itself":
        options["split"] = "workers"
    return BudgetedIterableDataset(source_of(kind, SIZES, [30, 31, 200]), TOKENS, budget, **options)


def samples_of(batches: list[Any]) -> list[int]:
    return sorted(number for batch in batches for number, _ in batch)


def begun_at(done: int, workers: int = 2, **options: Any) -> tuple[list[Any], Any]:
    """A whole epoch's batches, and a stream that begins after so many of them."""
    running = make(**options)
    whole = list(loader_of(make(**options), workers))
    list(islice(tracked_loop(running, workers), done))
    stream = make(**options)
    stream.load_state_dict(as_json(running.state_dict()))
    return whole, stream


def epochs_of(
    stream: BudgetedIterableDataset, workers: int, epochs: int, *, tracked: bool, **options: Any
) -> list[list[Any]]:
    loader = loader_of(stream, workers, **options)
    return [list(stream.tracked(loader) if tracked else loader) for _ in range(epochs)]


def joined(epochs: list[list[Any]]) -> list[Any]:
    return [batch for epoch in epochs for batch in epoch]
