"""What training asks of a sampler that plans its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from torchbudget.cost.models.protocol import IntArray


@runtime_checkable
class StepSource(Protocol):
    """Knows how the micro-batches of an iteration make up optimizer steps.

    `MemoryBudgetBatchSampler` is one; `GradAccumulator(…, steps=…)` takes any.
    """

    @property
    def iterations(self) -> int:
        """How often `iter()` was called: where it has changed, `steps` is read again."""

    @property
    def steps(self) -> Iterable[int]:
        """The number of micro-batches of each step, on this rank, of the latest iteration."""


@runtime_checkable
class ExtremeSource(Protocol):
    """Knows the micro-batches of the coming epoch that are likeliest to run out of memory."""

    def extremes(self) -> dict[str, IntArray]:
        """Indices in the data set of the "largest", the "longest" and the "shortest" one."""

    def batch_bytes(self, indices: IntArray, /) -> int:
        """Predicted bytes of a micro-batch of these samples."""
