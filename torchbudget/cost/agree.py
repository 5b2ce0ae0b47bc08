"""One cost for all ranks: agreed upon, or measured by ranks whose steps wait for each other."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbudget.budget import MemoryBudget
from torchbudget.distributed import (
    Ranks,
    failing_together,
    gathered,
    gathered_of_all,
    is_distributed,
    is_dtensor,
    mesh_ranks,
)
from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState

T = TypeVar("T")


def agree(cost: T, budget: MemoryBudget | int | str) -> tuple[T, MemoryBudget]:
    """Return rank 0's cost and the smallest budget of any rank; a collective.

    Without `torch.distributed` it returns its arguments.

    Args:
        cost: any cost model that can be pickled.
        budget: the budget of this rank. The smallest amount counts for each of device, host and
            `/dev/shm`.

    Raises:
        BudgetError: this rank's budget cannot be read.
        RankError: another rank failed, or does not call it within the timeout of its process group.

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


def joined_ranks(state: TrainingState) -> Ranks:
    """The ranks that measure together, since the step reduces gradients or gathers parameters.

    Raises:
        CostError: the step is wrapped in the older FSDP, which is not supported.
    """
    # Not imported here, which would read the environment: no such module exists without it.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    parts = state.parts() if fsdp and len(Ranks()) > 1 else ()
    if any(isinstance(part, fsdp.FullyShardedDataParallel) for part in parts):
        raise CostError(
            "FullyShardedDataParallel is not supported; torch.distributed.fsdp.fully_shard is"
        )
    replicated = next(reducing(state), None)
    if replicated is not None:
        return Ranks(replicated.process_group)
    return Ranks(alone=not any(len(mesh_ranks(p)) > 1 for p in state.parameters()))


def unsharded_gradient_bytes(state: TrainingState) -> int:
    """Bytes of the gradients that FSDP2 keeps unsharded until a step's last micro-batch."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    sharded = [part for part in state.parts() if fsdp and isinstance(part, fsdp.FSDPModule)]
    parameters = {p for part in sharded for p in part.parameters() if p.requires_grad}
    return sum(p.numel() * p.element_size() for p in parameters if is_dtensor(p))


def reducing(state: TrainingState) -> Iterator[DistributedDataParallel]:
    """The parts of a step's modules that sum their gradients over ranks."""
    return (part for part in state.parts() if isinstance(part, DistributedDataParallel))
