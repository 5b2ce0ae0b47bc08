"""Loops over a `DataLoader` whose workers stamp each batch with where they stand after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from torchbudget.data.stream.cursor import Stamp, StreamCursor
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.errors import OptionError, StateError


class StampedBatch:
    """A batch on its way to the process that trains.

    Args:
        batch: of any type.
        worker: that read it.
        stamp: the worker's cursor after it.
    """

    __slots__ = ("batch", "stamp", "worker")

    def __init__(self, batch: Any, worker: int, stamp: Stamp) -> None:
        self.batch = batch
        self.worker = worker
        self.stamp = stamp

    def __reduce__(self) -> tuple[Any, ...]:
        return StampedBatch, (self.batch, self.worker, self.stamp)

    def pin_memory(self, device: Any = None) -> StampedBatch:
        """With a batch that is pinned as if it came alone."""
        return StampedBatch(pin_memory(self.batch, device), self.worker, self.stamp)


class CollateBeside:
    """A loader's `collate_fn` that sees the batch alone.

    Args:
        collate_fn: of the loader.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn: Final = collate_fn

    def __call__(self, batch: Any) -> Any:
        """Collate what was stamped, and what was not."""
        if isinstance(batch, StampedBatch):
            return StampedBatch(self._collate_fn(batch.batch), batch.worker, batch.stamp)
        return self._collate_fn(batch)


def stamped_batches(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin a loop over a loader whose `collate_fn` sees batches alone."""
    collate_fn = loader.collate_fn
    loader.collate_fn = CollateBeside(collate_fn)
    try:
        return iter(loader)
    finally:
        loader.collate_fn = collate_fn


class TrackedLoop:
    """Where the workers of a loader stand after the batches that came in one loop.

    It does not keep the loop's own iterator, so that workers end with that one.

    Args:
        number: of the loop.
        slots: of its workers, by number.
        began: where each of them begins.
        turn: the worker whose batch comes first.

    Attributes:
        turn: the worker whose batch comes next.
        ended: whether the loop came to its end.
    """

    def __init__(
        self, number: int, slots: Sequence[WorkerSlot], began: Sequence[StreamCursor], turn: int
    ) -> None:
        self.number = number
        self.slots = slots
        self.turn = turn
        self.ended = False
        self._began = began
        self._stamps: dict[int, Stamp] = {}

    def note(self, stamped: Any) -> Any:
        """A batch came: the batch alone.

        Raises:
            StateError: it came without a position.
        """
        if not isinstance(stamped, StampedBatch):
            raise StateError(
                "this batch came without its position: its worker was started by a loop that was "
                "not tracked; use tracked(loader) in every loop over workers that persist"
            )
        self._stamps[stamped.worker] = stamped.stamp
        self.turn = (stamped.worker + 1) % len(self.slots)
        return stamped.batch

    @property
    def finished(self) -> bool:
        """Whether the epoch's last batch came."""
        return self.ended or all(cursor.finished for cursor in self.cursors)

    @property
    def cursors(self) -> list[StreamCursor]:
        """Of each worker, after its last batch that came."""
        return [
            StreamCursor.of_stamp(self._stamps[worker]) if worker in self._stamps else began
            for worker, began in enumerate(self._began)
        ]


def check_loader(loader: Any, stream: Any) -> None:
    """Whether a loop over a loader can be tracked.

    Raises:
        OptionError: it reads something else, or has a state of its own.
        StateError: its workers live already.
    """
    if getattr(loader, "dataset", None) is not stream or loader.batch_size is not None:
        raise OptionError(
            "tracked needs a DataLoader of this stream, with batch_size=None, got "
            f"{type(loader).__name__}"
        )
    if hasattr(loader, "state_dict"):
        raise OptionError(
            f"a {type(loader).__name__} saves its position itself: loop over it, and call its "
            "state_dict()"
        )
    workers = getattr(loader, "_iterator", None)  # of a loader whose workers persist
    if workers is not None and not isinstance(getattr(workers, "_collate_fn", None), CollateBeside):
        raise StateError(
            "the workers of this loader were started by a loop that was not tracked: use "
            "tracked(loader) from its first loop on"
        )
