"""A loader whose position after any of the last batches can be saved, for loops that run ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

from torch.utils.data import DataLoader

from torchbudget.distributed import gathered, is_distributed, ranks_of
from torchbudget.errors import OptionError, StateError
from torchbudget.protocols import DealsToRanks, ResumableSource, Stateful

Position: TypeAlias = dict[str, Any]

_KEPT: Final = 3  # positions: that of the batch that is trained on, one read ahead, and one more


class PositionedLoader:
    """The batches of a `DataLoader`, and where its sampler or stream stands after each of them.

    A loop begins with its first batch, not with `iter()`, since frameworks call that before they
    choose the epoch, or to see whether a loader can be iterated.

    Args:
        loader: over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`; a
            `StatefulDataLoader` keeps its own position.

    Attributes:
        loader: as given.
        source: its sampler or stream.

    Raises:
        OptionError: it is another loader.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.source = source_of(loader)
        self._stateful = loader if isinstance(loader, Stateful) else None
        self._epoch: int | None = None  # of the loop that is open
        self._before = 0  # batches of the epoch that came before a position that was loaded
        self._positions: deque[tuple[int, Position]] = deque(maxlen=_KEPT)

    def __iter__(self) -> Iterator[Any]:
        """Yield the epoch's batches, from the position that was loaded on."""
        epoch, done = self.source.epoch, self._before
        positions = self._positions = deque([(done, self._now(epoch, done))], _KEPT)
        self._epoch, self._before = epoch, 0
        if self._stateful is not None:
            self.source.check_ranks()
        batches = self.source.tracked(self.loader) if self._stateful is None else self.loader
        for batch in batches:
            done += 1
            positions.append((done, self._now(epoch, done)))
            yield batch
        positions.append((done, self._now(epoch, done, ended=True)))
        if self._positions is positions:
            self._epoch = None

    @property
    def sampler(self) -> PositionedLoader:
        """Itself: frameworks call `loader.sampler.set_epoch`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next loop; one that is open, of this epoch, goes on."""
        if epoch != self._epoch:
            self._epoch = None
            self._positions.clear()
            if epoch != self.source.epoch:
                self._before = 0
            self.source.set_epoch(epoch)

    def position(self, batches: int | None = None) -> Position:
        """Where the loader stands.

        Args:
            batches: of the epoch that are done; default: all that came.

        Raises:
            StateError: more were read ahead than positions are kept; or another loop over the same
                sampler began.
        """
        if not self._positions:
            return self.position_of_source()
        for done, position in reversed(self._positions):
            if batches is None or done <= batches:
                return position
        raise StateError(
            f"{batches} batches are done, and {self._positions[-1][0]} were read ahead of them: "
            f"only the last {_KEPT} positions are kept"
        )

    def position_of_source(self) -> Position:
        """Where the sampler or stream stands between loops."""
        return self._now(self.source.epoch, self._before)

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Begin the next loop at a position.

        Raises:
            StateError: it is malformed.
            StateMismatchError: it belongs to another data set or order.
        """
        try:
            epoch, batches, state = position["epoch"], position["batches"], position["state"]
        except (KeyError, TypeError) as error:
            raise StateError(f"not a loader's position: {position!r}") from error
        self._epoch = None
        self._positions.clear()
        self.source.set_epoch(epoch)
        self._before = batches
        for name, of_part in state.items():
            part: Any = self.loader if name == "loader" else self.source
            part.load_state_dict(of_part)

    def _now(self, epoch: int, batches: int, *, ended: bool = False) -> Position:
        """The position, under the name of what has it, and the epoch that it is in."""
        if self._stateful is None:
            state = self.source.state_dict()
            done = batches if state["epoch"] == epoch else 0
            return {"epoch": state["epoch"], "batches": done, "state": {"source": state}}
        if ended or not batches:  # its own state would begin with the epoch that is over
            return {"epoch": epoch + ended, "batches": 0, "state": {}}
        state = {"loader": self._stateful.state_dict()}
        return {"epoch": epoch, "batches": batches, "state": state}


def find_source(loader: Any) -> ResumableSource | None:
    """The sampler or the stream of a loader, if it has one."""
    for name in ("batch_sampler", "dataset"):
        source = getattr(loader, name, None)
        if isinstance(source, ResumableSource):
            return source
    return None


def source_of(loader: Any) -> ResumableSource:
    """The sampler or the stream of a loader.

    Raises:
        OptionError: it has none.
    """
    source = find_source(loader)
    if source is None:
        raise OptionError(
            "this needs a DataLoader whose batch_sampler is a MemoryBudgetBatchSampler or whose "
            f"data set is a BudgetedIterableDataset, got {type(loader).__name__}"
        )
    return source


def check_dealt(loader: Any, *, num_replicas: int, rank: int) -> None:
    """Raise an `OptionError` unless the source deals as the framework shares out its processes.

    Processes of one model, under tensor, context or sequence parallelism, take the same batches.

    Args:
        loader: see `source_of`.
        num_replicas: the framework's groups of processes that take batches of their own.
        rank: of this process's group.
    """
    source = source_of(loader)
    if not isinstance(source, DealsToRanks):
        return
    if (source.num_replicas, source.rank) != (num_replicas, rank):
        raise OptionError(
            f"the {type(source).__name__} has the batches of rank {source.rank} of "
            f"{source.num_replicas}, and to the framework this process is rank {rank} of "
            f"{num_replicas} that take batches of their own: pass "
            f"num_replicas={num_replicas}, rank={rank}"
        )


def of_each_rank(position: Position) -> list[Position]:
    """The positions of all ranks; a collective."""
    return gathered(position) if is_distributed() else [position]


def of_this_rank(positions: list[Position]) -> Position:
    """Its own; where there are more ranks than saved them, ranks share one.

    Raises:
        StateError: there are none.
    """
    if not positions:
        raise StateError("the checkpoint has no position of any rank")
    return positions[ranks_of(None, None)[1] % len(positions)]
