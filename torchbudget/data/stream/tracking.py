"""Loops over a `DataLoader` whose workers stamp each batch with where they stand after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data._utils.pin_memory import pin_memory

from torchbudget.data.stream.cursor import StreamCursor
from torchbudget.errors import OptionError, SampleError, StateError

if TYPE_CHECKING:
    from torchbudget.data.stream.epoch_reader import EpochReader


@dataclass(slots=True)
class StampedBatch:
    """A batch on its way to the process that trains. Not frozen: one is made for each batch.

    Attributes:
        batch: of any type.
        worker: that read it.
        cursor: of the worker, after it.
        sizes: a digest of those in the worker's first window, where ranks share it.
    """

    batch: Any
    worker: int
    cursor: StreamCursor
    sizes: int | None

    def pin_memory(self, device: Any = None) -> StampedBatch:
        """With a batch that is pinned as if it came alone."""
        return replace(self, batch=pin_memory(self.batch, device))

    def take(self) -> Any:
        """The batch, which nothing keeps here while the next one is read."""
        batch, self.batch = self.batch, None
        return batch


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
    """A loader's `collate_fn` that sees the batch alone, and stamps what it has made.

    Args:
        collate_fn: of the loader.
    """

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn: Final = collate_fn
        self._reader: EpochReader | None = None  # of this process; `None`: the loop is not tracked
        self._begun = 0  # the number of the last tracked loop

    def begin(self, reader: EpochReader, running: int) -> bool:
        """Begin a loop: whether it is tracked. The first one is, in which the process was started.

        Args:
            reader: whose batches come.
            running: the number of the tracked loop that runs; below 0: it is over, and may have
                been broken off before it came here.
        """
        tracked = running > 0 or -running != self._begun
        self._reader, self._begun = reader if tracked else None, abs(running)
        return tracked

    def __call__(self, batch: Any) -> Any:
        """Collate it."""
        made, reader = collated(self._collate_fn, batch), self._reader
        if reader is None:
            return made
        return StampedBatch(made, reader.slot.worker, reader.cursor, reader.first_sizes)


def stamped(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin a loop over a loader of a stream whose `collate_fn` sees batches alone.

    A worker gets the stream and what collates at once: to its stream it is the same object.
    """
    stream: Any = loader.dataset
    collate_fn = loader.collate_fn
    loader.collate_fn = stream._beside = CollateBeside(collate_fn)
    try:
        return iter(loader)
    finally:
        loader.collate_fn, stream._beside = collate_fn, None


def run_of(batches: Any) -> object:
    """What is another one in each loop of an iterator that persists, as its workers do."""
    return getattr(batches, "_sampler_iter", None)


def check_alone(batches: Any, run: object) -> None:
    """Check that a loop goes on.

    Raises:
        StateError: another loop over the loader has begun, and takes the batches of this one.
    """
    if run_of(batches) is not run:
        raise StateError(
            "another loop over this loader, whose workers persist, began while a tracked one was "
            "open: end that one first, or give the other loop a loader of its own"
        )


def check_stamp(stamped: Any, epoch: int) -> None:
    """Check what came in a tracked loop.

    Raises:
        StateError: it has no position, or that of another epoch.
    """
    if not isinstance(stamped, StampedBatch):
        raise StateError(
            "a batch came without its position, from a worker that a loop had started that was not "
            "tracked: use tracked(loader) in every loop over workers that persist"
        )
    if stamped.cursor.epoch != epoch:
        raise StateError(
            f"worker {stamped.worker} reads epoch {stamped.cursor.epoch}, and this loop epoch "
            f"{epoch}: call set_epoch between loops, not within one"
        )


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


def check_caller(caller: FrameType) -> None:
    """Check that the fetcher of a `DataLoader` that iterates a stream leaves its batches alone.

    Raises:
        OptionError: the loader has a `batch_size`, and would collate them again.
    """
    # Before Python 3.13 `f_locals` keeps a caller's values alive: a user's are not looked at.
    is_fetcher = caller.f_globals.get("__name__") == fetch.__name__
    if is_fetcher and caller.f_locals.get("auto_collation"):
        raise OptionError(
            "this stream yields whole batches, which the DataLoader would collate again: pass "
            "batch_size=None to it"
        )
