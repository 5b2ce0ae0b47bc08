"""How much do gradients scatter if the samples of a step have similar lengths?

Question: the gradient of a sample is one number here, its standardised log-length, and the gradient
of a step is the mean over its samples. 65,536 lengths are log-normal(5, 1), clipped to 16 to 4,096,
and the budget is 16,384 padded tokens. How much do the gradients of steps scatter?

Command: python examples/benchmarks/scatter.py [--samples N] [--json PATH]

Hardware: any; the numbers follow from the seed. Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    steps                     samples  excess  stretch  padding
    uniform batches of 64        64.0    0.98    0.013    0.856
    window=64                    24.0    4.07    0.011    0.515
    window=256                   42.1    6.13    0.011    0.287
    window=1,024                 56.2    7.39    0.011    0.116
    window=4,096                 62.9    7.91    0.011    0.036
    window=16,384                65.1    8.07    0.275    0.010
    sorted, batches shuffled     64.0    8.00    0.111    0.008
    samples_per_step=4,096    4,096.0    0.71    0.011    0.036
    samples_per_step: excess ≤ 1.5: 0.71273, holds

`excess` is the scatter of a step's gradient / that of as many uniform samples. `stretch` is the
scatter of the mean over consecutive steps with 4,096 samples in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _common import Results, lognormal, options

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

BUDGET = 16_384
STRETCH = 4096
COST = PaddedCost(unit_bytes=1)


def main() -> None:
    arguments = options(__doc__, samples=2**16)
    sizes = lognormal(arguments.samples, 5, 1, 16, 4096)
    number = np.log(sizes)
    number = (number - number.mean()) / number.std()
    rng = np.random.default_rng(0)
    results = Results(
        {"steps": "", "samples": ",.1f", "excess": ".2f", "stretch": ".3f", "padding": ".3f"}
    )

    def row(name: str, steps: Sequence[Any], batches: Sequence[Any]) -> float:
        n = np.array([len(step) for step in steps])
        sums = np.array([number[step].sum() for step in steps])
        place = (np.cumsum(n) - 1) // STRETCH
        means = np.bincount(place, sums) / np.bincount(place, n)
        padded = sum(len(batch) * sizes[batch].max() for batch in batches)
        excess = float(np.sqrt((sums**2 / n).mean()))
        results.row(
            steps=name,
            samples=n.mean(),
            excess=excess,
            stretch=np.sqrt((means**2).mean()),
            padding=1 - sizes.sum() / padded,
        )
        return excess

    def chunks(order: Any) -> list[Any]:
        return [order[start : start + 64] for start in range(0, len(order), 64)]

    uniform = chunks(rng.permutation(len(sizes)))
    row("uniform batches of 64", uniform, uniform)
    for window in (64, 256, 1024, 4096, 16_384):
        batches = list(MemoryBudgetBatchSampler(sizes, COST, BUDGET, window=window))
        row(f"window={window:,}", batches, batches)
    buckets = chunks(np.argsort(sizes, kind="stable"))
    buckets = [buckets[place] for place in rng.permutation(len(buckets))]
    row("sorted, batches shuffled", buckets, buckets)
    sampler = MemoryBudgetBatchSampler(sizes, COST, BUDGET, samples_per_step=STRETCH)
    batches = list(sampler)
    ends = np.cumsum(sampler.steps)
    parts = [batches[end - count : end] for count, end in zip(sampler.steps, ends, strict=True)]
    steps = [np.concatenate(part) for part in parts]
    excess = row(f"samples_per_step={STRETCH:,}", steps, batches)
    results.bar("samples_per_step: excess", excess, 1.5)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
