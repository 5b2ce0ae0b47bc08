"""Protocols of data sets, loaders, batches and their sources, for rooms that import none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torchbudget.checks import shape_of


@runtime_checkable
class MapStyle(Protocol):
    """A map-style data set: it has a length and returns a sample for each index below it."""

    def __getitem__(self, index: int, /) -> Any: ...
    def __len__(self) -> int: ...


@runtime_checkable
class HasNumSamples(Protocol):
    """A batch that knows how many samples it has."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        ...


@runtime_checkable
class SplittableBatch(HasNumSamples, Protocol):
    """A batch that can be cut into smaller ones."""

    def split(self, n: int, /) -> Sequence[Any]:
        """N batches of the same kind, of nearly equal numbers of samples, in order."""
        ...


@runtime_checkable
class SplittablePaddedBatch(SplittableBatch, Protocol):
    """A splittable batch whose samples are padded to one size."""

    @property
    def padded_size(self) -> Sequence[int]:
        """Padded lengths, one for each ragged axis."""
        ...


class Replannable(Protocol):
    """A sampler of a measured cost, which can plan its later batches with a larger margin."""

    @property
    def cost(self) -> Any:
        """The cost that batches are planned by."""
        ...

    def replan(self) -> float:
        """Plan later batches by what the cost has observed; the margin. A collective."""
        ...


class BatchMonitor(Protocol):
    """A monitor that measures each batch of a training, such as `MemoryMonitor`."""

    def batch(
        self, n: int | None = None, size: Sequence[int] | None = None, /
    ) -> AbstractContextManager[object]:
        """Measure a batch inside the context: its samples and its padded size, if it has one."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A loader that saves its position by itself, such as torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Go on from a saved position."""
        ...


@runtime_checkable
class StepSource(Protocol):
    """A source of micro-batches that plans how they make up optimizer steps.

    `MemoryBudgetBatchSampler` is one; `GradAccumulator(…, steps=…)` takes any. If it also has
    `keeps_units = True`, micro-batches have whole units, which `run_or_split` does not cut.
    """

    @property
    def steps(self) -> Sequence[int]:
        """Micro-batches of each step that was begun, on this rank, in the present iteration.

        It grows while micro-batches are drawn. Each iteration has a sequence of its own.
        """

    def accumulates(self) -> bool:
        """Whether steps of the coming epoch have several micro-batches."""


class ResumableSource(ABC):
    """A sampler or stream that knows where it stands after each batch that came from it.

    A plain `DataLoader` with workers reads ahead of its loop, so that only the loop knows how many
    batches are done. This is a base class to inherit from, and no `Protocol`, since many objects
    have methods of these names.

    Attributes:
        shapes: pairs (n, L) of rows and padded length, the fewest rows first; empty: any.
    """

    shapes: tuple[tuple[int, int], ...] = ()
    _ranks: Any  # `AskedRanks`

    @property
    def num_replicas(self) -> int:
        """Ranks that share the source."""
        number: int = self._ranks.now()[0]
        return number

    @property
    def rank(self) -> int:
        """Rank of this process."""
        rank: int = self._ranks.now()[1]
        return rank

    def shape_of(self, n: int, longest: int) -> tuple[int, int]:
        """Rows and padded length of a batch of n samples of up to a length.

        Raises:
            OptionError: none of the shapes has room for it.
        """
        return shape_of(self.shapes, n, longest)

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""

    @property
    def batches_left(self) -> int | None:
        """How many batches the next `iter()` reads; `None` where that is unknown in advance."""
        return None

    @abstractmethod
    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next `iter()` reads."""

    def check_ranks(self) -> None:  # noqa: B027  (a sampler finds out at each first `iter()`)
        """Raise a `RankError` where ranks plan otherwise; for loops that do not find out."""

    @abstractmethod
    def tracked(self, loader: Any) -> Iterator[Any]:
        """Begin a loop over a loader; after each batch, `state_dict` is the position after it."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved position."""


class IndexSource(ResumableSource):
    """A source that knows which samples each batch of an epoch has: see `predict`, `warm_up`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def batches_left(self) -> int:
        """How many batches the next `iter()` reads."""

    @abstractmethod
    def whole_pass(self) -> AbstractContextManager[object]:
        """Iterate over every sample inside, without a change for a loop around it."""

    @abstractmethod
    def tracked(self, loader: Any) -> Any:
        """Begin a loop over a loader, whose `last` has the `indices` of the batch that came."""

    @abstractmethod
    def check_dataset(self, dataset: Any, /) -> None:
        """Raise an `OptionError` where a data set has not one sample for each size."""

    @abstractmethod
    def extremes(self) -> dict[str, Any]:
        """Indices of the "largest", the "longest" and the "shortest" batch of the coming epoch."""

    @abstractmethod
    def batch_bytes(self, indices: Any, /) -> int:
        """Predicted bytes of a micro-batch of these samples."""
