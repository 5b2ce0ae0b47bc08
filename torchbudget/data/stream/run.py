"""Loops over a stream's `DataLoader` whose position is known, and loops that ranks end together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from torchbudget.data.run import Run
from torchbudget.data.same_on_ranks import check_same_samples
from torchbudget.data.size_check import SizeCheck
from torchbudget.data.stream.cursor import StreamCursor, StreamPart, StreamState
from torchbudget.data.stream.epoch_reader import EpochReader, collated
from torchbudget.distributed import gathered, is_distributed
from torchbudget.errors import OptionError, StateError
from torchbudget.plan.plan import ALL_DROPPED
from torchbudget.plan.report import ReadBatches

_UNKNOWN: Final = np.array(np.nan)

if TYPE_CHECKING:
    from torchbudget.data.stream.dataset import BudgetedIterableDataset


@dataclass(slots=True)
class Sent:
    """A batch on its way to the process that trains. Not frozen: one is made for each batch.

    Attributes:
        batch: the batch, of any type.
        worker: number of the worker that read it.
        cursor: cursor of the worker after it.
        planned: its padded size and its number of samples; a size of `None` was not planned.
        sizes: a digest of the sizes in the worker's first window, if ranks share it.
    """

    batch: Any
    worker: int
    cursor: StreamCursor
    planned: tuple[list[int] | None, int]
    sizes: int | None

    def pin_memory(self, device: Any = None) -> Sent:
        """Return it with its batch pinned."""
        return replace(self, batch=pin_memory(self.batch, device))


class Sending:
    """A loader's `collate_fn` that sees the batch alone, and sends the place after it beside it.

    Args:
        collate_fn: `collate_fn` of the loader.
        number: number of the run that starts the processes with it.

    Attributes:
        number: number of that run.
        has_begun: a loop has begun in this process.
        first: the number of the worker that the loader's first process reads for.
        ended: the state at the end of the last run over these workers, if it came to its end.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], number: int) -> None:
        self._collate_fn: Final = collate_fn
        self._reader: EpochReader | None = None  # of this process; `None`: the loop is not tracked
        self._part: StreamPart | None = None  # that was sent last
        self.has_begun = False
        self.number, self.first = number, 0
        self.ended: StreamState | None = None

    def is_tracked(self, run: int) -> bool:
        """True in the loop that has started this process, and later while the run is open."""
        first, self.has_begun = not self.has_begun, True
        return first or run == self.number

    def send(self, reader: EpochReader | None) -> None:
        """Send the places of a reader; `None`: send batches alone."""
        self._reader, self._part = reader, None

    def __call__(self, batch: Any) -> Any:
        """Collate it."""
        made, reader = collated(self._collate_fn, batch), self._reader
        if reader is None:
            return made
        at, cursor, part = reader.standing, reader.standing.cursor, self._part
        self._part = cursor.part
        if part is cursor.part:  # a part is sent once
            cursor = cursor._replace(part=None)
        return Sent(made, at.slot.worker, cursor, reader.planned, reader.windows.first_sizes)


class StreamRun(Run[StreamState]):
    """One loop over a loader of a stream, which `BudgetedIterableDataset.tracked` returns.

    Workers that persist are used again if they stand at the place where the loop begins. Else
    the loader gets new ones.

    Args:
        stream: the stream.
        loader: a loader of the stream, with `batch_size=None`.

    Attributes:
        number: number of the run that has started its workers.
    """

    def __init__(self, stream: BudgetedIterableDataset, loader: DataLoader[Any]) -> None:
        self._stream, self._loader = stream, loader
        self._check = None if stream._rules is None else SizeCheck(stream._rules, None)
        self._read = stream._read = ReadBatches()
        start, live = stream._where(), getattr(loader, "_iterator", None)
        sending: Any = getattr(live, "_collate_fn", None)
        # Otherwise persistent workers are at other positions, or send none.
        if not isinstance(sending, Sending) or start is None or start is not sending.ended:
            loader._iterator = None
            sending = Sending(loader.collate_fn, stream._progress.runs + 1)
            sending.first = 0 if start is None else start.turn
        begins = stream._begin_run(sending.number, max(loader.num_workers, 1))
        self._sending, self._start = sending, replace(begins, turn=sending.first)
        self.number: int = sending.number
        collate_fn, loader.collate_fn = loader.collate_fn, sending
        stream._sending = sending
        try:
            super().__init__(stream, loader)
        except BaseException:
            stream._run_closed(self, broken_off=False)
            raise
        finally:
            loader.collate_fn, stream._sending = collate_fn, None

    def _began(self) -> StreamState:
        return self._start

    def _take(self, came: Any) -> tuple[StreamState, Any]:
        if not isinstance(came, Sent):
            raise StateError(
                "a batch has no position: the stream's __iter__ must call super().__iter__() at "
                "once, not with the first batch, and yield its batches one by one"
            )
        if self.last is self._first and self._stream._window_ranks > 1:
            check_same_samples(self._stream._ranks, came.worker, came.sizes)
        padded_size, number = came.planned
        batch, came.batch = came.batch, None  # nothing keeps it here while the next one is read
        if self._check is not None and padded_size is not None:
            self._check.compare(batch, padded_size, np.arange(number))
            self._read.shapes[(number, *padded_size)] += 1
            self._read.real += float(getattr(batch, "lengths", _UNKNOWN).sum())
        place = self.last.moved(came.worker, came.cursor)
        return place.following(self._stream._batches_per_epoch), batch

    def _end(self) -> StreamState:
        place, stream = self.last, self._stream
        is_empty = place is self._start and place.is_beginning
        if is_empty and stream._drop_last and stream._window_ranks == stream.num_replicas:
            raise OptionError(ALL_DROPPED.format("samples of the epoch"))
        if place.epoch == self._start.epoch:
            place = place.following(self._stream._batches_per_epoch, ended=True)
        self._sending.ended = place
        return place

    def _state(self, place: StreamState) -> dict[str, Any]:
        return place.to_plain(seeks=self._stream._source.may_seek)

    def close(self) -> None:
        """End the run at its position; persistent workers end if it was left early."""
        live = self._batches
        if live is None:
            return
        broken_off = self._sending.ended is not self.last
        is_last = getattr(live, "_sampler_iter", None) is self._restarts
        if broken_off and is_last and self._loader._iterator is live:
            self._loader._iterator = None
        del live
        super().close()
        self._stream._run_closed(self, broken_off=broken_off)

    def __del__(self) -> None:
        self._batches = getattr(self, "_batches", None)
        self.close()


def stop_together(loader: Any, *, group: Any = None) -> Iterator[Any]:
    """Yield the batches of a loader until any rank has none left; then all ranks stop.

    It runs a small collective for each batch, on the host over gloo, and does not wait for the
    device. The remaining batches of other ranks are not read.

    Args:
        loader: the loader of this rank, or a tracked loop over it.
        group: process group. Default: all, if `torch.distributed` is initialized.
    """
    batches = iter(loader)
    while True:
        given = [*islice(batches, 1)]
        have = gathered(bool(given), group) if is_distributed() else [bool(given)]
        if not all(have):
            return
        yield given.pop()  # nothing keeps it here while the next one is made
