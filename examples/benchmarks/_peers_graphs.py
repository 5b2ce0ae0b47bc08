"""Graphs: a network on real molecules, which come with rdkit, in batches of PyTorch Geometric."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from _peers_runs import Way, Work

TITLE = "Graphs"
TEXT = (
    "A graph convolution on molecules (rdkit's first 5,000 of NCI), concatenated by PyG. Sizes are "
    "atoms and bonds; tokens are atoms."
)
FEATURES = 16


def prepare(folder: Path, samples: int) -> None:
    """Atoms and bonds of molecules; each is ten copies side by side, so that memory matters."""
    import rdkit
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    lines = (Path(rdkit.__file__).parent / "Data" / "NCI" / "first_5K.smi").read_text().splitlines()
    found = []
    for line in lines[:samples]:
        molecule = Chem.MolFromSmiles(line.split()[0])
        if molecule is not None and molecule.GetNumBonds():
            atoms = [atom.GetAtomicNum() for atom in molecule.GetAtoms()]
            bonds = [(b.GetBeginAtomIdx(), b.GetEndAtomIdx()) for b in molecule.GetBonds()]
            found.append((atoms, bonds))
    (folder / "graphs.pickle").write_bytes(pickle.dumps(found))


def molecules(folder: Path) -> list[Any]:
    found: list[Any] = pickle.loads((folder / "graphs.pickle").read_bytes())  # noqa: S301
    return found


def sizes(folder: Path) -> list[int]:
    return [len(atoms) for atoms, _ in molecules(folder)]


def size_of(graph: Any) -> tuple[int, int]:
    return graph.num_nodes, graph.num_edges


def work(job: dict[str, Any]) -> Work:
    """Model, optimizer and graphs, after a first small step."""
    import torch
    from torch.nn import functional
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GraphConv, global_add_pool

    folder = Path(job["folder"])
    graphs = []
    for number, (atoms, bonds) in enumerate(molecules(folder)):
        pairs = torch.tensor(bonds).T
        x = functional.one_hot(torch.tensor(atoms) % FEATURES, FEATURES).float()
        edges = torch.cat([pairs, pairs.flip(0)], 1)
        y = torch.tensor([float(len(bonds))])
        graphs.append(Data(x=x, edge_index=edges, y=y, number=number))

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [FEATURES, *[256] * 4]
            self.layers = torch.nn.ModuleList(map(GraphConv, widths[:-1], widths[1:]))
            self.head = torch.nn.Linear(256, 1)

        def forward(self, batch: Any) -> Any:
            x = batch.x
            for layer in self.layers:
                x = layer(x, batch.edge_index).relu()
            return self.head(global_add_pool(x, batch.batch, len(batch.y)))[:, 0]

    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        functional.mse_loss(model(batch), batch.y).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(Batch.from_data_list(graphs[:2]))
    return Work(
        samples=graphs,
        sizes=[len(graph.x) for graph in graphs],
        step=step,
        padded=lambda batch: batch.num_nodes,
        room=job["room"],
        folder=folder,
        indices=lambda batch: batch.number.tolist(),
    )


def fixed(work: Work, batch_size: int) -> Any:
    from torch_geometric.loader import DataLoader

    return DataLoader(work.samples, batch_size=batch_size, shuffle=True)


def dynamic(work: Work, max_num: int) -> Any:
    from torch_geometric.loader import DataLoader, DynamicBatchSampler

    sampler = DynamicBatchSampler(work.samples, max_num=max_num, mode="node", shuffle=True)
    return DataLoader(work.samples, batch_sampler=sampler)


def ours(work: Work, _: None) -> Any:
    """Batches are concatenated: the cost is a sum over graphs, traced at a few shapes."""
    import torch
    from torch_geometric.data import Batch
    from torch_geometric.loader import DataLoader

    from torchbudget import MemoryBudgetBatchSampler, PackedCost, trace_peak_bytes

    def traced(graphs: int, nodes: int, edges: int) -> int:
        batch = Batch(
            x=torch.zeros(nodes, FEATURES), edge_index=torch.zeros(2, edges, dtype=torch.int64),
            batch=torch.zeros(nodes, dtype=torch.int64), y=torch.zeros(graphs),
        )  # fmt: skip
        return int(trace_peak_bytes(work.step, batch))

    base = traced(100, 20_000, 40_000)
    per_graph = (traced(1100, 20_000, 40_000) - base) / 1000
    per_node = (traced(100, 40_000, 40_000) - base) / 20_000
    per_edge = (traced(100, 20_000, 80_000) - base) / 40_000
    sizes = np.array([size_of(graph) for graph in work.samples])
    # The rest, model and optimizer, is there before, and the budget here is for what is added.
    cost = PackedCost(sample_bytes=per_graph, unit_bytes=(per_node, per_edge))
    sampler = MemoryBudgetBatchSampler(sizes, cost, work.budget - work.base)
    return DataLoader(work.samples, batch_sampler=sampler)


WAYS = (
    Way(name="torchbudget", make=ours, resumed="tried"),
    Way(name="fixed batches", make=fixed, documented=32, needs="torch_geometric.loader",
        package="torch-geometric"),
    Way(name="PyG DynamicBatchSampler", make=dynamic, documented=10_000, needs="torch_geometric.loader",
        package="torch-geometric"),
)  # fmt: skip
BASE = "fixed batches"
