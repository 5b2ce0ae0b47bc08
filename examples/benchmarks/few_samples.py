"""How soon does the first batch come where few samples fit?

Question: 200,000 sizes uniform in 200 to 1,024 and a budget of 1,024 padded units, so that a
micro-batch has 1 to 5 samples: how long does the first batch of an epoch take on 1, 8 and 64 ranks,
for each sample of the window that is planned for it?

Command: python examples/benchmarks/few_samples.py [--samples N] [--repetitions R] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    ranks  window  first batch, ms  µs a sample  ratio
    1       4,096              1.3         0.32   1.00
    8      32,768             63.8         1.95   6.05
    64     50,000             54.7         1.09   3.38
    8 ranks, µs a sample ≤ 7.8: 1.9459, holds
    64 ranks, µs a sample ≤ 7.8: 1.0938, holds

Windows have the default number of samples: 4,096 for each rank, but at most a quarter of the epoch.
The time is the median over epochs of a sampler that was constructed before. The ratio compares
times per sample with those of one rank, within each repetition. The bar is twice what one rank took
on this hardware when its micro-batches were still cut one by one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from _common import Results, alternate, median, options, ratio

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

RANKS = (1, 8, 64)
BEFORE_US = 3.9


def first_batch(sizes: np.ndarray, window: int, ranks: int) -> Callable[[], object]:
    """What draws the first batch of the next epoch."""
    sampler = MemoryBudgetBatchSampler(
        sizes, PaddedCost(unit_bytes=1), 1024, window=window, num_replicas=ranks, rank=0
    )

    def draw() -> None:
        sampler.set_epoch(sampler.epoch + 1)
        next(iter(sampler))

    return draw


def main() -> None:
    arguments = options(__doc__, samples=200_000, repetitions=5)
    sizes = np.random.default_rng(0).integers(200, 1025, arguments.samples)
    windows = {ranks: min(4096 * ranks, arguments.samples // 4) for ranks in RANKS}
    times = alternate(
        {f"{ranks}": first_batch(sizes, window, ranks) for ranks, window in windows.items()},
        arguments.repetitions,
    )
    results = Results(
        {
            "ranks": "d",
            "window": ",d",
            "first batch, ms": ",.1f",
            "µs a sample": ".2f",
            "ratio": ".2f",
        }
    )
    for ranks, window in windows.items():
        mine = times[f"{ranks}"]
        relative = ratio(mine, times["1"]) * windows[1] / window
        results.row(
            ranks=ranks,
            window=window,
            ratio=relative,
            **{"first batch, ms": 1e3 * median(mine), "µs a sample": 1e6 * median(mine) / window},
        )
        if ranks > 1:
            results.bar(f"{ranks} ranks, µs a sample", 1e6 * median(mine) / window, 2 * BEFORE_US)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
