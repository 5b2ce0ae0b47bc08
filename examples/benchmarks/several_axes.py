"""How much padding is left where samples are ragged along several axes?

Question: (source, target) lengths, (height, width) of images, (nodes, edges) of graphs, three axes,
and the functions of Python's standard library (words of the docstring, of the code): how much do
micro-batches pad, along each axis and in all, compared with the same windows cut in the order of
the first axis alone, or of the samples' costs?

Command: python examples/benchmarks/several_axes.py [--samples N] [--window S] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, NumPy 2.4.

    axes                         order  samples  batches  padding              axis   fill  over
    source, target                ours  200,000    1,276    30.8%       40.8% 19.2%  0.967     0
    source, target          first axis  200,000    1,515    41.9%        7.4% 55.9%  0.970     0
    source, target                cost  200,000    1,276    31.0%       33.1% 29.2%  0.970     0
    document, summary             ours  200,000    2,683    20.7%       13.5% 51.5%  0.972     0
    document, summary       first axis  200,000    2,791    24.2%        2.8% 71.9%  0.978     0
    document, summary             cost  200,000    2,874    26.5%       10.3% 69.2%  0.979     0
    height, width                 ours  200,000    3,770    34.3%       21.9% 25.1%  0.952     0
    height, width           first axis  200,000    6,958    63.4%        1.3% 66.7%  0.926     0
    height, width                 cost  200,000    9,854    73.6%       47.9% 48.2%  0.906     0
    nodes, edges                  ours  200,000    1,457    22.1%        7.3% 43.1%  0.978     0
    nodes, edges            first axis  200,000    1,455    21.7%        6.5% 43.1%  0.974     0
    nodes, edges                  cost  200,000    1,533    25.8%       23.1% 31.5%  0.976     0
    frames, letters, words        ours  200,000    6,203     2.4%  1.7% 40.1% 46.7%  0.975     0
    frames, letters, words  first axis  200,000    6,183     2.0%  1.2% 42.6% 48.3%  0.974     0
    frames, letters, words        cost  200,000    6,193     2.2%  1.4% 42.1% 47.8%  0.974     0
    docstring, code               ours    3,269       57    24.7%        53.6% 8.3%  0.973     0
    docstring, code         first axis    3,269      131    64.7%        3.9% 70.1%  0.904     0
    docstring, code               cost    3,269       62    30.5%       50.4% 21.5%  0.969     0
    source, target: batches / the best other's ≤ 1.01: 1, holds
    source, target: batches over the budget ≤ 0: 0, holds
    document, summary: batches / the best other's ≤ 1.01: 0.9613, holds
    document, summary: batches over the budget ≤ 0: 0, holds
    height, width: batches / the best other's ≤ 1.01: 0.54182, holds
    height, width: batches over the budget ≤ 0: 0, holds
    nodes, edges: batches / the best other's ≤ 1.01: 1.0014, holds
    nodes, edges: batches over the budget ≤ 0: 0, holds
    frames, letters, words: batches / the best other's ≤ 1.01: 1.0032, holds
    frames, letters, words: batches over the budget ≤ 0: 0, holds
    docstring, code: batches / the best other's ≤ 1.01: 0.91935, holds
    docstring, code: batches over the budget ≤ 0: 0, holds

All orders are cut by the same rule, each micro-batch the longest run that fits. `padding` is the
share of the batches' predicted bytes that are padding; `axis` the share of the padded lengths along
each axis. Micro-batches are those that the sampler yields; figures are computed from the batches.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _common import Results, Sizes, flat, options, padded_sizes

from torchbudget import MemoryBudgetBatchSampler, PaddedCost


def lengths(rng: np.random.Generator, samples: int, mean: float, sigma: float) -> Sizes:
    return np.clip(rng.lognormal(mean, sigma, samples), 1, 1024)


def translation(rng: np.random.Generator, samples: int) -> Sizes:
    source = lengths(rng, samples, 3.2, 0.8)
    return np.stack([source, source * rng.lognormal(0.1, 0.35, samples)], axis=1)


def summaries(rng: np.random.Generator, samples: int) -> Sizes:
    """Document and summary: hardly related."""
    return np.stack([lengths(rng, samples, 5, 0.7), lengths(rng, samples, 3, 0.6)], axis=1)


def images(rng: np.random.Generator, samples: int) -> Sizes:
    """Of any aspect, around 256 by 256."""
    side, aspect = rng.lognormal(5.5, 0.5, samples), rng.lognormal(0, 0.4, samples)
    return np.clip(np.stack([side * aspect, side / aspect], axis=1), 16, 2048)


def graphs(rng: np.random.Generator, samples: int) -> Sizes:
    nodes = lengths(rng, samples, 3.2, 0.7)
    return np.stack([nodes, nodes * rng.uniform(1, 6, samples)], axis=1)


def speech(rng: np.random.Generator, samples: int) -> Sizes:
    """Frames, characters, words."""
    frames = np.clip(rng.lognormal(6.5, 0.7, samples), 50, 3500)
    characters = frames / 6 * rng.lognormal(0, 0.3, samples)
    return np.stack([frames, characters, characters / 5 * rng.lognormal(0, 0.2, samples)], axis=1)


def functions(_rng: np.random.Generator, samples: int) -> Sizes:
    """Words of the docstring and of the code of functions in the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                doc = ast.get_docstring(node)
                if doc:
                    code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                    found.append([len(re.findall(r"\w+|[^\w\s]", part)) for part in (doc, code)])
        if len(found) >= samples:
            break
    return np.array(found[:samples])


