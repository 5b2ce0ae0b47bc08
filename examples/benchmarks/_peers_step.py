"""A step in memory: lengths that are all known are dealt to ranks, in micro-batches under a cap."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from itertools import chain
from statistics import median
from typing import Any, TypeAlias

import numpy as np

TITLE = "A step in memory"
TEXT = (
    "4,096 lengths (log-normal(5, 1), 16 to 4,096) for 8 ranks, at most 16,384 tokens in a "
    "micro-batch, without padding. verl's and slime's algorithms are written anew here, as "
    "published; verl plans each rank after `balance_batch`. *Over* counts micro-batches beyond the "
    "cap, *excess* is the rank with most tokens / the mean − 1, the worst seed."
)
RANKS, CAP = 8, 16_384
SHOWN = {
    "planner": "", "as": "", "micro-batches": "d", "over": "d", "fullest / cap": ".3f",
    "excess": ".2%", "ms": ".0f",
}  # fmt: skip
Lengths: TypeAlias = list[int]
Steps: TypeAlias = list[list[list[int]]]  # micro-batches of each rank


def differenced(weights: Lengths, parts: int, *, equal: bool) -> list[list[int]]:
    """Partition by the largest differencing method of Karmarkar and Karp (1982).

    Args:
        weights: of the items.
        parts: how many there are.
        equal: all parts have the same number of items.
    """
    order = sorted(range(len(weights)), key=lambda item: weights[item])
    width = parts if equal else 1
    runs = [order[i : i + width] for i in range(0, len(order), width)]
    heap: list[Any] = []

    def push(number: int, sets: list[tuple[int, list[int]]]) -> None:
        sets.sort(key=lambda one: -one[0])
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], number, sets))

    for number, run in enumerate(runs):
        alone = [(weights[item], [item]) for item in run]
        push(number, alone + [(0, []) for _ in range(parts - len(run))])
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        push(number, [(a + b, items + more) for (a, items), (b, more) in pairs])
    return [items for _, items in heap[0][2]]


def verl(lengths: Lengths, cap: int = CAP) -> Steps:
    """`balance_batch`, then `rearrange_micro_batches`: as many on each rank as the most needs."""
    ranks = differenced(lengths, RANKS, equal=True)
    count = max(-(-sum(lengths[i] for i in rank) // cap) for rank in ranks)
    return [
        [
            [rank[i] for i in part]
            for part in differenced([lengths[i] for i in rank], count, equal=False)
        ]
        for rank in ranks
    ]


def verl_tuned(lengths: Lengths) -> Steps:
    """With the largest cap, by hundredths, whose micro-batches keep the one that is meant."""
    for percent in range(100, 0, -1):
        found = verl(lengths, CAP * percent // 100)
        if max(sum(lengths[i] for i in one) for one in chain(*found)) <= CAP:
            return found
    raise AssertionError("no cap is small enough")


def slime(lengths: Lengths, *, balanced: bool = False) -> Steps:
    """`build_dp_schedule`: first fit, split to a multiple of the ranks, then deal."""
    bins: list[list[int]] = []
    sums: list[int] = []
    for item, length in enumerate(lengths):
        at = next((i for i, total in enumerate(sums) if total + length <= CAP), None)
        if at is None:
            bins.append([item])
            sums.append(length)
        else:
            bins[at].append(item)
            sums[at] += length
    while len(bins) % RANKS:
        at = max((i for i in range(len(bins)) if len(bins[i]) > 1), key=sums.__getitem__)
        halves = differenced([lengths[i] for i in bins[at]], 2, equal=False)
        one, other = ([bins[at][i] for i in half] for half in halves)
        bins[at : at + 1] = [one, other]
        sums[at : at + 1] = [sum(lengths[i] for i in half) for half in (one, other)]
    dealt = (
        differenced(sums, RANKS, equal=True)
        if balanced
        else [list(range(rank, len(bins), RANKS)) for rank in range(RANKS)]
    )
    return [[bins[i] for i in rank] for rank in dealt]


def slime_tuned(lengths: Lengths) -> Steps:
    """With `--balance-data`, by tokens."""
    return slime(lengths, balanced=True)


def ours(lengths: Lengths) -> Steps:
    from torchbudget import PackedCost, plan_step

    step = plan_step(np.array(lengths), PackedCost(unit_bytes=1), CAP, num_replicas=RANKS)
    return [[list(map(int, one)) for one in rank] for rank in step.micro_batches]


PLANNERS: tuple[tuple[str, str, Callable[[Lengths], Steps]], ...] = (
    ("torchbudget.plan_step", "documented", ours),
    ("verl", "documented", verl),
    ("verl", "tuned", verl_tuned),
    ("slime", "documented", slime),
    ("slime", "tuned", slime_tuned),
)


def rows(seeds: int) -> list[dict[str, Any]]:
    """A row for each planner; every one has each sample once."""
    found = []
    for name, label, plan in PLANNERS:
        over, excesses, fullest, times_s, counts = 0, [], 0.0, [], []
        for seed in range(seeds):
            drawn = np.random.default_rng(seed).lognormal(5, 1, 4096)
            lengths = np.clip(drawn, 16, 4096).astype(int).tolist()
            began_s = time.process_time()
            ranks = plan(lengths)
            times_s.append(time.process_time() - began_s)
            assert sorted(chain(*chain(*ranks))) == list(range(len(lengths)))
            tokens = [[sum(lengths[i] for i in one) for one in rank] for rank in ranks]
            over += sum(one > CAP for one in chain(*tokens))
            fullest = max(fullest, max(chain(*tokens)) / CAP)
            sums = [sum(rank) for rank in tokens]
            excesses.append(max(sums) * RANKS / sum(sums) - 1)
            counts.append(sum(map(len, ranks)))
        found.append(
            {
                "batches": name, "planner": name, "as": label, "over": over,
                "micro-batches": round(float(np.mean(counts))), "ms": 1e3 * median(times_s),
                "fullest / cap": fullest, "excess": max(excesses),
            }
        )  # fmt: skip
    return found
