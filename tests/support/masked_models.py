"""Models that take a mask of padding, or do not, and steps of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


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
