"""A cost is packed because it says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torchbudget import MemoryBudgetBatchSampler
from torchbudget.cost.protocol import AdditiveCost


class Tokens:
    """A user's cost that happens to have what an additive one has."""

    base_bytes = 0

    def item_bytes(self, sizes: Any) -> Any:
        return np.asarray(sizes, np.int64)

    def batch_bytes(self, n: Any, padded_size: Any) -> Any:
        return np.asarray(n, np.int64) * self.item_bytes(padded_size)

    def capacity(self, padded_size: Any, budget_bytes: Any) -> Any:
        return np.asarray(budget_bytes, np.int64) // np.maximum(self.item_bytes(padded_size), 1)


class PackedTokens(Tokens, AdditiveCost):
    """The same, which says that its batches are packed."""


def test_only_what_derives_is_packed() -> None:
    """Two attributes do not make a cost additive; deriving from `AdditiveCost` does."""
    sizes = [9, 1, 1, 1]
    padded = MemoryBudgetBatchSampler(sizes, Tokens(), 12, shuffle=False)
    packed = MemoryBudgetBatchSampler(sizes, PackedTokens(), 12, shuffle=False)
    assert [len(batch) for batch in padded] == [1, 3]
    assert [len(batch) for batch in packed] == [4]


def test_an_additive_cost_has_both_parts() -> None:
    class Half(AdditiveCost):
        base_bytes = 0

    with pytest.raises(TypeError, match="item_bytes"):
        Half()
