"""Packing: a language model on docstrings, one after the other without padding."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import _peers_text
from _peers_runs import Way, Work
from _peers_text import sizes

__all__ = ["BASE", "TEXT", "TITLE", "WAYS", "prepare", "sizes", "work"]

TITLE = "Packing"
TEXT = (
    "A language model of causal convolutions (packed attention needs CUDA), on the same docstrings "
    "without padding. Settings: samples; rows of 1,024 tokens (TRL, `bfd`); tokens (bionemo)."
)
ROW = 1024  # TRL's default of `max_length`
VOCABULARY = 8000


def prepare(folder: Path, samples: int) -> None:
    _peers_text.prepare(folder, samples)


def joined(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """All samples one after the other, and the index of each token's."""
    import torch

    return {
        name: torch.cat([torch.as_tensor(sample[name]) for sample in samples])
        for name in ("input_ids", "token_index")
    }


def work(job: dict[str, Any]) -> Work:
    """Model, optimizer and samples, after a first small step."""
    import torch
    from torch import nn
    from torch.nn import functional

    folder = Path(job["folder"])
    data = pickle.loads((folder / "text.pickle").read_bytes())  # noqa: S301
    samples = [
        {"input_ids": torch.tensor(ids), "token_index": torch.full((len(ids),), index)}
        for index, ids in enumerate(data["ids"])
    ]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, 128)
            self.mixers = nn.ModuleList(nn.Linear(4 * 128, 128) for _ in range(3))
            self.head = nn.Linear(128, VOCABULARY)

        def forward(self, ids: Any) -> Any:
            x = self.embedding(ids)
            for mixer in self.mixers:
                before = functional.pad(x, (0, 0, 3, 0))
                near = [before[i : len(before) - 3 + i] for i in range(4)]
                x = x + functional.gelu(mixer(torch.cat(near, -1)))
            return self.head(x)

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> None:
        ids = batch["input_ids"]
        functional.cross_entropy(model(ids)[:-1], ids[1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(joined(samples[:2]))
    return Work(
        samples=samples,
        sizes=[len(ids) for ids in data["ids"]],
        step=step,
        padded=lambda batch: len(batch["input_ids"]),
        room=job["room"],
        folder=folder,
        indices=lambda batch: batch["token_index"].unique_consecutive().tolist(),
    )


def fixed(work: Work, batch_size: int) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(work.samples, batch_size=batch_size, shuffle=True, collate_fn=joined)


def packed_before(work: Work) -> None:
    """TRL packs the data set before it trains, and so before memory is limited here."""
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    columns = {
        name: [sample[name].tolist() for sample in work.samples]
        for name in ("input_ids", "token_index")
    }
    work.extra["rows"] = pack_dataset(Dataset.from_dict(columns), ROW, "bfd")


def trl(work: Work, batch_size: int) -> Any:
    from torch.utils.data import DataLoader

    rows = work.extra["rows"]
    return DataLoader(rows, batch_size=batch_size, shuffle=True, collate_fn=joined)


def bionemo(work: Work, max_total_size: int) -> Any:
    """Its probe of memory needs CUDA, so sizes are tokens."""
    from bionemo.size_aware_batching.sampler import SizeAwareBatchSampler
    from torch.utils.data import DataLoader, RandomSampler

    sampler = SizeAwareBatchSampler(
        RandomSampler(work.samples), lambda index: work.sizes[index], max_total_size
    )
    return DataLoader(work.samples, batch_sampler=sampler, collate_fn=joined)


def ours(work: Work, _: None) -> Any:
    import torchbudget

    return torchbudget.loader(
        work.samples, work.measured_or(work.step), work.budget,
        collate_fn=torchbudget.PackCollate(), size="input_ids", cost_cache=work.cost_file,
    )  # fmt: skip


WAYS = (
    Way(name="torchbudget.loader", make=ours, resumed="tried"),
    Way(name="fixed batches", make=fixed, documented=8),
    Way(name="TRL pack_dataset", make=trl, before=packed_before, documented=8, needs="trl",
        why="its batches are smaller, and one core gains nothing from larger ones"),
    Way(name="bionemo size-aware", make=bionemo, documented=8192, in_tokens=True,
        blank="its probe needs CUDA", needs="bionemo.size_aware_batching.sampler"),
)  # fmt: skip
BASE = "fixed batches"
