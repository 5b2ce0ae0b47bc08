"""Graphs: a network on real molecules, which come with rdkit, in batches of PyTorch Geometric."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from _peers_runs import Way, Work

TITLE = "Graphs"
TEXT = (
    "A graph convolution on molecules (rdkit's first 5,000 of NCI), concatenated by PyG. Sizes are "
    "atoms and bonds; tokens are atoms."
)
FEATURES = 16


def prepare(folder: Path, samples: int) -> None:
    """Atoms and bonds of molecules."""
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
            widths = [FEATURES, *[512] * 4]
            self.layers = torch.nn.ModuleList(map(GraphConv, widths[:-1], widths[1:]))
            self.head = torch.nn.Linear(512, 1)

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
    from torch_geometric.data import Batch

    import torchbudget

    return torchbudget.loader(
        work.samples, work.measured_or(work.step), work.budget, size=size_of,
        collate_fn=Batch.from_data_list, cost_cache=work.cost_file,
    )  # fmt: skip


def ours_tuned(work: Work, _: None) -> Any:
    """The measured cost as a sum over graphs: batches are concatenated, not padded."""
    from torch_geometric.data import Batch

    import torchbudget

    cost = torchbudget.load_cost(work.cost_file).packed()
    return torchbudget.loader(
        work.samples, cost, work.budget, size=size_of, collate_fn=Batch.from_data_list
    )


WAYS = (
    Way(name="torchbudget.loader", make=ours, tuned=ours_tuned, resumed="tried"),
    Way(name="fixed batches", make=fixed, documented=32, needs="torch_geometric.loader"),
    Way(name="PyG DynamicBatchSampler", make=dynamic, documented=10_000, in_tokens=True,
        needs="torch_geometric.loader"),
)  # fmt: skip
BASE = "fixed batches"
