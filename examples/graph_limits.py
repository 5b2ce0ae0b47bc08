"""Graphs under two limits, nodes and edges, of which no batch mixes two kinds.

    python examples/graph_limits.py --nodes 2048 --edges 16384

Random trees and dense meshes are packed side by side into batches: the sums of their nodes and of
their edges are each within a limit, and a batch has graphs of one kind. The table compares them
with batches that are closed where the next graph does not fit, as most graph libraries make them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from torchbudget import MemoryBudgetBatchSampler, PackedCost, TorchBudgetError

NODES = PackedCost(unit_bytes=(1, 0), unit="nodes")
EDGES = PackedCost(unit_bytes=(0, 1), unit="edges")


def graphs(number: int) -> tuple[Any, Any]:
    """Nodes and edges of each graph, shape `(number, 2)`, and its kind."""
    rng = np.random.default_rng(0)
    nodes = np.clip(rng.lognormal(3.3, 0.6, number), 3, 200).astype(np.int64)
    kinds = np.where(rng.random(number) < 0.2, "mesh", "tree")
    degree = np.where(kinds == "mesh", rng.uniform(10, 40, number), 2)
    return np.stack([nodes, (nodes * degree).astype(np.int64)], axis=1), kinds


def next_fit(sizes: Any, limits: Any) -> int:
    """The number of batches of graphs as they come."""
    batches, used = 1, np.zeros(2, np.int64)
    for size in sizes:
        used = used + size
        if (used > limits).any():
            batches, used = batches + 1, size
    return batches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", type=int, default=20_000)
    parser.add_argument("--nodes", type=int, default=2048, help="in a batch at the most")
    parser.add_argument("--edges", type=int, default=16_384, help="in a batch at the most")
    arguments = parser.parse_args()
    sizes, kinds = graphs(arguments.graphs)
    limits = np.array([arguments.nodes, arguments.edges])
    try:
        sampler = MemoryBudgetBatchSampler(
            sizes, NODES, arguments.nodes, limits=[(EDGES, arguments.edges)], groups=kinds
        )
    except TorchBudgetError as error:
        parser.error(str(error))
    batches = list(sampler)
    for batch in batches:
        assert (sizes[batch].sum(axis=0) <= limits).all()
        assert len(set(kinds[batch])) == 1
    print(sampler.report())
    print(f"\n{'kind':6}{'graphs':>8}{'batches':>9}{'as they come':>14}{'at least':>10}")
    for kind in np.unique(kinds).tolist():
        of_kind = sizes[kinds == kind]
        ours = sum(kinds[batch[0]] == kind for batch in batches)
        least = int(np.ceil((of_kind.sum(axis=0) / limits).max()))
        they = next_fit(of_kind, limits)
        print(f"{kind:6}{len(of_kind):8,}{ours:9,}{they:14,}{least:10,}")


if __name__ == "__main__":
    main()
