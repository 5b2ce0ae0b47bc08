"""Trains a message-passing network by `loader`, with a collate of its own; prints JSON."""

from __future__ import annotations

import gc
import json
import sys
import warnings

import numpy as np
import torch
from torch import Tensor, nn

import torchbudget as tb
from torchbudget.machine.peaks import peak_memory

gc.freeze()  # what is imported takes 0.2 s of each collection
warnings.simplefilter("ignore")
tb.configure_allocators()
torch.manual_seed(0)
BUDGET = 600 * 2**20
rng = np.random.default_rng(0)
nodes = np.clip(rng.lognormal(2.7, 0.9, 10_000), 3, 300).astype(int)


class Graph:
    def __init__(self, number: int) -> None:
        self.x = torch.randn(number, 16)
        self.edge_index = torch.randint(0, number, (2, 3 * number + number % 7))


class GraphBatch:
    """Graphs side by side: nodes `(Σ nodes, 16)`, edges `(2, Σ edges)`, graphs `(Σ nodes,)`."""

    def __init__(self, graphs: list[Graph]) -> None:
        counts = torch.tensor([len(one.x) for one in graphs])
        offsets = counts.cumsum(0) - counts
        self.x = torch.cat([one.x for one in graphs])
        edges = [one.edge_index + at for one, at in zip(graphs, offsets, strict=True)]
        self.edge_index = torch.cat(edges, dim=1)
        self.graph, self.num_graphs = torch.repeat_interleave(counts), len(graphs)


model = nn.ModuleList([nn.Linear(16, 64), nn.Linear(128, 64), nn.Linear(64, 1)])
optimizer = torch.optim.AdamW(model.parameters())


def forward(batch: GraphBatch) -> Tensor:
    embed, message, head = model
    hidden = embed(batch.x)
    source, target = batch.edge_index
    pairs = message(torch.cat([hidden[source], hidden[target]], dim=1)).relu()
    hidden = hidden + torch.zeros_like(hidden).index_add(0, target, pairs)
    pooled = hidden.new_zeros(batch.num_graphs, 64).index_add(0, batch.graph, hidden)
    return head(pooled).square().mean()


def step(batch: GraphBatch) -> None:
    forward(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def size(graph: Graph) -> tuple[int, int]:
    return len(graph.x), graph.edge_index.shape[1]


graphs = [Graph(number) for number in nodes.tolist()]
loader = tb.loader(graphs, step, BUDGET, size=size, collate_fn=GraphBatch, window=10_000)
peaks = []
for batch in loader:
    with peak_memory("cpu") as peak:
        step(batch)
    peaks.append(peak.bytes / BUDGET)
told = {"peaks": peaks, "cost": type(loader.batch_sampler.cost).__name__}
sys.stdout.write(json.dumps(told))
