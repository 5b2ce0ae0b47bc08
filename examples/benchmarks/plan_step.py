"""How evenly, and how fast, does `plan_step` distribute samples that are in memory?

Question: 4,096 lengths log-normal(5, 1), clipped to 16 to 4,096, are cut into micro-batches under a
budget and distributed to 8 and 64 ranks. Does every micro-batch fit, do all ranks get as many, how
far is the costliest rank above the mean, and how long does a call take? And where the rollouts of a
prompt stay on one rank?

Command: python examples/benchmarks/plan_step.py [--samples N] [--seeds K] [--json PATH]

Hardware: 2 cores of an AMD EPYC that other programs used too, Python 3.11, torch 2.13.0 CPU,
NumPy 2.4.

    cost           ranks  micro-batches  mean excess  worst excess  over  unequal      ms
    padded             8             69       0.0004        0.0014     0        0    3.88
    packed             8             64       0.0000        0.0001     0        0    7.56
    quadratic          8             26       0.0018        0.0086     0        0    4.71
    padded            64            102       0.0105        0.0238     0        0    7.44
    packed            64             64       0.0007        0.0009     0        0   12.23
    quadratic         64             64       0.0000        0.0000     0        0    3.65
    prompts            8            214       0.0004        0.0007     0        0   10.93
    prompts           64            256       0.0007        0.0071     0        0   20.99
    prompts, verl      8            214       0.0204        0.0467   765        0  102.23
    prompts, verl     64            339       0.4897        0.5178     5        0   32.31
    padded, 8 ranks, worst excess ≤ 0.003: 0.0013504, holds
    padded, 8 ranks, ms ≤ 5: 3.8825, holds
    packed, 8 ranks, worst excess ≤ 0.003: 0.00010704, holds
    packed, 8 ranks, ms ≤ 20: 7.5627, holds
    quadratic, 8 ranks, worst excess ≤ 0.01: 0.0086019, holds
    quadratic, 8 ranks, ms ≤ 5: 4.7065, holds
    padded, 64 ranks, worst excess ≤ 0.02: 0.023765, DOES NOT HOLD
    packed, 64 ranks, worst excess ≤ 0.02: 0.00088995, holds
    quadratic, 64 ranks, worst excess ≤ 0.02: 0, holds
    micro-batches over the budget ≤ 0: 0, holds
    unequal numbers of micro-batches ≤ 0: 0, holds
    prompts, 8 ranks, worst excess ≤ 0.02: 0.00067705, holds
    prompts, 8 ranks, over or unequal ≤ 0: 0, holds
    prompts, 64 ranks, worst excess ≤ 0.02: 0.0071168, holds
    prompts, 64 ranks, over or unequal ≤ 0: 0, holds

The padded and the packed cost have a budget of 16,384 units, the quadratic one of 2 × 4,096².
`excess` is the cost of the costliest rank / the mean over ranks, minus the least that this can be:
1, or the cost of the costliest sample / the mean where that is more. It is computed from the
lengths and the micro-batches, not from what `plan_step` reports; the bars are for the worst seed.
*Prompts* are 512 of 8 rollouts each, packed, at most 32,768 tokens in a micro-batch, and their cost
is the work, 24,576 L + L²; the heaviest prompt is the costliest sample there. verl's
`get_group_balanced_partitions`, with as many prompts on each rank, and `rearrange_micro_batches`
are written anew, as published. `over` is the sum over all seeds.
The time is the CPU's, and the median of two calls for each seed.

Four of the ten seeds have as many micro-batches as 64 ranks, one each. Sorted samples that are cut
under the lowest budget which gives no more than that are then optimal: no other 64 micro-batches
have a lower costliest one (16,192 to 16,384, checked by bisection). What would be more even
is two smaller micro-batches on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from _common import Results, Sizes, no_garbage_collection, options, timed
from _peers_step import differenced

from torchbudget import PackedCost, PaddedCost, plan_step

LONGEST = 4096
CALLS = 2  # for each seed
PROMPTS, ROLLOUTS, CAP = 512, 8, 32_768
WORK = PackedCost(unit_bytes=24_576, pair_bytes=1)
Planner: TypeAlias = Callable[[Sizes, Sizes, int], list[list[list[int]]]]
# The library's cost, the same by hand for the sizes of one micro-batch, and the budget.
Case: TypeAlias = tuple[PaddedCost | PackedCost, Callable[[Sizes], int], int]
CASES: dict[str, Case] = {
    "padded": (PaddedCost(unit_bytes=1), lambda of: len(of) * of.max(), 16_384),
    "packed": (PackedCost(unit_bytes=1), lambda of: of.sum(), 16_384),
    "quadratic": (PaddedCost(pair_bytes=1), lambda of: len(of) * of.max() ** 2, 2 * LONGEST**2),
}
MOST_MS = {"padded": 5, "packed": 20, "quadratic": 5}
MOST_EXCESS = {
    ("padded", 8): 0.003,
    ("packed", 8): 0.003,
    ("quadratic", 8): 0.01,
    ("padded", 64): 0.02,
    ("packed", 64): 0.02,
    ("quadratic", 64): 0.02,
}


def planned(sizes: Sizes, case: Case, ranks: int) -> tuple[float, list[list[int]]]:
    """CPU seconds of a call, and each micro-batch's cost by rank; all samples are there."""
    cost, cost_of, budget = case
    with no_garbage_collection():
        elapsed, plan = timed(lambda: plan_step(sizes, cost, budget, num_replicas=ranks))
    indices = chain.from_iterable(chain.from_iterable(plan.micro_batches))
    assert sorted(indices) == list(range(len(sizes)))
    return elapsed.cpu_s, [[int(cost_of(sizes[one])) for one in m] for m in plan.micro_batches]


