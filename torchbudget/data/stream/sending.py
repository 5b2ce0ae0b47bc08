"""Batches on their way from a worker to the loop that trains, each with the place after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from torch.utils.data._utils.pin_memory import pin_memory

from torchbudget.data.stream.cursor import StreamCursor, StreamPart, StreamState
from torchbudget.errors import SampleError

# The padded size of a batch (`None`: none was planned), and its number of samples.
Planned: TypeAlias = tuple[list[int] | None, int]


@dataclass(slots=True)
class Sent:
    """A batch on its way to the process that trains. Not frozen: one is made for each batch.

    Attributes:
        batch: the batch, of any type.
        worker: number of the worker that read it.
        cursor: cursor of the worker after it.
        planned: its padded size and its number of samples.
        sizes: a digest of the sizes in the worker's first window, if ranks share it.
    """

    batch: Any
    worker: int
    cursor: StreamCursor
    planned: Planned
    sizes: int | None

    def pin_memory(self) -> Sent:
        """Return it with its batch pinned."""
        return replace(self, batch=pin_memory(self.batch))


class Sending:
    """A loader's `collate_fn` that sees the batch alone, and sends the place after it beside it.

    Each worker has a copy of it.

    Args:
        collate_fn: `collate_fn` of the loader.
        number: number of the run that starts the processes with it.
        first: the number of the worker that the loader's first process reads for.

    Attributes:
        number: number of that run.
        first: see above.
        has_begun: a loop has begun in this process.
        after: what `Sent` says beside the last batch of the process; `None`: its loop is not
            tracked.
        ended: the state at the end of the last run over these workers, if it came to its end.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], number: int, first: int) -> None:
        self._collate_fn: Final = collate_fn
        self._part: StreamPart | None = None  # that was sent last
        self.number, self.first, self.has_begun = number, first, False
        self.after: tuple[int, StreamCursor, Planned, int | None] | None = None
        self.ended: StreamState | None = None

    def __call__(self, batch: Any) -> Any:
        """Collate it."""
        made = collated(self._collate_fn, batch)
        if self.after is None:
            return made
        worker, cursor, planned, sizes = self.after
        part, self._part = self._part, cursor.part
        if part is cursor.part:  # a part is sent once
            cursor = cursor._replace(part=None)
        return Sent(made, worker, cursor, planned, sizes)


def collated(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Return the batch that a user's function makes.

    Raises:
        SampleError: it raised `StopIteration`, which would be taken for the epoch's end.
    """
    try:
        return collate_fn(samples)
    except StopIteration as error:
        raise SampleError(
            f"collate_fn={collate_fn!r} raised StopIteration, which would end the epoch without an "
            "error: in it, call next(iterator, None)"
        ) from error


def raising(error: Exception) -> Iterator[Any]:
    """Return an iterator that raises at its first batch."""
    yield from ()
    raise error
