"""How evenly do the ranks share the work?

Question: for 1,000,000 lengths log-normal(5, 1), clipped to 16 to 4,096, what is Σ max / Σ mean,
over the steps, of the ranks' costs within a step: how much longer a step takes because the ranks
wait for the costliest? With as many micro-batches on every rank, under costs that are linear,
quadratic for long samples, and purely quadratic in the length; with steps of 4,096 samples, and
with windows of 4,096 where the ranks wait for each other at every micro-batch.

Command: python examples/benchmarks/ranks.py [--samples N] [--few N] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, NumPy 2.4;
transformers 5.23.0.

    scheme                            cost  ranks    samples  a step  a round  micro-batches  over
    samples_per_step=4,096          linear      8  1,000,000  1.0012   1.0145         16,904     0
    window=4,096                    linear      8  1,000,000  1.0079   1.0079         16,904     0
    plain                           linear      8  1,000,000  1.0079   1.0079         16,872     0
    samples_per_step=4,096       quadratic      8  1,000,000  1.0039   1.0354         13,552     0
    window=4,096                 quadratic      8  1,000,000  1.0240   1.0240         13,552     0
    plain                        quadratic      8  1,000,000  1.0240   1.0240         13,656     0
    samples_per_step=4,096  pure quadratic      8  1,000,000  1.0035   1.0549         11,808     0
    window=4,096            pure quadratic      8  1,000,000  1.0435   1.0435         11,808     0
    plain                   pure quadratic      8  1,000,000  1.0446   1.0446         11,856     0
    samples_per_step=4,096         its own      8  1,000,000  1.0055   1.0330         14,560     0
    window=4,096                   its own      8  1,000,000  1.0236   1.0236         14,560     0
    plain                          its own      8  1,000,000  1.0236   1.0236         14,424     0
    samples_per_step=4,096          linear      2    200,000  1.0000   1.0038          3,204     0
    samples_per_step=4,096          linear      4    200,000  1.0002   1.0087          3,264     0
    samples_per_step=4,096          linear     16    200,000  1.0054   1.0164          3,680     0
    samples_per_step=4,096          linear     32    200,000  1.0125   1.0203          4,224     0
    samples_per_step=4,096          linear     64    200,000  1.0206   1.0276          5,312     0
    samples_per_step=4,096       quadratic      2    200,000  1.0000   1.0050          2,562     0
    samples_per_step=4,096       quadratic      4    200,000  1.0000   1.0166          2,608     0
    samples_per_step=4,096       quadratic     16    200,000  1.0236   1.0432          3,072     0
    samples_per_step=4,096       quadratic     32    200,000  1.0448   1.0562          3,136     0
    samples_per_step=4,096       quadratic     64    200,000  1.0693   1.0693          3,136     0
    samples_per_step=4,096  pure quadratic      2    200,000  1.0000   1.0064          2,210     0
    samples_per_step=4,096  pure quadratic      4    200,000  1.0000   1.0215          2,260     0
    samples_per_step=4,096  pure quadratic     16    200,000  1.0287   1.0883          2,432     0
    samples_per_step=4,096  pure quadratic     32    200,000  1.1010   1.3071          3,136     0
    samples_per_step=4,096  pure quadratic     64    200,000  1.5788   1.5788          3,136     0
    samples_per_step=4,096         its own      2    200,000  1.0000   1.0048          2,758     0
    samples_per_step=4,096         its own      4    200,000  1.0000   1.0141          2,804     0
    samples_per_step=4,096         its own     16    200,000  1.0257   1.0407          3,120     0
    samples_per_step=4,096         its own     32    200,000  1.0420   1.0488          3,136     0
    samples_per_step=4,096         its own     64    200,000  1.0567   1.0567          3,136     0
    BatchRebalanceSampler           linear      8     40,960  1.1440   1.2813            720     –
    BatchRebalanceSampler        quadratic      8     40,960  1.0593   1.1644            720     –
    BatchRebalanceSampler   pure quadratic      8     40,960  1.1886   1.5779            720     –
    BatchRebalanceSampler          its own      8     40,960  1.0251   1.0258            720     –
    8 ranks, linear, a step ≤ 1.003: 1.0012, holds
    8 ranks, quadratic, a step ≤ 1.01: 1.0039, holds
    8 ranks, pure quadratic, a step ≤ 1.01: 1.0035, holds

Everything is computed from the batches that the ranks yield. `a step` compares the ranks' sums over
each step, `a round` their micro-batches one by one. The plain scheme cuts the same windows, lowers
the budget until the number of micro-batches is a multiple of the ranks', and deals them in order of
cost, round robin. Transformers' BatchRebalanceSampler takes the same number of samples a step and
of micro-batches as ours takes under the linear cost, on fewer samples; it knows no budget, and
balances a cost of its own, n·L + 0.001·n·L², which has rows too. More and fewer ranks than eight
are also on fewer samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from _common import Batches, Results, Sizes, flat, lognormal, options, padded_sizes

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

STEP = 4096
LONGEST = 4096
COSTS: dict[str, tuple[PaddedCost, int]] = {
    "linear": (PaddedCost(unit_bytes=1), 16_384),
    "quadratic": (PaddedCost(unit_bytes=1, pair_bytes=1 / 512), 3 * 16_384),
    "pure quadratic": (PaddedCost(pair_bytes=1), LONGEST**2),
    "its own": (PaddedCost(unit_bytes=1, pair_bytes=0.001), 2 * 16_384),
}


def costs_of(sizes: Sizes, batches: Batches, cost: PaddedCost) -> Sizes:
    """Bytes of each batch, from the definition of the cost; shape `(batches,)`."""
    indices, counts = flat(batches)
    length = padded_sizes(sizes, indices, counts)
    return counts * np.ceil((cost.unit_bytes + cost.pair_bytes * length) * length)


def figures(costs: Sizes, steps: list[int]) -> dict[str, Any]:
    """Imbalance of costs of shape `(ranks, rounds)`, whose rounds form steps."""
    sums = np.add.reduceat(costs, np.cumsum(steps) - steps, axis=1)
    return {
        "a step": sums.max(axis=0).sum() / sums.mean(axis=0).sum(),
        "a round": costs.max(axis=0).sum() / costs.mean(axis=0).sum(),
        "micro-batches": costs.size,
    }


def ours(sizes: Sizes, name: str, ranks: int, **window: int) -> tuple[list[Batches], list[int]]:
    """Every rank's batches and the rounds of each step, checked: all samples, equal counts."""
    cost, budget = COSTS[name]
    samplers = [
        MemoryBudgetBatchSampler(sizes, cost, budget, num_replicas=ranks, rank=rank, **window)
        for rank in range(ranks)
    ]
    drawn = [list(iter(sampler)) for sampler in samplers]
    steps = list(samplers[0].steps)
    assert {len(batches) for batches in drawn} == {sum(steps)}
    everything = flat([batch for batches in drawn for batch in batches])[0]
    assert np.array_equal(np.sort(everything), np.arange(len(sizes)))
    return drawn, steps


