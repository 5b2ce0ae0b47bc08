"""Loops over a stream's `DataLoader` whose position is known, and loops that ranks end together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np
from torch.utils.data import DataLoader

from torchbudget.data.run import Run
from torchbudget.data.same_on_ranks import check_same_samples
from torchbudget.data.size_check import SizeCheck
from torchbudget.data.stream.cursor import StreamState
from torchbudget.data.stream.position import StreamPosition
from torchbudget.data.stream.sending import Sending, Sent
from torchbudget.distributed import gathered, is_distributed
from torchbudget.errors import OptionError, StateError
from torchbudget.plan.plan import ALL_DROPPED
from torchbudget.plan.report import ReadBatches

_UNKNOWN: Final = np.array(np.nan)


class StreamRun(Run[StreamState]):
    """One loop over a loader of a stream, which `BudgetedIterableDataset.tracked` returns.

    Workers that persist are used again if they stand at the place where the loop begins. Else
    the loader gets new ones.

    Args:
        position: position of the stream.
        loader: a loader of the stream, with `batch_size=None`.
        read: counts the batches that come.

    Attributes:
        number: number of the run that has started its workers.
    """

    def __init__(
        self, position: StreamPosition, loader: DataLoader[Any], read: ReadBatches
    ) -> None:
        self._position, self._options, self._loader = position, position.options, loader
        self._read = read
        rules = self._options.rules
        self._check = None if rules is None else SizeCheck(rules, None)
        start, live = position.where(), getattr(loader, "_iterator", None)
        sending: Any = getattr(live, "_collate_fn", None)
        # Otherwise persistent workers are at other positions, or send none.
        if not isinstance(sending, Sending) or start is None or start is not sending.ended:
            loader._iterator = None
            first = 0 if start is None else start.turn
            sending = Sending(loader.collate_fn, position.progress.runs + 1, first)
        begins = position.begin_run(sending.number, max(loader.num_workers, 1))
        self._sending, self._start = sending, replace(begins, turn=sending.first)
        self.number: int = sending.number
        collate_fn, loader.collate_fn = loader.collate_fn, sending
        position.sending = sending
        try:
            super().__init__(position.runs, loader)
        except BaseException:
            self._note_end(broken_off=False)
            raise
        finally:
            loader.collate_fn, position.sending = collate_fn, None

    def _began(self) -> StreamState:
        return self._start

    def _take(self, came: Any) -> tuple[StreamState, Any]:
        if not isinstance(came, Sent):
            raise StateError(
                "a batch has no position: the stream's __iter__ must call super().__iter__() at "
                "once, not with the first batch, and yield its batches one by one"
            )
        options = self._options
        if self.last is self._first and options.window_ranks > 1:
            check_same_samples(options.ranks, came.worker, came.sizes)
        padded_size, number = came.planned
        batch, came.batch = came.batch, None  # nothing keeps it here while the next one is read
        if self._check is not None and padded_size is not None:
            self._check.compare(batch, padded_size, np.arange(number))
            self._read.shapes[(number, *padded_size)] += 1
            self._read.real += float(getattr(batch, "lengths", _UNKNOWN).sum())
        place = self.last.moved(came.worker, came.cursor)
        return place.following(options.batches_per_epoch), batch

    def _end(self) -> StreamState:
        place, options = self.last, self._options
        is_empty = place is self._start and place.is_beginning
        if is_empty and options.drop_last and options.window_ranks == options.num_replicas:
            raise OptionError(ALL_DROPPED.format("samples of the epoch"))
        if place.epoch == self._start.epoch:
            place = place.following(options.batches_per_epoch, ended=True)
        self._sending.ended = place
        return place

    def _move_to(self, place: StreamState) -> None:
        if self._position.runs is self._runs:
            self._position.stands_at(place)

    def _state(self, place: StreamState) -> dict[str, Any]:
        return place.to_plain(seeks=self._options.source.may_seek)

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
        self._note_end(broken_off=broken_off)

    def _note_end(self, *, broken_off: bool) -> None:
        if self._position.runs is self._runs:
            self._position.run_closed(broken_off=broken_off)

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
