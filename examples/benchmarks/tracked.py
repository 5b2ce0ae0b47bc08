"""What do exact positions cost, and transforms that repeat?

Question: how much longer does a loop over a `DataLoader` take with `tracked` than without, over
10,000 batches of a stream and of a sampler, without workers and with two? And how much longer does
a stream take for each sample if it has a transform, so that Python's, NumPy's and torch's global
generators are seeded, or a look-ahead, so that its bytes are counted, or both?

Command: python examples/benchmarks/tracked.py [--batches N] [--samples N] [--repetitions R]
[--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    loop                  workers  number  without, ms  with, ms   ratio  two alike  µs each
    stream, tracked             0  10,000          754       820  1.0929     1.0303     6.67
    stream, tracked             2  10,000       11,430    11,986  1.0583     1.0070    55.65
    sampler, tracked            0  10,000          564       605  1.0736     1.0211     4.12
    sampler, tracked            2  10,000       11,126    11,521  1.0340     0.9641    39.52
    stream, a transform         0  30,000           12       316       –          –    10.14
    stream, a look-ahead        0  30,000           12       193       –          –     6.03
    stream, both                0  30,000           12       440       –          –    14.29
    seeds by hand               –  30,000            –       215       –          –     7.17
    stream, tracked, 0 workers: with / without ≤ 1.05: 1.0929, DOES NOT HOLD
    stream, tracked, 2 workers: with / without ≤ 1.05: 1.0583, DOES NOT HOLD
    sampler, tracked, 0 workers: with / without ≤ 1.05: 1.0736, DOES NOT HOLD
    sampler, tracked, 2 workers: with / without ≤ 1.05: 1.034, holds

Batches have eight samples of 1 to 64 tokens, which `PadCollate` pads: less than any model takes, so
that the ratio is an upper limit. Workers persist. Loops take turns; `ratio` is the median of the
repetitions' own ratios, `two alike` that of two loops without `tracked`: what the machine's noise
leaves uncertain. `µs each` is the difference of the medians for each batch, in the last rows for
each sample. There `without` is a stream of numbers without transforms and look-ahead, and the
transform returns the number as it is. `by hand` seeds the three generators and does nothing else.
This is a run with `--repetitions 3 --samples 30000`. By the processor's time, which is steadier, in
21 turns of 4,000 batches without workers, a tracked batch takes 4 to 6 µs more, of a stream and of
a sampler alike: 1 % of an epoch whose batches, with their training steps, take 0.6 ms each.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from _common import Results, Sizes, alternate, median, options, ratio
from torch.utils.data import DataLoader, Dataset

from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PadCollate,
    PaddedCost,
)

LONGEST = 64
BATCH = 8
TOKENS = PaddedCost(unit_bytes=1)
SHAPES: dict[str, Any] = {
    "cost": TOKENS,
    "budget": BATCH * LONGEST,
    "max_batch_size": BATCH,
    "window": 512 * BATCH,
}


class Tokens(Dataset[torch.Tensor]):
    """Slices of one tensor."""

    def __init__(self, lengths: Sizes) -> None:
        self.lengths = lengths
        self.tokens = torch.arange(LONGEST)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[: int(self.lengths[index])]


class TokenStream:
    """The same, one after the other."""

    def __init__(self, lengths: Sizes) -> None:
        self.dataset = Tokens(lengths)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(len(self.dataset)):
            yield self.dataset[index]


class Numbers:
    """Samples that take no time to read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.samples))


def same(sample: int) -> int:
    return sample


def one(sample: int) -> int:  # noqa: ARG001
    return 1


def loop_over(kind: str, lengths: Sizes, workers: int, *, tracked: bool) -> Callable[[], object]:
    """A loop over the first epoch, with a loader and workers of its own."""
    source: Any
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    if kind == "stream":
        source = BudgetedIterableDataset(TokenStream(lengths), **SHAPES)
        loader = DataLoader(source, batch_size=None, **more)
    else:
        source = MemoryBudgetBatchSampler(lengths, **SHAPES)
        loader = DataLoader(Tokens(lengths), batch_sampler=source, collate_fn=PadCollate(), **more)

    def loop() -> None:
        source.set_epoch(0)
        batches: Iterable[Any] = source.tracked(loader) if tracked else loader
        deque(batches, maxlen=0)

    return loop


def samples_of(samples: int, **more: Any) -> Callable[[], object]:
    """A loop over a stream of numbers."""
    shapes = {**SHAPES, "max_batch_size": None, "budget": 512, "collate_fn": len, "size": one}
    stream = BudgetedIterableDataset(Numbers(samples), **shapes, **more)

    def loop() -> None:
        stream.set_epoch(0)
        deque(stream, maxlen=0)

    return loop


def seed_by_hand(samples: int) -> None:
    for number in range(samples):
        random.seed(number)
        np.random.seed(number)  # noqa: NPY002  (what the stream seeds)
        torch.default_generator.manual_seed(number)


def main() -> None:
    torch.set_num_threads(1)  # nothing here gains from more, and two workers would lose
    arguments = options(__doc__, batches=10_000, samples=100_000, repetitions=7)
    lengths = np.random.default_rng(0).integers(1, LONGEST + 1, arguments.batches * BATCH)
    results = Results(
        {
            "loop": "",
            "workers": "d",
            "number": ",d",
            "without, ms": ",.0f",
            "with, ms": ",.0f",
            "ratio": ".4f",
            "two alike": ".4f",
            "µs each": ".2f",
        }
    )

    def measure(loop: str, workers: int, number: int, **contenders: Callable[[], object]) -> None:
        alternate(contenders, 1)  # starts the workers, and warms up
        times = alternate(contenders, arguments.repetitions)
        without_s, with_s = median(times["without"]), median(times["with_it"])
        row: dict[str, Any] = {
            "without, ms": without_s * 1e3,
            "with, ms": with_s * 1e3,
            "µs each": (with_s - without_s) / number * 1e6,
        }
        if "alike" in times:
            row["ratio"] = ratio(times["with_it"], times["without"])
            row["two alike"] = ratio(times["alike"], times["without"])
            results.bar(f"{loop}, {workers} workers: with / without", row["ratio"], 1.05)
        results.row(loop=loop, workers=workers, number=number, **row)

    for kind in ("stream", "sampler"):
        for workers in (0, 2):
            make = partial(loop_over, kind, lengths, workers)
            measure(
                f"{kind}, tracked",
                workers,
                arguments.batches,
                without=make(tracked=False),
                with_it=make(tracked=True),
                alike=make(tracked=False),
            )
    make = partial(samples_of, arguments.samples)
    added: dict[str, dict[str, Any]] = {
        "stream, a transform": {"transforms": [same]},
        "stream, a look-ahead": {"look_ahead": "64MiB"},
        "stream, both": {"transforms": [same], "look_ahead": "64MiB"},
    }
    for name, more in added.items():
        measure(name, 0, arguments.samples, without=make(), with_it=make(**more))
    by_hand = alternate({"seeds": partial(seed_by_hand, arguments.samples)}, arguments.repetitions)
    seconds = median(by_hand["seeds"])
    results.row(
        loop="seeds by hand",
        number=arguments.samples,
        **{"with, ms": seconds * 1e3, "µs each": seconds / arguments.samples * 1e6},
    )
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
