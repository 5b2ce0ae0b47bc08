"""Ranks whose steps wait for each other: they must run the same shapes, and find the same cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchbudget.distributed import gathered, is_distributed
from torchbudget.dtensors import mesh_ranks
from torchbudget.errors import CostError
from torchbudget.restoring import TrainingState

_T = TypeVar("_T")


class JoinedRanks:
    """What ranks agree on, where a step reduces gradients over ranks or gathers parameters.

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
        if fsdp and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in _parts(state)):
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

    def of_first(self, find: Callable[[], _T]) -> _T:
        """What the first rank finds, where all of them look for it.

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
    return (part for part in _parts(state) if isinstance(part, DistributedDataParallel))


def _parts(state: TrainingState) -> Iterator[nn.Module]:
    return (part for module in state.modules for part in module.modules())


def bucket_bytes(module: DistributedDataParallel) -> int:
    """What gradients are summed in: a second copy of them, for as long as the module lives."""
    return sum(p.nbytes for p in module.module.parameters() if p.requires_grad)
