"""A model, texts and loaders for outputs of samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.samplers import LENGTHS, TOKENS
from torchbudget import MemoryBudgetBatchSampler, PadCollate


class Encoder(nn.Module):
    """Means over a sample's tokens, which padding must not change; dropout only in training."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.mix = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5))
        self.double()

    def forward(self, batch: Any) -> Tensor:
        mixed = self.mix(self.embed(batch.data)) * batch.mask.unsqueeze(-1)
        return mixed.sum(1) / batch.mask.sum(1, keepdim=True).clamp(min=1)


def texts_of(sizes: Any) -> list[Tensor]:
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(0, 11, int(n))) for n in sizes]


def loader_of(
    sizes: Any = LENGTHS, budget: Any = 1000, cost: Any = TOKENS, **options: Any
) -> DataLoader[Any]:
    of_loader = {"collate_fn": PadCollate(), "num_workers": 0, "persistent_workers": False}
    of_loader |= {name: options.pop(name) for name in [*of_loader, "in_order"] if name in options}
    texts = texts_of(options.pop("texts", sizes))
    sampler = MemoryBudgetBatchSampler(sizes, cost, budget, **{"shuffle": False} | options)
    return DataLoader(texts, batch_sampler=sampler, **of_loader)


def one_by_one(model: Encoder, sizes: Any) -> list[Tensor]:
    model.eval()
    collate = PadCollate()
    with torch.no_grad():
        return [model(collate([text]))[0] for text in texts_of(sizes)]


def killed_after(number: int, model: Encoder, seen: list[int]) -> Any:
    """The model, which fails in the batch after that many, and notes how many samples came."""

    def called(batch: Any) -> Tensor:
        if len(seen) == number:
            raise ZeroDivisionError
        seen.append(batch.num_samples)
        return model(batch)

    return called