def plain(sizes: Sizes, name: str, ranks: int, window: int) -> tuple[Sizes, list[int]]:
    """The plain scheme over windows at random: the ranks' costs and the rounds of each step."""
    cost, budget = COSTS[name]
    order = np.random.default_rng(0).permutation(len(sizes))
    rounds, steps = [], []
    for first in range(0, len(order), window):
        lengths = -np.sort(-sizes[order[first : first + window]])
        each = np.ceil((cost.unit_bytes + cost.pair_bytes * lengths) * lengths).astype(np.int64)
        best = cut(each, budget)
        target = -(-len(best) // ranks) * ranks
        low, high = int(each[-1]), budget
        while low < high:
            middle = (low + high) // 2
            micro_batches = cut(each, middle)
            if len(micro_batches) <= target:
                best, high = micro_batches, middle
            else:
                low = middle + 1
        while len(best) < target:  # no budget gives exactly as many
            largest = max((batch for batch in best if batch[0] > 1), key=lambda batch: batch[1])
            best.remove(largest)
            number, largest_cost = largest
            halves = (number // 2, number - number // 2)
            best += [(half, largest_cost * half // number) for half in halves]
        by_cost = sorted((batch_cost for _, batch_cost in best), reverse=True)
        rounds.append(np.array(by_cost).reshape(-1, ranks))
        steps.append(len(best) // ranks)
    return np.concatenate(rounds).T, steps


def cut(each: Sizes, budget: int) -> list[tuple[int, int]]:
    """Number and cost of the longest runs that fit; bytes of each sample, descending."""
    runs, start = [], 0
    while start < len(each):
        head = int(each[start])
        number = min(max(budget // head, 1), len(each) - start)
        runs.append((number, number * head))
        start += number
    return runs


def rebalanced(sizes: Sizes, ranks: int, micro_batches: int) -> list[Batches]:
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    return [
        list(
            BatchRebalanceSampler(
                sizes.tolist(), STEP, dp_size=ranks, grad_accum=micro_batches, rank=rank
            )
        )
        for rank in range(ranks)
    ]


def main() -> None:
    arguments = options(__doc__, samples=1_000_000, few=200_000, most_ranks=64)
    sizes = lognormal(arguments.samples, 5, 1, 16, LONGEST)
    few = sizes[: arguments.few]
    fewest = sizes[: 10 * STEP]
    results = Results(
        {
            "scheme": "",
            "cost": "",
            "ranks": "d",
            "samples": ",d",
            "a step": ".4f",
            "a round": ".4f",
            "micro-batches": ",d",
            "over": ",d",
        }
    )

    def add(name: str, ranks: int, of: Sizes = sizes, **window: int) -> dict[str, Any]:
        drawn, steps = ours(of, name, ranks, **window)
        cost, budget = COSTS[name]
        costs = np.array([costs_of(of, batches, cost) for batches in drawn])
        found = {**figures(costs, steps), "over": int((costs > budget).sum())}
        ((option, value),) = window.items()
        scheme = f"{option}={value:,}"
        results.row(scheme=scheme, cost=name, ranks=ranks, samples=len(of), **found)
        return found

    bars = {}
    for name in COSTS:
        bars[name] = add(name, 8, samples_per_step=STEP)
        bars[f"{name}, rounds"] = add(name, 8, window=STEP)
        costs, steps = plain(sizes, name, 8, STEP)
        over = int((costs > COSTS[name][1]).sum())
        found = figures(costs, steps)
        results.row(scheme="plain", cost=name, ranks=8, samples=len(sizes), over=over, **found)
    for name in COSTS:
        for ranks in (2, 4, 16, 32, 64):
            if ranks <= arguments.most_ranks:
                add(name, ranks, few, samples_per_step=STEP)
    try:
        each = round(bars["linear"]["micro-batches"] / len(sizes) * STEP / 8)
        drawn = rebalanced(fewest, 8, each)
    except ImportError as error:
        results.row(scheme=f"BatchRebalanceSampler: no module {error.name}")
    else:
        for name, (cost, _) in COSTS.items():
            costs = np.array([costs_of(fewest, batches, cost) for batches in drawn])
            found = figures(costs, [each] * (costs.shape[1] // each))
            scheme = "BatchRebalanceSampler"
            results.row(scheme=scheme, cost=name, ranks=8, samples=len(fewest), **found)
    results.bar("8 ranks, linear, a step", bars["linear"]["a step"], 1.003)
    results.bar("8 ranks, quadratic, a step", bars["quadratic"]["a step"], 1.01)
    results.bar("8 ranks, pure quadratic, a step", bars["pure quadratic"]["a step"], 1.01)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
