"""`agree`: one cost and one budget for ranks that measured or detected for themselves."""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch

from torchbudget.budget import MemoryBudget
from torchbudget.distributed import failing_together, gathered, gathered_of_all, is_distributed

T = TypeVar("T")


def agree(cost: T, budget: MemoryBudget | int | str) -> tuple[T, MemoryBudget]:
    """Return rank 0's cost and the smallest budget of any rank; a collective.

    Alone, it returns what it was given.

    Args:
        cost: any cost model that can be pickled.
        budget: of this rank. On each of device, host and `/dev/shm` the smallest amount counts.

    Raises:
        BudgetError: this rank's budget cannot be read.
        RankError: another rank failed, or does not come here within the timeout of its process
            group.

    >>> from torchbudget import PaddedCost, agree
    >>> agree(PaddedCost(unit_bytes=4), "8GiB")[1].device == 8 * 1024**3
    True
    """
    if not is_distributed():
        return cost, MemoryBudget.of(budget)
    with failing_together(gathered_of_all):
        mine = pickle.dumps((cost, MemoryBudget.of(budget)))
    costs, budgets = zip(*map(pickle.loads, gathered(mine)), strict=True)
    least = {
        name: min(filter(None, (getattr(one, name) for one in budgets)), default=None)
        for name in ("device", "host", "shared")
    }
    # On rank 0 the cost stays the object that it is.
    return costs[0] if torch.distributed.get_rank() else cost, MemoryBudget(**least)
