"""A measured cost as one of batches without padding, as far as it was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from torchbudget.cost.models.padded import PackedCost
from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.errors import MeasureWarning
from torchbudget.units import MAX_BYTES, format_bytes
from torchbudget.warn import warn

# Of a sample that is longer than all that were measured: more than any device has, and the sums of
# a window of such samples do not wrap.
_BEYOND_BYTES: Final = 2**45
# A budget that differs by a larger share from the one that was predicted for is another one.
_SAME_BUDGET: Final = 0.1


def is_beyond(sizes: ArrayLike, largest: tuple[int, ...] | None) -> Any:
    """Whether sizes are longer on any axis than all that were measured, shape `(…)`.

    Args:
        sizes: shape `(…)`, or `(…, d)` for d axes.
        largest: the largest size on every axis; `None`: unlimited.
    """
    if largest is None:
        return False
    axes = len(largest)
    over = np.asarray(sizes) > (largest if axes > 1 else largest[0])
    return over.any(axis=-1) if axes > 1 else over


def warn_of_other_budget(made_for: int | None, budget_bytes: int) -> None:
    """Warn the caller of `check_budget` of another budget than a cost was predicted for."""
    if made_for is None or abs(budget_bytes - made_for) <= _SAME_BUDGET * made_for:
        return
    warn(
        f"this cost was predicted for a budget of {format_bytes(made_for)}: what CUDA's "
        f"allocator reserves beside the batches that fill {format_bytes(budget_bytes)} is "
        "unknown; predict it with that budget, or measure it on the device",
        MeasureWarning,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMeasuredCost(PackedCost):
    """What `MeasuredCost.packed` returns: no further than the samples that were measured.

    Attributes:
        largest: as of `MeasuredCost`.
        predicted_for: likewise.
    """

    largest: tuple[int, ...] | None = None
    predicted_for: int | None = None

    def item_bytes(self, sizes: ArrayLike) -> IntArray:
        """See `AdditiveCost.item_bytes`; beyond what was measured, more than any device has."""
        known = super(PackedMeasuredCost, self).item_bytes(self._known(sizes))
        return np.where(is_beyond(sizes, self.largest), _BEYOND_BYTES, known)

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `MAX_BYTES` beyond what was measured."""
        known = super(PackedMeasuredCost, self).batch_bytes(n, self._known(padded_size))
        return np.where(is_beyond(padded_size, self.largest), MAX_BYTES, known)

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; 0 beyond what was measured."""
        known = super(PackedMeasuredCost, self).capacity(self._known(padded_size), budget_bytes)
        return np.where(is_beyond(padded_size, self.largest), 0, known)

    def check_budget(self, budget_bytes: int) -> None:
        """See `MadeForBudget`."""
        warn_of_other_budget(self.predicted_for, budget_bytes)

    def _known(self, sizes: ArrayLike) -> Any:
        """Sizes, and in place of those beyond the largest that was measured."""
        largest = self.largest
        if largest is None:
            return sizes
        return np.minimum(sizes, largest if len(largest) > 1 else largest[0])
