"""How many micro-batches do several limits take, above the number that their sums make necessary?

Question: 65,536 samples in windows of 4,096, under the budget and a further limit. Does every
micro-batch keep both, how many more are there than the bound, and how long does planning take? How
many does next-fit make of the samples as they come?

Command: python examples/benchmarks/several_limits.py [--samples N] [--json PATH]

Hardware: 2 cores of an AMD EPYC that other programs used too, Python 3.11, torch 2.13.0 CPU,
NumPy 2.4.

    limits                    bound  batches  above  next-fit above  over  µs a sample
    packed: text and patches  4,217    4,242  0.59%           9.25%     0         2.95
    packed: nodes and edges   1,024    1,033  0.88%           1.07%     0         1.54
    packed: rows of ≤ 32      3,901    3,920  0.49%           8.05%     0         1.74
    padded: text, n ≤ 64      1,399    1,425  1.86%         183.27%     0         0.09
    packed: text and patches: batches / bound ≤ 1.025: 1.0059, holds
    packed: nodes and edges: batches / bound ≤ 1.015: 1.0088, holds
    packed: rows of ≤ 32: batches / bound ≤ 1.015: 1.0049, holds
    padded: text, n ≤ 64: batches / bound ≤ 1.025: 1.0186, holds
    batches over the budget or the limit ≤ 0: 0, holds

The bound is the larger of Σ size / amount of each summed limit and, for padded and counted limits,
Σ 1 / (the largest number of samples of one size that fit together). Text is log-normal(5, 1),
clipped to 16 to 4,096 tokens; half of the samples have 64 to 2,047 patches beside it. Graphs have
log-normal(3.3, 0.6) nodes, clipped to 3 to 400, and four edges a node; one in thirty is dense.
Next-fit closes a batch where the next sample does not fit, as PyG's `DynamicBatchSampler` and
`jraph.dynamically_batch` do. The time is the CPU's, of construction and a whole epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from _common import Results, Sizes, lognormal, options, timed

from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost

FIRST, SECOND = (PackedCost(unit_bytes=unit) for unit in ((1, 0), (0, 1)))


@dataclass(frozen=True)
class Case:
    """Samples, the arguments of their sampler, and the same limits by hand.

    Attributes:
        sizes: of the samples, shape `(N,)` or `(N, 2)`.
        cost: of the sampler.
        other: its option of the second limit.
        amounts: the budget, and the second limit.
        used: the amounts that a batch of these sizes uses of the two.
        most: bar of the number of batches / the bound.
    """

    sizes: Sizes
    cost: Any
    other: dict[str, Any]
    amounts: tuple[int, int]
    used: Callable[[Sizes], tuple[int, int]]
    most: float

    def is_over(self, batch: Sizes) -> bool:
        (one, other), (budget, amount) = self.used(batch), self.amounts
        return one > budget or other > amount

    def sampler(self) -> MemoryBudgetBatchSampler:
        window = min(4096, len(self.sizes))
        return MemoryBudgetBatchSampler(
            self.sizes, self.cost, self.amounts[0], window=window, **self.other
        )


def cases(n: int) -> dict[str, Case]:
    rng = np.random.default_rng(1)
    text = lognormal(n, 5, 1, 16, 4096)
    patches = np.where(rng.random(n) < 0.5, 0, rng.integers(64, 2048, n))
    nodes = lognormal(n, 3.3, 0.6, 3, 400)
    dense = rng.random(n) < 1 / 30
    edges = np.minimum(nodes * np.where(dense, nodes / 3, 4), 30_000).astype(np.int64)

    def summed(of: Sizes) -> tuple[int, int]:
        return int(of[:, 0].sum()), int(of[:, 1].sum())

    def two(one: Sizes, other: Sizes, amounts: tuple[int, int], most: float) -> Case:
        limits = {"limits": [(SECOND, amounts[1])]}
        sizes = np.stack([one, other], axis=1)
        return Case(sizes, FIRST, limits, amounts, summed, most)

    return {
        "packed: text and patches": two(text, patches, (16_384, 8192), 1.025),
        "packed: nodes and edges": two(nodes, edges, (2048, 32_768), 1.015),
        "packed: rows of ≤ 32": Case(
            text,
            PackedCost(unit_bytes=1),
            {"max_batch_size": 32},
            (4096, 32),
            lambda of: (int(of.sum()), len(of)),
            1.015,
        ),
        "padded: text, n ≤ 64": Case(
            text,
            PaddedCost(unit_bytes=1),
            {"max_batch_size": 64},
            (16_384, 64),
            lambda of: (int(of.max()) * len(of), len(of)),
            1.025,
        ),
    }


def bound(case: Case) -> int:
    if isinstance(case.cost, PaddedCost):  # a sample takes 1/capacity of a batch
        shares = 1 / np.minimum(case.amounts[0] // case.sizes, case.amounts[1])
        return int(np.ceil(shares.sum()))
    return int(np.ceil(np.divide(case.used(case.sizes), case.amounts)).max())


def next_fit(case: Case) -> int:
    batches, first = 1, 0
    for stop in range(1, len(case.sizes) + 1):
        if case.is_over(case.sizes[first:stop]):
            batches, first = batches + 1, stop - 1
    return batches


def main() -> None:
    arguments = options(__doc__, samples=65_536)
    results = Results(
        {
            "limits": "",
            "bound": ",d",
            "batches": ",d",
            "above": ".2%",
            "next-fit above": ".2%",
            "over": ",d",
            "µs a sample": ".2f",
        }
    )
    for name, case in cases(arguments.samples).items():
        batches = list(case.sampler())
        assert sorted(index for batch in batches for index in batch) == list(range(len(case.sizes)))
        over = sum(case.is_over(case.sizes[batch]) for batch in batches)
        least = bound(case)
        elapsed = min(
            timed(lambda case=case: deque(case.sampler(), maxlen=0))[0].cpu_s for _ in range(3)
        )
        results.row(
            limits=name,
            bound=least,
            batches=len(batches),
            above=len(batches) / least - 1,
            over=over,
            **{
                "next-fit above": next_fit(case) / least - 1,
                "µs a sample": elapsed / len(case.sizes) * 1e6,
            },
        )
        results.bar(f"{name}: batches / bound", len(batches) / least, case.most)
    results.bar("batches over the budget or the limit", sum(r["over"] for r in results.rows), 0)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