AREA = ((0, 1), (0, 0))
# Sizes, the cost of a batch, and how many of the largest samples the budget holds.
DATA: dict[str, tuple[Callable[[np.random.Generator, int], Sizes], PaddedCost, float]] = {
    "source, target": (translation, PaddedCost(unit_bytes=(1, 1)), 8),
    "document, summary": (summaries, PaddedCost(unit_bytes=(1, 1)), 16),
    "height, width": (images, PaddedCost(unit_bytes=(0, 0), pair_bytes=AREA), 2),
    "nodes, edges": (graphs, PaddedCost(unit_bytes=(64, 8)), 8),
    "frames, letters, words": (speech, PaddedCost(unit_bytes=(80, 4, 4)), 8),
    "docstring, code": (functions, PaddedCost(unit_bytes=(1, 1)), 4),
}


def figures(sizes: Sizes, indices: Sizes, counts: Sizes, cost: PaddedCost, budget: int) -> Any:
    """Of batches of `counts` samples each, taken from `indices`."""
    largest = padded_sizes(sizes, indices, counts)
    planned = counts * cost.item_bytes(largest)
    axes = 1 - sizes[indices].sum(axis=0) / (largest * counts[:, None]).sum(axis=0)
    return {
        "batches": len(counts),
        "padding": float(1 - cost.item_bytes(sizes[indices]).sum() / planned.sum()),
        "axis": " ".join(f"{axis:.1%}" for axis in axes),
        "fill": float(planned.mean()) / budget,
        "over": int((planned > budget).sum()),
    }


def longest_runs(sizes: Sizes, cost: PaddedCost, budget: int) -> list[int]:
    """Samples of each run of one window, in the order of `sizes`: as many as fit."""
    counts = []
    while len(sizes):
        largest = np.maximum.accumulate(sizes)
        over = np.arange(1, len(sizes) + 1) * cost.item_bytes(largest) > budget
        counts.append(int(over.argmax()) if over.any() else len(sizes))
        sizes = sizes[counts[-1] :]
    return counts


def sorted_and_cut(
    sizes: Sizes,
    windows: list[Sizes],
    key: Callable[[Sizes], Sizes],
    cost: PaddedCost,
    budget: int,
) -> tuple[Sizes, Sizes]:
    """The windows in descending order of `key`, cut: indices, and samples of each batch."""
    ordered = [window[np.argsort(-key(sizes[window]), kind="stable")] for window in windows]
    counts = [longest_runs(sizes[order], cost, budget) for order in ordered]
    return np.concatenate(ordered), np.concatenate(counts)


def main() -> None:
    arguments = options(__doc__, samples=200_000, window=4096)
    results = Results(
        {
            "axes": "",
            "order": "",
            "samples": ",d",
            "batches": ",d",
            "padding": ".1%",
            "axis": "",
            "fill": ".3f",
            "over": ",d",
        }
    )
    for name, (make, cost, of_the_largest) in DATA.items():
        sizes = np.ceil(make(np.random.default_rng(0), arguments.samples)).astype(np.int64)
        budget = int(of_the_largest * cost.batch_bytes(1, sizes.max(axis=0)))
        sampler = MemoryBudgetBatchSampler(sizes, cost, budget, window=arguments.window)
        indices, counts = flat(sampler)
        assert np.array_equal(np.sort(indices), np.arange(len(sizes)))
        # A micro-batch never crosses a window, so each stretch of that many samples is one.
        windows = np.split(indices, range(arguments.window, len(indices), arguments.window))
        orders = {
            "ours": (indices, counts),
            "first axis": sorted_and_cut(sizes, windows, lambda of: of[:, 0], cost, budget),
            "cost": sorted_and_cut(sizes, windows, cost.item_bytes, cost, budget),
        }
        found = {}
        for order, (taken, numbers) in orders.items():
            found[order] = figures(sizes, taken, numbers, cost, budget)
            results.row(axes=name, order=order, samples=len(sizes), **found[order])
        others = min(found["first axis"]["batches"], found["cost"]["batches"])
        results.bar(f"{name}: batches / the best other's", found["ours"]["batches"] / others, 1.01)
        results.bar(f"{name}: batches over the budget", found["ours"]["over"], 0)
    results.finish(arguments.json)


if __name__ == "__main__":
    main()
