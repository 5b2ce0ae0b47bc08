"""What does planning cost, compared with torch's own random batches?

Question: how long does it take to construct a sampler, plan its epoch and iterate it, for lengths
clip(lognormal(3.2, 0.8), 1, 1024) and a budget of 8,192 padded units, compared with
`BatchSampler(RandomSampler(range(N)), 64, False)` in the same process?

Command: python examples/benchmarks/planning.py [--samples N] [--repetitions R] [--json PATH]

Hardware: 2 cores of an AMD EPYC that other programs used too, Python 3.11, torch 2.13.0 CPU,
NumPy 2.4.

    sampler                            seconds  µs a sample  ratio  CPU ratio
    torch BatchSampler(RandomSampler)     3.54        0.354  1.000      1.000
    padded                                0.89        0.089  0.257      0.257
    padded, len only                      0.50        0.050  0.143      0.145
    padded, samples_per_step=4096         0.93        0.093  0.262      0.263
    padded, rank 3 of 8                   0.99        0.099  0.280      0.281
    padded, two axes                      2.13        0.213  0.591      0.594
    padded, 4 samples a batch             3.58        0.358  0.997      1.000
    packed                               13.39        1.339  3.852      3.854
    padded / torch ≤ 0.3: 0.25704, holds
    padded, len only / torch ≤ 0.2: 0.14319, holds
    padded, rank 3 of 8 / torch ≤ 0.7: 0.27953, holds
    padded, two axes / torch ≤ 0.7: 0.59123, holds

Every repetition times each row once, in turn. The ratio is the median over repetitions of the ratio
within each, of wall time and of CPU time; the bars are for wall time. `µs a sample` divides by all
samples of the epoch: one rank of eight plans them all and yields an eighth. `len` plans and yields
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from _common import Results, alternate, lognormal, median, options, ratio
from torch.utils.data import BatchSampler, RandomSampler

from torchbudget import MemoryBudgetBatchSampler, Mixture, PackedCost, PaddedCost

TORCH = "torch BatchSampler(RandomSampler)"
MOST = {
    "padded": 0.30,
    "padded, len only": 0.20,
    "padded, rank 3 of 8": 0.7,
    "padded, two axes": 0.7,
}


def drained(make: Callable[[], Iterable[Any]]) -> Callable[[], object]:
    """Construct and iterate to the end, keeping nothing."""
    return lambda: deque(make(), maxlen=0)


def main() -> None:
    arguments = options(__doc__, samples=10_000_000, repetitions=5)
    samples = arguments.samples
    lengths = lognormal(samples, 3.2, 0.8, 1, 1024)
    rng = np.random.default_rng(1)
    targets = np.clip(lengths * rng.lognormal(0.1, 0.35, samples), 1, 1024).astype(np.int64)
    pairs = np.stack([lengths, targets], axis=1)

    one, two, packed = (
        PaddedCost(unit_bytes=1),
        PaddedCost(unit_bytes=(1, 1)),
        PackedCost(unit_bytes=1),
    )

    def mixed(shares: list[float]) -> MemoryBudgetBatchSampler:
        """As many samples from sources in shares of sizes."""
        mixture = Mixture(np.arange(samples) * len(shares) // samples, dict(enumerate(shares)))
        steps = {"samples_per_step": 4096, "steps_per_epoch": samples // 4096}
        return MemoryBudgetBatchSampler(lengths, one, 8192, weights=mixture, **steps)

    times = alternate(
        {
            TORCH: drained(lambda: BatchSampler(RandomSampler(range(samples)), 64, False)),
            "padded": drained(lambda: MemoryBudgetBatchSampler(lengths, one, 8192)),
            "padded, len only": lambda: len(MemoryBudgetBatchSampler(lengths, one, 8192)),
            "padded, samples_per_step=4096": drained(
                lambda: MemoryBudgetBatchSampler(lengths, one, 8192, samples_per_step=4096)
            ),
            "padded, 3 sources": drained(lambda: mixed([0.7, 0.2, 0.1])),
            "padded, 21 sources": drained(lambda: mixed([1.0] * 21)),
            "padded, rank 3 of 8": drained(
                lambda: MemoryBudgetBatchSampler(lengths, one, 8192, num_replicas=8, rank=3)
            ),
            "padded, two axes": drained(lambda: MemoryBudgetBatchSampler(pairs, two, 16_384)),
            "padded, 4 samples a batch": drained(
                lambda: MemoryBudgetBatchSampler(lengths, one, 170, oversize="alone")
            ),
            "packed": drained(lambda: MemoryBudgetBatchSampler(lengths, packed, 8192)),
        },
        arguments.repetitions,
    )
    results = Results(
        {"sampler": "", "seconds": ".2f", "µs a sample": ".3f", "ratio": ".3f", "CPU ratio": ".3f"}
    )
    for name, mine in times.items():
        results.row(
            **{
                "sampler": name,
                "seconds": median(mine),
                "µs a sample": median(mine) / samples * 1e6,
                "ratio": ratio(mine, times[TORCH]),
                "CPU ratio": ratio(mine, times[TORCH], "cpu_s"),
            }
        )
    for name, most in MOST.items():
        results.bar(f"{name} / torch", ratio(times[name], times[TORCH]), most)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
