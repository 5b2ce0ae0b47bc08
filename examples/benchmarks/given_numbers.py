"""What does one number of micro-batches for every epoch cost?

Question: 1,000,000 lengths log-normal(5, 1), clipped to 16 to 4,096, a budget of 16,384 padded
units, 8 ranks, 20 epochs: are all epochs of `batches_per_epoch="auto"` of one length, and how much
emptier are their micro-batches than those of epochs of their own lengths? How long does it take to
find the number, and to count an epoch before its first batch?

Command: python examples/benchmarks/given_numbers.py [--samples N] [--epochs K] [--json PATH]

Hardware: 2 cores of an AMD EPYC, which other processes shared, Python 3.11, torch 2.13.0 CPU,
NumPy 2.4.

    epochs of                   shortest  longest    fill  fill lost  over  found, s  first, ms
    default windows, their own     1,919    1,927  0.9735          –     0      0.11        7.1
    default windows, auto          1,931    1,931  0.9689       0.45     0      1.10       38.1
    steps of 4,096, their own      2,101    2,125  0.9113          –     0      0.04        1.9
    steps of 4,096, auto           2,137    2,137  0.9019       0.94     0      2.07       46.7
    default windows: lengths ≤ 1: 1, holds
    default windows: batches over the budget ≤ 0: 0, holds
    default windows: fill lost, points ≤ 0.5: 0.45328, holds
    steps of 4,096: lengths ≤ 1: 1, holds
    steps of 4,096: batches over the budget ≤ 0: 0, holds

`fill lost` is the mean fill of the budget over all epochs and ranks without the number, less that
with it, in points; `lengths` are of an epoch on each rank. `found` is the first `len`, and `first`
the median time to an epoch's first batch. Every epoch is checked to have each sample once, and no
micro-batch over the budget.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
from _common import Results, Sizes, flat, lognormal, options, padded_figures, timed

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

RANKS = 8
BUDGET = 16_384
SCHEMES: dict[str, dict[str, int]] = {
    "default windows": {},
    "steps of 4,096": {"samples_per_step": 4096},
}


def samplers(sizes: Sizes, **settings: Any) -> list[MemoryBudgetBatchSampler]:
    cost = PaddedCost(unit_bytes=1)
    return [
        MemoryBudgetBatchSampler(sizes, cost, BUDGET, num_replicas=RANKS, rank=rank, **settings)
        for rank in range(RANKS)
    ]


def run(sizes: Sizes, epochs: int, **settings: Any) -> dict[str, Any]:
    """All epochs on all ranks: their lengths, mean fill, and times."""
    those = samplers(sizes, **settings)
    found_s = timed(those[0].__len__)[0].wall_s
    lengths, fills, first_s, over = [], [], [], 0
    for epoch in range(epochs):
        batches = []
        for sampler in those:
            sampler.set_epoch(epoch)
            mine = iter(sampler)
            elapsed, first = timed(lambda mine=mine: next(mine))
            first_s.append(elapsed.wall_s)
            own = [first, *mine]
            lengths.append(len(own))
            batches += own
        assert np.array_equal(np.sort(flat(batches)[0]), np.arange(len(sizes)))
        figures = padded_figures(sizes, batches, BUDGET)
        fills.append(figures["fill"])
        over += figures["over"]
    return {
        "shortest": min(lengths),
        "longest": max(lengths),
        "fill": statistics.fmean(fills),
        "over": over,
        "found, s": found_s,
        "first, ms": 1e3 * statistics.median(first_s),
    }


def main() -> None:
    arguments = options(__doc__, samples=1_000_000, epochs=20)
    sizes = lognormal(arguments.samples, 5, 1, 16, 4096)
    results = Results(
        {
            "epochs of": "",
            "shortest": ",d",
            "longest": ",d",
            "fill": ".4f",
            "fill lost": ".2f",
            "over": ",d",
            "found, s": ".2f",
            "first, ms": ".1f",
        }
    )
    for scheme, settings in SCHEMES.items():
        plain = run(sizes, arguments.epochs, **settings)
        auto = run(sizes, arguments.epochs, batches_per_epoch="auto", **settings)
        lost = 100 * (plain["fill"] - auto["fill"])
        results.row(**{"epochs of": f"{scheme}, their own"}, **plain)
        results.row(**{"epochs of": f"{scheme}, auto", "fill lost": lost}, **auto)
        results.bar(f"{scheme}: lengths", auto["longest"] - auto["shortest"] + 1, 1)
        results.bar(f"{scheme}: batches over the budget", auto["over"], 0)
        if not settings:
            results.bar(f"{scheme}: fill lost, points", lost, 0.5)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
