"""Graphs of any size in batches that fit a budget of bytes: two ragged axes, nodes and edges.

    python examples/graphs.py --budget 8MiB

Random molecules of heavy-tailed sizes come from a generator. A batch is one graph of them all, with
nodes and edges concatenated and nothing padded: its cost is the sum of what each molecule's nodes
and edges need, a `PackedCost` of two axes. What they need is traced on the training step of a
message-passing network, without running it. The table compares the batches with fixed ones of the
same mean number of molecules, by the traced bytes of their steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbudget import (
    BudgetedIterableDataset,
    PackedCost,
    TorchBudgetError,
    format_bytes,
    parse_bytes,
    trace_peak_bytes,
)

FEATURES = 16
WIDTH = 64


class Molecules:
    """Random trees with some rings, 2 to 400 atoms each."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rng = np.random.default_rng(0)
        for atoms in np.clip(rng.lognormal(2.7, 0.8, self.number), 2, 400).astype(int).tolist():
            children = np.arange(1, atoms)
            parents = rng.integers(0, children)
            rings = rng.integers(0, atoms, (2, rng.integers(0, atoms // 2 + 1)))
            ends = np.concatenate([[children, parents], [parents, children], rings], axis=1)
            yield {
                "nodes": torch.from_numpy(rng.standard_normal((atoms, FEATURES), np.float32)),
                "edges": torch.from_numpy(ends),
            }


def graph_size(sample: dict[str, Tensor]) -> tuple[int, int]:
    return len(sample["nodes"]), sample["edges"].shape[1]


def one_graph(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All side by side: nodes `(Σ nodes, features)`, edges `(2, Σ edges)`, graphs `(Σ nodes,)`."""
    counts = torch.tensor([len(sample["nodes"]) for sample in samples])
    offsets = counts.cumsum(0) - counts
    return {
        "nodes": torch.cat([sample["nodes"] for sample in samples]),
        "edges": torch.cat(
            [sample["edges"] + offset for sample, offset in zip(samples, offsets, strict=True)], 1
        ),
        "graph": torch.repeat_interleave(counts),
        "labels": counts.float(),
    }


class MessagePassing(nn.Module):
    """Two rounds of messages along edges, and a number for each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.messages = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor, graph: Tensor, graphs: int) -> Tensor:
        hidden = self.embed(nodes)
        for layer in self.messages:
            pairs = torch.cat([hidden[edges[0]], hidden[edges[1]]], dim=1)
            sums = torch.zeros_like(hidden).index_add(0, edges[1], layer(pairs).relu())
            hidden = hidden + sums
        pooled = hidden.new_zeros(graphs, WIDTH).index_add(0, graph, hidden)
        return self.head(pooled)[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=parse_bytes, default="8MiB", help="of tensors")
    parser.add_argument("--molecules", type=int, default=2000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = MessagePassing()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: dict[str, Any]) -> None:
        found = model(batch["nodes"], batch["edges"], batch["graph"], len(batch["labels"]))
        nn.functional.mse_loss(found, batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    def traced(graphs: int, nodes: int, edges: int) -> int:
        """Bytes of a step on a batch of these numbers; what its edges join does not matter."""
        batch = {
            "nodes": torch.zeros(nodes, FEATURES),
            "edges": torch.zeros(2, edges, dtype=torch.int64),
            "graph": torch.zeros(nodes, dtype=torch.int64),
            "labels": torch.zeros(graphs),
        }
        return int(trace_peak_bytes(step, batch))

    # The peak rises along each axis by as much as one more of it needs.
    base = traced(100, 20_000, 40_000)
    per_graph = (traced(1100, 20_000, 40_000) - base) / 1000
    per_node = (traced(100, 40_000, 40_000) - base) / 20_000
    per_edge = (traced(100, 20_000, 80_000) - base) / 40_000
    fixed = base - 100 * per_graph - 20_000 * per_node - 40_000 * per_edge
    cost = PackedCost(
        fixed_bytes=max(fixed, 0), sample_bytes=per_graph, unit_bytes=(per_node, per_edge)
    )
    print(
        f"a step takes {format_bytes(int(max(fixed, 0)))}, and {per_node:.0f} bytes for each node, "
        f"{per_edge:.0f} for each edge"
    )
    molecules = Molecules(arguments.molecules)
    try:
        stream = BudgetedIterableDataset(
            molecules, cost, arguments.budget, size=graph_size, window=1000, collate_fn=one_graph
        )
        ours = list(stream)
    except TorchBudgetError as error:
        parser.error(str(error))
    mean = round(arguments.molecules / len(ours))
    samples = iter(molecules)
    same = [one_graph(batch) for batch in iter(lambda: list(islice(samples, mean)), [])]
    print("batches           number  molecules  lowest / budget  mean / budget  highest / budget")
    for name, batches in (("of the budget", ours), (f"of {mean} each", same)):
        peaks = np.array(
            [
                traced(len(b["labels"]), len(b["nodes"]), b["edges"].shape[1])
                for b in batches[:: max(len(batches) // 40, 1)]
            ]
        )
        low, middle, high = np.array([peaks.min(), peaks.mean(), peaks.max()]) / arguments.budget
        count = sum(len(batch["labels"]) for batch in batches)
        print(
            f"{name:16}  {len(batches):6,}  {count:9,}  {low:15.3f}  {middle:13.3f}  {high:16.3f}"
        )


if __name__ == "__main__":
    main()
