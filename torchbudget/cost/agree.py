"""One cost for all ranks: agreed upon, or measured by ranks whose steps wait for each other."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbudget.budget import MemoryBudget
from torchbudget.distributed import failing_together, gathered, gathered_of_all, is_distributed
from torchbudget.dtensors import mesh_ranks
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


class JoinedRanks:
    """Ranks that measure together, since the step reduces gradients or gathers parameters.

    Every method is a collective of the ranks that step together. Elsewhere each rank is on its own,
    and gets back what it passes.

    Raises:
        CostError: the step is wrapped in the older FSDP, which is not supported.
    """

    def __init__(self, state: TrainingState) -> None:
        self._joined, self._group = False, None
        if not is_distributed() or torch.distributed.get_world_size() == 1:
            return
        # Not imported here, which would read the environment: no such module exists without it.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in state.parts()):
            raise CostError(
                "FullyShardedDataParallel is not supported; torch.distributed.fsdp.fully_shard is"
            )
        replicated = next(reducing(state), None)
        if replicated is not None:
            self._group = replicated.process_group
        sharded = any(len(mesh_ranks(p)) > 1 for p in state.parameters())
        self._joined = replicated is not None or sharded

    def largest(self, *values: float) -> list[Any]:
        """The largest value on any rank, of each."""
        if not self._joined:
            return [*values]
        return [max(same) for same in zip(*gathered(values, self._group), strict=True)]

    def least(self, value: int) -> int:
        """The least value on any rank."""
        return min(gathered(value, self._group)) if self._joined else value

    def of_first(self, find: Callable[[], T]) -> T:
        """The object that the first rank finds; every rank looks for it.

        What one of them raises, no rank waits for.

        Raises:
            CostError: another rank failed.
        """
        if not self._joined:
            return find()
        found, error = [], None
        try:
            found = [find()]
        except Exception as raised:  # noqa: BLE001 - others must learn of whatever it is
            error = raised
        all_found = gathered((found, None if error is None else repr(error)), self._group)
        if error is not None:
            raise error
        for rank, (_, failed) in enumerate(all_found):
            if failed is not None:
                raise CostError(f"the cost cannot be measured: rank {rank} raised {failed}")
        [first] = all_found[0][0]
        return first


def reducing(state: TrainingState) -> Iterator[DistributedDataParallel]:
    """The parts of a step's modules that sum their gradients over ranks."""
    return (part for part in state.parts() if isinstance(part, DistributedDataParallel))


def bucket_bytes(module: DistributedDataParallel) -> int:
    """Bytes of DDP's buckets: a second copy of the gradients, for as long as the module lives."""
    return sum(p.nbytes for p in module.module.parameters() if p.requires_grad)
