"""The loader that a framework iterates, and the positions of all ranks in its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from torchbudget.distributed import Ranks
from torchbudget.errors import OptionError
from torchbudget.train.loop import read_as_plain, source_of

T = TypeVar("T")


class HostedLoader:
    """The batches of a `DataLoader` in a framework's loop, which may read ahead.

    A loop begins with its first batch, not with `iter()`: frameworks call that before they choose
    the epoch, or to see whether a loader can be iterated. A loop that is broken off starts over,
    unless another epoch was chosen.

    Args:
        loader: over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`. A
            `StatefulDataLoader` is read as a `DataLoader` of the same settings.
        num_replicas: the framework's groups of processes that take batches of their own. Processes
            of one model, under tensor, context or sequence parallelism, take the same batches.
        rank: of this process's group.

    Attributes:
        loader: a `DataLoader`.
        source: its sampler or stream.
        run: the present loop, or the last one; `None` after another position was chosen.
        reads: the epoch that an open loop reads.

    Raises:
        OptionError: it is another loader, or its source deals to other ranks.
    """

    def __init__(self, loader: DataLoader[Any], *, num_replicas: int, rank: int) -> None:
        source = source_of(loader)
        if source is None:
            raise OptionError(
                "this needs a DataLoader whose batch_sampler is a MemoryBudgetBatchSampler or "
                f"whose data set is a BudgetedIterableDataset, got {type(loader).__name__}"
            )
        if (source.num_replicas, source.rank) != (num_replicas, rank):
            raise OptionError(
                f"the {type(source).__name__} plans for rank {source.rank} of "
                f"{source.num_replicas}, but to the framework this process is rank {rank} of "
                f"{num_replicas} with batches of their own: pass num_replicas={num_replicas}, "
                f"rank={rank}"
            )
        self.source = source
        self.loader: DataLoader[Any] = read_as_plain(loader)
        self.run: Any = None
        self.reads: int | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches, from the position that was loaded on."""
        self.run = run = self.source.tracked(self.loader)
        self.reads = self.source.epoch
        try:
            yield from run
            if self.run is run:
                self.reads = None
        finally:
            if self.run is run and self.reads is not None:
                run.start_over()

    def choose(self, epoch: int) -> None:
        """Choose the epoch of the next loop."""
        for run in {*self.source._runs} - {self.run}:  # of a loop that another host has left open
            run.start_over()
        self.run = self.reads = None
        self.source.set_epoch(epoch)

    def position(self, back: int = 0) -> dict[str, Any]:
        """Return the position after the last batch that came, or `back` batches before it."""
        return dict(self.source.state_dict() if self.run is None else self.run.position(back))

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Begin the next loop at a position.

        Raises:
            StateError: it is malformed.
            StateMismatchError: it belongs to another data set or order.
        """
        self.run = self.reads = None
        self.source.load_state_dict(position)


def of_this_rank(positions: Sequence[T]) -> T:
    """Return this rank's position; where there are more ranks than saved them, ranks share one."""
    return positions[Ranks().rank % len(positions)]
