"""What training asks of a sampler that plans its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torchbudget.cost.models.protocol import IntArray


@runtime_checkable
class StepSource(Protocol):
    """Knows how the micro-batches of an iteration make up optimizer steps.

    `MemoryBudgetBatchSampler` is one; `GradAccumulator(…, steps=…)` takes any.
    """

    @property
    def iterations(self) -> int:
        """How often `iter()` was called: where it has changed, `steps` is read again.

        Where a loop goes on after another one inside it, the number of before.
        """

    @property
    def steps(self) -> Iterable[int]:
        """The number of micro-batches of each step, on this rank, of the latest iteration."""


@runtime_checkable
class IndexSource(Protocol):
    """Knows which samples each batch of the coming epoch holds: see `predict` and `warm_up`."""

    @property
    def num_replicas(self) -> int:
        """Ranks that share the epoch."""

    @property
    def rank(self) -> int:
        """Of this process."""

    def unchanged(self) -> AbstractContextManager[object]:
        """An iteration inside changes nothing for a loop around it."""

    def check_dataset(self, dataset: Any, /) -> None:
        """Raise an `OptionError` where a data set has not one sample for each size."""

    def whole_epoch(self, dataset_length: int, /) -> Iterator[list[int]]:
        """Indices in the data set of each batch on this rank, over all ranks each index once.

        Raises:
            OptionError: the epoch leaves samples out or repeats them.
            StateError: it would go on where another iteration has stopped.
        """

    def extremes(self) -> dict[str, IntArray]:
        """Indices of the "largest", the "longest" and the "shortest" batch of the coming epoch."""

    def batch_bytes(self, indices: IntArray, /) -> int:
        """Predicted bytes of a micro-batch of these samples."""