def excess(costs: list[list[int]], costliest_sample: int) -> float:
    ranks = np.array([sum(rank) for rank in costs])
    return float(ranks.max() / ranks.mean() - max(1, costliest_sample / ranks.mean()))


def ours(sizes: Sizes, prompts: Sizes, ranks: int) -> list[list[list[int]]]:
    """Whole prompts on each rank, by their work."""
    cost = PackedCost(unit_bytes=1)
    step = plan_step(sizes, cost, CAP, num_replicas=ranks, units=prompts, time=WORK)
    return step.micro_batches


def verl(sizes: Sizes, prompts: Sizes, ranks: int) -> list[list[list[int]]]:
    """`get_group_balanced_partitions`, then `rearrange_micro_batches`, written anew."""
    work = WORK.item_bytes(sizes)
    of_prompt = np.bincount(prompts, work).astype(np.int64).tolist()
    parts = differenced(of_prompt, ranks, equal=True)
    mine = [np.flatnonzero(np.isin(prompts, part)) for part in parts]
    count = max(-(-int(sizes[rank].sum()) // CAP) for rank in mine)
    cuts = [differenced(work[rank].tolist(), count, equal=False) for rank in mine]
    return [[rank[one].tolist() for one in cut] for rank, cut in zip(mine, cuts, strict=True)]


def rollouts(seed: int) -> Sizes:
    """Tokens of each prompt's rollouts, one prompt after the other."""
    rng = np.random.default_rng(seed)
    each = rng.lognormal(7, 0.8, (PROMPTS, 1)) * rng.lognormal(0, 0.5, (PROMPTS, ROLLOUTS))
    return np.clip(each, 16, CAP // 2).astype(np.int64).reshape(-1)


def in_prompts(plan: Planner, sizes: Sizes, ranks: int) -> tuple[float, list[list[int]], float]:
    """CPU seconds of a call, each micro-batch's tokens by rank, and the excess of work."""
    prompts = np.repeat(np.arange(PROMPTS), ROLLOUTS)
    with no_garbage_collection():
        elapsed, step = timed(lambda: plan(sizes, prompts, ranks))
    mine = [np.concatenate(rank) for rank in step]
    assert sorted(np.concatenate(mine).tolist()) == list(range(len(sizes)))
    assert sum(len({*prompts[rank].tolist()}) for rank in mine) == PROMPTS  # none is split
    work = WORK.item_bytes(sizes)
    heaviest = int(np.bincount(prompts, work).max())
    tokens = [[int(sizes[one].sum()) for one in rank] for rank in step]
    return elapsed.cpu_s, tokens, excess([work[rank].tolist() for rank in mine], heaviest)


def add(
    results: Results, name: str, ranks: int, budget: int, found: list[tuple[Any, ...]]
) -> tuple[float, float]:
    """Add a row, and return the worst excess and the milliseconds.

    Args:
        results: of all rows.
        name: of the row.
        ranks: that share a step.
        budget: of a micro-batch.
        found: of each call: CPU seconds, costs of the micro-batches by rank, and the excess.
    """
    times_s, steps, excesses = zip(*found, strict=True)
    results.row(
        cost=name,
        ranks=ranks,
        over=sum(one > budget for step in steps for one in chain.from_iterable(step)) // CALLS,
        unequal=sum(len({len(rank) for rank in step}) - 1 for step in steps) // CALLS,
        ms=1e3 * median(times_s),
        **{
            "micro-batches": round(sum(sum(map(len, step)) for step in steps) / len(steps)),
            "mean excess": float(np.mean(excesses)),
            "worst excess": max(excesses),
        },
    )
    return max(excesses), 1e3 * median(times_s)


def main() -> None:
    arguments = options(__doc__, samples=4096, seeds=10)
    results = Results(
        {
            "cost": "",
            "ranks": "d",
            "micro-batches": ",d",
            "mean excess": ".4f",
            "worst excess": ".4f",
            "over": ",d",
            "unequal": ",d",
            "ms": ".2f",
        }
    )
    seeds = [seed for seed in range(arguments.seeds) for _ in range(CALLS)]
    for (name, ranks), most in MOST_EXCESS.items():
        found = []
        for seed in seeds:
            lengths = np.random.default_rng(seed).lognormal(5, 1, arguments.samples)
            sizes = np.clip(lengths, 16, LONGEST).astype(np.int64)
            time_s, costs = planned(sizes, CASES[name], ranks)
            costliest = int(CASES[name][1](sizes.max()[None]))
            found.append((time_s, costs, excess(costs, costliest)))
        worst, ms = add(results, name, ranks, CASES[name][2], found)
        results.bar(f"{name}, {ranks} ranks, worst excess", worst, most)
        if ranks == 8:
            results.bar(f"{name}, {ranks} ranks, ms", ms, MOST_MS[name])
    results.bar("micro-batches over the budget", sum(row["over"] for row in results.rows), 0)
    results.bar("unequal numbers of micro-batches", sum(row["unequal"] for row in results.rows), 0)
    for name, plan in (("prompts", ours), ("prompts, verl", verl)):
        for ranks in (8, 64):
            found = [in_prompts(plan, rollouts(seed), ranks) for seed in seeds]
            worst, _ = add(results, name, ranks, CAP, found)
            if plan is ours:
                over = results.rows[-1]["over"] + results.rows[-1]["unequal"]
                results.bar(f"{name}, {ranks} ranks, worst excess", worst, 0.02)
                results.bar(f"{name}, {ranks} ranks, over or unequal", over, 0)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
