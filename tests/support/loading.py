"""What users give to `loader`: samples, collates of their own, and models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Graph:
    """No mapping and no tuple, as the samples of graph libraries."""

    def __init__(self, nodes: int, edges: int) -> None:
        self.x, self.edges = torch.ones(nodes, 2), torch.zeros(edges, 2)


def joined(graphs: list[Graph]) -> dict[str, Tensor]:
    return {k: torch.cat([getattr(one, k) for one in graphs]) for k in ("x", "edges")}


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class TakesMask(nn.Module):
    """Its loss is a sum over the mask."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.inner, self.config = nn.Embedding(99, 1), SimpleNamespace(**config)

    def forward(self, input_ids: Any, attention_mask: Any = None, **_: Any) -> Any:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return (self.inner(input_ids)[..., 0] * mask).sum()


class TakesNone(TakesMask):
    """A model of a user's own around one that takes a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TakesMask(pad_token_id=7)  # type: ignore[assignment]

    def forward(self, input_ids: Any) -> Any:
        return self.inner(input_ids)
