"""What tests of collates compare batches by."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


class Encoding(UserDict[str, Any]):
    """A mapping that is no dict, as transformers' `BatchEncoding`."""


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Every tensor of a batch."""
    return [leaf for leaf in tree_leaves(batch.data) if isinstance(leaf, torch.Tensor)]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit: dtype, shape and content."""
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
