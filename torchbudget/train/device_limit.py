"""The hard limit of a training's device, which is set again once what it leaves out is there."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from torchbudget.budget import MemoryBudget, limit_device_memory
from torchbudget.units import Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLimit:
    """Limits torch's allocator to a budget, before a training and again in it.

    The limit is what the budget leaves beside the bytes outside the allocator. Before the first
    batch few of them are there: kernels are loaded, and buffers of collectives made, when they are
    first used. So it is set again after the first step, and after the first evaluation.

    Attributes:
        budget: that the allocator is limited to; `None`: it is not.
        model: whose device is limited.
    """

    budget: MemoryBudget | Amount | None
    model: nn.Module
    _passed: set[str] = field(default_factory=set)

    def after(self, event: str) -> None:
        """Set the limit, where this event happened for the first time.

        Raises:
            BudgetError: see `limit_device_memory`.
        """
        if self.budget is not None and event not in self._passed:
            self._passed.add(event)
            limit_device_memory(self.budget, next(self.model.parameters()).device)
