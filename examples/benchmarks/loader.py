"""What does the sampler cost inside a DataLoader?

Question: how much longer does an epoch of a stock `DataLoader` take with the sampler than with the
very same batches in a list, over a map data set of token tensors that `PadCollate` pads, without
workers and with two?

Command: python examples/benchmarks/loader.py [--samples N] [--repetitions R] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    workers  batches  list, ms  sampler, ms   ratio  CPU ratio  two lists  alone, ms
    0            445       823          833  1.0163     1.0148     1.0081        8.5
    2            445      1780         1801  1.0224     1.0665     1.0445       14.1
    0 workers, with the sampler / with the list ≤ 1.02: 1.0163, holds
    2 workers, with the sampler / with the list ≤ 1.02: 1.0224, DOES NOT HOLD

Lengths are clip(lognormal(3.2, 0.8), 1, 1024), the budget 8,192 padded units. Without workers the
loaders take turns batch by batch, with workers epoch by epoch, and in who goes first; the ratio is
the median of the repetitions' own ratios. Workers persist, and their computing is not in the CPU
ratio, which is the main process's. `two lists` is the ratio of two loaders that are alike: what the
machine's noise leaves uncertain. `alone` is the sampler iterated without a loader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import (
    Elapsed,
    Results,
    Sizes,
    alternate,
    lognormal,
    median,
    no_garbage_collection,
    options,
    ratio,
    timed,
)
from torch.utils.data import DataLoader, Dataset

from torchbudget import MemoryBudgetBatchSampler, PadCollate, PaddedCost


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples of one long tensor of tokens, as language models read them."""

    def __init__(self, lengths: Sizes) -> None:
        self.ends = torch.from_numpy(np.cumsum(lengths))
        self.tokens = torch.randint(1, 30_000, (int(self.ends[-1]),))
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = int(self.ends[index])
        tokens = self.tokens[end - int(self.lengths[index]) : end]
        return {"input_ids": tokens, "labels": tokens}


def by_batch(
    loaders: Mapping[str, Iterable[Any]], repetitions: int, begin: Callable[[], None]
) -> dict[str, list[Elapsed]]:
    """Time an epoch of each loader, all of them side by side, one batch of each after the other.

    An epoch is long enough for the machine to slow down in the middle of it; a batch is not.
    """
    times: dict[str, list[Elapsed]] = {name: [] for name in loaders}
    for repetition in range(repetitions):
        begin()
        iterators, spent = {}, {}
        names = deque(loaders)
        names.rotate(repetition)
        with no_garbage_collection():
            for name in names:
                spent[name], iterators[name] = timed(partial(iter, loaders[name]))
            while iterators:
                names.rotate()
                for name in [name for name in names if name in iterators]:
                    elapsed, batch = timed(partial(next, iterators[name], None))
                    spent[name] += elapsed
                    if batch is None:
                        del iterators[name]
        for name, elapsed in spent.items():
            times[name].append(elapsed)
    return times


def main() -> None:
    torch.set_num_threads(1)  # nothing here gains from more, and two workers would lose
    arguments = options(__doc__, samples=100_000, repetitions=15)
    lengths = lognormal(arguments.samples, 3.2, 0.8, 1, 1024)
    sampler = MemoryBudgetBatchSampler(lengths, PaddedCost(unit_bytes=1), 8192)
    batches = list(sampler)
    begin = partial(sampler.set_epoch, 0)  # the same batches every time
    results = Results(
        {
            "workers": "d",
            "batches": ",d",
            "list, ms": ".0f",
            "sampler, ms": ".0f",
            "ratio": ".4f",
            "CPU ratio": ".4f",
            "two lists": ".4f",
            "alone, ms": ".1f",
        }
    )
    for workers in (0, 2):
        make = partial(
            DataLoader,
            Tokens(lengths),
            collate_fn=PadCollate(),
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        loaders: dict[str, DataLoader[Any]] = {
            "list": make(batch_sampler=batches),
            "sampler": make(batch_sampler=sampler),
            "another list": make(batch_sampler=list(batches)),
        }

        def epoch(loader: Iterable[Any]) -> None:
            begin()
            deque(loader, maxlen=0)

        contenders = {name: partial(epoch, loader) for name, loader in loaders.items()}
        alternate(contenders, 2)  # starts the workers, and warms up
        if workers:
            times = alternate(contenders, arguments.repetitions)
        else:
            times = by_batch(loaders, arguments.repetitions, begin)
        alone = [timed(partial(epoch, sampler))[0] for _ in range(5)]
        row = {
            "workers": workers,
            "batches": len(batches),
            "list, ms": median(times["list"]) * 1e3,
            "sampler, ms": median(times["sampler"]) * 1e3,
            "ratio": ratio(times["sampler"], times["list"]),
            "CPU ratio": ratio(times["sampler"], times["list"], "cpu_s"),
            "two lists": ratio(times["another list"], times["list"]),
            "alone, ms": median(alone) * 1e3,
        }
        results.row(**row)
        results.bar(f"{workers} workers, with the sampler / with the list", row["ratio"], 1.02)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
