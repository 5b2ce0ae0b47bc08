"""What does planning cost, compared with torch's own random batches?

Question: how long does it take to construct a sampler, plan its epoch and iterate it, for lengths
clip(lognormal(3.2, 0.8), 1, 1024) and a budget of 8,192 padded units, compared with
`BatchSampler(RandomSampler(range(N)), 64, False)` in the same process?

Command: python examples/benchmarks/planning.py [--samples N] [--repetitions R] [--json PATH]

Hardware: 2 cores of an AMD EPYC that other programs used too, Python 3.11, torch 2.13.0 CPU,
NumPy 2.4.

    sampler                            seconds  µs a sample  ratio  CPU ratio
    torch BatchSampler(RandomSampler)     1.97        0.197  1.000      1.000
    padded                                0.51        0.051  0.254      0.245
    padded, len only                      0.26        0.026  0.126      0.122
    padded, samples_per_step=4096         0.49        0.049  0.285      0.280
    padded, 3 sources                     0.57        0.057  0.264      0.255
    padded, 21 sources                    0.61        0.061  0.321      0.310
    padded, 21 shuffled sources           0.72        0.072  0.371      0.360
    padded, rank 3 of 8                   0.51        0.051  0.245      0.237
    padded, two axes                      1.15        0.115  0.583      0.563
    padded, 4 samples a batch             2.09        0.209  0.986      0.952
    packed                                7.41        0.741  3.766      3.640
    padded / torch ≤ 0.3: 0.25409, holds
    padded, len only / torch ≤ 0.2: 0.12619, holds
    padded, rank 3 of 8 / torch ≤ 0.7: 0.24461, holds
    padded, two axes / torch ≤ 0.7: 0.58334, holds
    padded, 3 sources / without ≤ 1.3: 1.0896, holds
    padded, 21 sources / without ≤ 1.3: 1.1782, holds
    padded, 21 shuffled sources / without ≤ 1.3: 1.3858, DOES NOT HOLD

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

    def mixed(shares: list[float], *, shuffled: bool = False) -> Callable[[], object]:
        """As many samples of sources in shares of sizes; labels are sorted once, outside."""
        sources = np.arange(samples) * len(shares) // samples
        sources = rng.permutation(sources) if shuffled else sources
        mixture = Mixture(sources, dict(enumerate(shares)))
        steps = {"samples_per_step": 4096, "steps_per_epoch": samples // 4096}
        sampler = MemoryBudgetBatchSampler(lengths, one, 8192, weights=mixture, **steps)
        return lambda: deque(sampler, maxlen=0)

    times = alternate(
        {
            TORCH: drained(lambda: BatchSampler(RandomSampler(range(samples)), 64, False)),
            "padded": drained(lambda: MemoryBudgetBatchSampler(lengths, one, 8192)),
            "padded, len only": lambda: len(MemoryBudgetBatchSampler(lengths, one, 8192)),
            "padded, samples_per_step=4096": drained(
                lambda: MemoryBudgetBatchSampler(lengths, one, 8192, samples_per_step=4096)
            ),
            "padded, 3 sources": mixed([0.7, 0.2, 0.1]),
            "padded, 21 sources": mixed([1.0] * 21),
            "padded, 21 shuffled sources": mixed([1.0] * 21, shuffled=True),
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
    for name in ("padded, 3 sources", "padded, 21 sources", "padded, 21 shuffled sources"):
        without = times["padded, samples_per_step=4096"]
        results.bar(f"{name} / without", ratio(times[name], without, "cpu_s"), 1.3)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
