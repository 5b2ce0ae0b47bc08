"""Ranks whose steps wait for each other: they must run the same shapes, and find the same cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.distributed import gathered, is_distributed
from torchbudget.dtensors import mesh_ranks

_T = TypeVar("_T")


class JoinedRanks:
    """What ranks agree on, where a step reduces gradients over ranks or gathers parameters.

    Every method is a collective of all ranks. Elsewhere each rank is on its own, and gets back what
    it passes.
    """

    def __init__(self, state: TrainingState) -> None:
        self._joined = (
            is_distributed()
            and torch.distributed.get_world_size() > 1
            and (any(reducing(state)) or any(len(mesh_ranks(p)) > 1 for p in state.parameters()))
        )

    def largest(self, *values: float) -> list[Any]:
        """The largest value on any rank, of each."""
        if not self._joined:
            return [*values]
        return [max(same) for same in zip(*gathered(values), strict=True)]

    def least(self, value: int) -> int:
        """The least value on any rank."""
        return min(gathered(value)) if self._joined else value

    def of_first(self, value: _T) -> _T:
        """The first rank's value."""
        first: _T = gathered(value)[0] if self._joined else value
        return first


def reducing(state: TrainingState) -> Iterator[DistributedDataParallel]:
    """The parts of a step's modules that sum their gradients over ranks."""
    for module in state.modules:
        for part in module.modules():
            if isinstance(part, DistributedDataParallel):
                yield part


def bucket_bytes(module: DistributedDataParallel) -> int:
    """What gradients are summed in: a second copy of them, for as long as the module lives."""
    return sum(p.nbytes for p in module.module.parameters() if p.requires_grad)
