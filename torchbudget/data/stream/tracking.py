"""Loops over a `DataLoader` whose workers stamp each batch with where they stand after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data._utils.pin_memory import pin_memory

from torchbudget.data.stream.cursor import StreamCursor, StreamState
from torchbudget.errors import OptionError, SampleError, StateError


@dataclass(frozen=True, slots=True)
class StampedBatch:
    """A batch on its way to the process that trains.

    Attributes:
        batch: of any type.
        worker: that read it.
        cursor: of the worker, after it.
    """

    batch: Any
    worker: int
    cursor: StreamCursor

    def pin_memory(self, device: Any = None) -> StampedBatch:
        """With a batch that is pinned as if it came alone."""
        return StampedBatch(pin_memory(self.batch, device), self.worker, self.cursor)


def collated(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """The batch that a user's function makes.

    Raises:
        SampleError: it raised `StopIteration`, which would be taken for the epoch's end.
    """
    try:
        return collate_fn(samples)
    except StopIteration as error:
        raise SampleError(
            f"collate_fn={collate_fn!r} raised StopIteration, which would end the epoch in "
            "silence: it called next() on an iterator that has no more"
        ) from error


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
            made = collated(self._collate_fn, batch.batch)
            return StampedBatch(made, batch.worker, batch.cursor)
        return collated(self._collate_fn, batch)


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
        began: where they begin.
        unknown: only they know that.

    Attributes:
        ended: whether the loop came to its end.
        closed: whether it is over, and was the last one until then.
    """

    def __init__(self, number: int, began: StreamState, *, unknown: bool) -> None:
        self.number = number
        self.ended = self.closed = False
        self._began, self._turn = began, began.turn
        self._cursors = list(began.cursors)
        self._unknown = set(range(len(began.cursors))) if unknown else set()

    @property
    def state(self) -> StreamState:
        """After the last batch that came.

        Raises:
            StateError: no batch has come from a worker that went on from a loop not tracked.
        """
        if self._unknown:
            raise StateError(
                f"no batch has come yet from workers {sorted(self._unknown)}, which went on where "
                "a loop that was not tracked had ended: track every loop, or save later"
            )
        return replace(self._began, cursors=self._cursors.copy(), turn=self._turn)

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
        epoch = stamped.cursor.epoch
        if epoch != self._began.epoch:
            raise StateError(
                f"worker {stamped.worker} reads epoch {epoch}, and this loop epoch "
                f"{self._began.epoch}: call set_epoch between loops, not within one"
            )
        self._cursors[stamped.worker] = stamped.cursor
        self._turn = (stamped.worker + 1) % len(self._cursors)
        self._unknown.discard(stamped.worker)
        return stamped.batch

    @property
    def finished(self) -> bool:
        """Whether the epoch's last batch came."""
        return self.ended or all(each.finished for each in self._cursors)


def check_loader(loader: Any, stream: Any) -> None:
    """Check that a loop over a loader can be tracked.

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


def check_not_collated_again(caller: FrameType) -> None:
    """Check that the fetcher of a `DataLoader` that iterates a stream leaves its batches alone.

    Raises:
        OptionError: the loader has a `batch_size`.
    """
    # Before Python 3.13 `f_locals` keeps a caller's values alive: a user's are not looked at.
    is_fetcher = caller.f_globals.get("__name__") == fetch.__name__
    if is_fetcher and caller.f_locals.get("auto_collation"):
        raise OptionError(
            "this stream yields whole batches, which the DataLoader would collate again: pass "
            "batch_size=None to the DataLoader"
        )
