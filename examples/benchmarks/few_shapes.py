"""What do few static shapes cost, for compiled models?

Question: batches of one axis take at most 16 shapes (n, L), the same on all ranks of a round. How
many more micro-batches are there than without that, how much is padding, and how many rows are
masked? How long does it take to choose the shapes, and to plan?

Command: python examples/benchmarks/few_shapes.py [--samples N] [--shapes K] [--json PATH]

Hardware: 2 cores of an AMD EPYC that other programs used too, Python 3.11, torch 2.13.0 CPU,
NumPy 2.4.

    lengths   ranks  without  batches   more  padding  masked rows  shapes  µs a sample
    text          1    1,042    1,159  1.112    15.8%        1.01%      16         0.18
    text          8      503      578  1.149    15.6%        1.80%      16         0.07
    real          1      622      706  1.135    19.9%        0.56%      16         0.12
    real          8      293      349  1.191    19.2%        0.76%      16         0.09
    rollouts      1    2,818    3,000  1.065    10.4%        0.67%      16         0.22
    rollouts      8    1,384    1,491  1.077    10.5%        1.03%      16         0.10
    text, 1 rank(s): micro-batches / without ≤ 1.14: 1.1123, holds
    text, 8 rank(s): micro-batches / without ≤ 1.17: 1.1491, holds
    real, 1 rank(s): micro-batches / without ≤ 1.14: 1.135, holds
    real, 8 rank(s): micro-batches / without ≤ 1.2: 1.1911, holds
    rollouts, 1 rank(s): micro-batches / without ≤ 1.07: 1.0646, holds
    rollouts, 8 rank(s): micro-batches / without ≤ 1.09: 1.0773, holds
    shapes ≤ 16: 16, holds
    shapes over the budget, or other ones on ranks of a round ≤ 0: 0, holds
    seconds to choose 16 shapes for a million sizes ≤ 0.1: 0.04681, holds

One rank has windows of 4,096 samples, eight ranks have windows of 32,768 and four times as many
samples. Text is log-normal(5, 1), clipped to 16 to 4,096 tokens. Real lengths are the words and
signs of the first functions in installed Python packages, at most 4,096, drawn with replacement.
Both have a budget of 16,384 tokens. Rollouts are prompts of 8 responses of correlated lengths, one
in fifty cut at 16,384, with a budget of 65,536. Times are the CPU's.
"""

from __future__ import annotations

import ast
import re
import site
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from _common import Results, Sizes, lognormal, options, timed

from torchbudget import MemoryBudgetBatchSampler, PaddedCost, best_shapes

TOKENS = PaddedCost(unit_bytes=1)


def functions() -> Iterator[int]:
    """Words and signs of each function in installed packages."""
    for folder in site.getsitepackages():
        for path in sorted(Path(folder).rglob("*.py")):
            try:
                text = path.read_text()
                tree = ast.parse(text)
            except (OSError, SyntaxError, ValueError, RecursionError):
                continue
            words = np.cumsum(
                [0, *(len(re.findall(r"\w+|[^\w\s]", line)) for line in text.split("\n"))]
            )
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield int(words[node.end_lineno or node.lineno] - words[node.lineno - 1])


def rollouts(number: int) -> Sizes:
    rng = np.random.default_rng(2)
    prompts = -(-number // 8)
    each = rng.lognormal(7.2, 1, (prompts, 1)) * rng.lognormal(0, 0.5, (prompts, 8))
    cut = rng.random((prompts, 8)) < 0.02
    return np.where(cut, 16_384, np.clip(each, 16, 16_384)).astype(np.int64).reshape(-1)[:number]


def main() -> None:
    arguments = options(__doc__, samples=65_536, shapes=16)
    many = 4 * arguments.samples
    real = np.clip(np.fromiter(islice(functions(), arguments.samples), np.int64), 1, 4096)
    real = np.random.default_rng(1).choice(real, many)
    data = {
        "text": (lognormal(many, 5, 1, 16, 4096), 16_384, (1.14, 1.17)),
        "real": (real, 16_384, (1.14, 1.20)),
        "rollouts": (rollouts(many), 65_536, (1.07, 1.09)),
    }
    results = Results(
        {
            "lengths": "",
            "ranks": "d",
            "without": ",d",
            "batches": ",d",
            "more": ".3f",
            "padding": ".1%",
            "masked rows": ".2%",
            "shapes": "d",
            "µs a sample": ".2f",
        }
    )
    over = other = 0
    for name, (every, budget, bars) in data.items():
        for ranks, most in zip((1, 8), bars, strict=True):
            sizes = every if ranks > 1 else every[: arguments.samples]
            window = min(4096 * ranks, len(sizes))

            def sampler(rank: int = 0, **given: Any) -> MemoryBudgetBatchSampler:
                return MemoryBudgetBatchSampler(
                    sizes,  # noqa: B023
                    TOKENS,
                    budget,  # noqa: B023
                    window=window,  # noqa: B023
                    num_replicas=ranks,  # noqa: B023
                    rank=rank,
                    **given,
                )

            without = len(sampler())
            those = [sampler(rank, max_shapes=arguments.shapes) for rank in range(ranks)]
            report = those[0].report()
            elapsed, mine = timed(lambda: [*those[0]])  # noqa: B023
            shapes: set[tuple[int, int]] = set()
            for batches in zip(mine, *those[1:], strict=True):
                found = {those[0].shape_of(len(b), int(sizes[b].max())) for b in batches}
                other += len(found) - 1
                shapes |= found
            over += sum(rows * length > budget for rows, length in shapes)
            results.row(
                lengths=name,
                ranks=ranks,
                without=without,
                batches=len(mine),
                more=len(mine) / without,
                padding=report.padding,
                shapes=len(shapes),
                **{
                    "masked rows": report.masked_rows / (report.samples + report.masked_rows),
                    "µs a sample": elapsed.cpu_s / len(sizes) * 1e6,
                },
            )
            results.bar(
                f"{name}, {ranks} rank(s): micro-batches / without", len(mine) / without, most
            )
    results.bar("shapes", max(row["shapes"] for row in results.rows), arguments.shapes)
    results.bar("shapes over the budget, or other ones on ranks of a round", over + other, 0)
    million = lognormal(1_000_000, 5, 1, 16, 4096)
    choosing = [timed(lambda: best_shapes(million, TOKENS, 16_384, 16))[0].cpu_s for _ in range(3)]
    results.bar("seconds to choose 16 shapes for a million sizes", min(choosing), 0.1)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
