"""`BudgetedIterableDataset`: micro-batches that fit the budget, of data without an index."""

from __future__ import annotations

import os
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Final

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchbudget.budget import MemoryBudget
from torchbudget.checks import check_flags, natural
from torchbudget.cost.models.protocol import CostModel
from torchbudget.data.collate.pad_collate import PadCollate
from torchbudget.data.sizes.key import SizeKey
from torchbudget.data.stream.cursor import StreamCursor, check_dealing
from torchbudget.data.stream.epoch_reader import EpochReader
from torchbudget.data.stream.progress import Progress, check_workers
from torchbudget.data.stream.settings import (
    Settings,
    ShouldAdd,
    grouping_of,
    reading,
    sharing_ranks,
    window_of,
)
from torchbudget.data.stream.slot import Split, WorkerSlot
from torchbudget.data.stream.source import Source
from torchbudget.data.stream.tracking import TrackedLoop, check_loader, stamped_batches
from torchbudget.data.stream.transforms import Transform
from torchbudget.distributed import ranks_of
from torchbudget.errors import (
    DiscardedStateWarning,
    OptionError,
    RepeatedSamplesWarning,
    StateError,
    StateMismatchError,
)
from torchbudget.plan.oversize import Oversize
from torchbudget.protocols import ResumableSource
from torchbudget.units import parse_bytes

_HOST_SHARE: Final = 4  # a quarter of the host's bytes is for samples that wait


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSamples:
    """Samples that are in no micro-batch, over all workers of this rank, since `set_epoch`.

    Attributes:
        oversize: alone over the budget, with `oversize="skip"`.
        failed: their transform or size raised, with `on_error="skip"`.
    """

    oversize: int
    failed: int


class BudgetedIterableDataset(IterableDataset[Any], ResumableSource):
    """Batches of a stream of ragged samples that fit a budget of bytes and fill it.

    Windows of consecutive samples are read, sorted by size and cut into micro-batches, each the
    longest run whose predicted cost is within the budget. The stream yields whole batches: pass it
    to a `DataLoader` with `batch_size=None`, and any number of workers.

    Every sample comes exactly once an epoch, over all ranks and workers, and every rank has the
    same number of batches. `split` names how the processes share the source:

    - `"none"`: all workers of all ranks read the whole source. The windows go to the workers in
      turn, and the micro-batches of a window are dealt to the ranks. A worker transforms the
      samples of its own windows only. The default for an iterable, and for a map-style data set,
      which is shuffled as a whole, and of which each worker reads its own samples only.
    - `"workers"`: each worker reads its own part, the same on every rank, and the micro-batches of
      its windows are dealt to the ranks. The default for a list of shards, and for a source that
      splits itself by worker (a streaming `datasets` dataset).
    - `"ranks"`: each worker of each rank reads its own part. The number of batches per rank is
      unknown in advance: with several ranks, give `batches_per_epoch`, or `uneven=True` if the loop
      ends all ranks together, by `stop_together` or by `GradAccumulator.flush`. The default for a
      function, a webdataset pipeline, a Ray Data iterator, and a `datasets` dataset split by node.

    Args:
        source: an iterable that can be iterated again (an `IterableDataset`, a file reader); a
            map-style data set whose sizes are unknown until its samples are read; a function
            `(shard, num_shards)` that returns an iterator; or a list of shards, each an iterable or
            a function without arguments that returns one.
        cost: bytes of a micro-batch, such as `PaddedCost`; or a predicate
            `should_add(batch, sample)`, of a list of at least one sample and the next one.
        budget: a `MemoryBudget`, or the device's bytes; with a predicate it may be `None`.
        size: what makes a sample ragged: a field, several, or a function of the sample, as in
            `sizes_of`. With a predicate, what windows are sorted by, if it is given.
        transforms: of each sample, before its size is taken: see `torchbudget.transforms`.
        threads: that apply the transforms in each worker; 0: the worker itself does.
        window: samples that are read, sorted and cut together, over all ranks that share them.
            Default: 4,096 for each of them. A larger one pads less.
        look_ahead: bytes of the samples that wait for their micro-batch in a worker; a window of
            more is cut in parts. Not counted: the sample that overflowed, two per thread, one
            prefetched per rank and, with several ranks, the last micro-batch. Default: a quarter of
            the budget's `host`, divided among the workers; without one, no limit.
        shuffle: shards, and the micro-batches of a window. Otherwise they come longest first.
        seed: of all randomness, which is a function of (seed, epoch, shard, place within it).
        drop_last: drop the last micro-batch that could still have taken a sample, in each part.
        batches_per_epoch: batches on each rank; a source that ends earlier starts over.
        uneven: ranks may have unequal numbers of batches.
        collate_fn: makes a batch of a list of samples. Default: `PadCollate` with the same
            `size_multiple`.
        max_batch_size: as in `MemoryBudgetBatchSampler`.
        batch_size_multiple: likewise.
        size_multiple: likewise.
        oversize: what becomes of a sample that alone is over the budget: `"raise"`, `"skip"`
            (counted in `skipped_samples`, logged) or `"alone"`.
        on_error: what becomes of a sample whose transform or size raises: `"raise"` an error that
            names it, or `"skip"` it (counted, logged once). A source that raises ends the epoch.
        split: how the processes share the source; see above.
        num_replicas: ranks. Default: those of `torch.distributed` where it is initialized, else 1.
        rank: of this process.

    Raises:
        OptionError: an option, or a pair of options, that cannot hold.
        BudgetError: the budget does not limit the device, or not the host where it must.

    While it is iterated:

    Raises:
        SampleError: a sample cannot be read or transformed.
        OversizeError: a sample alone is over the budget and `oversize="raise"`.
        UnevenRanksError: the remaining samples cannot be dealt evenly to the ranks.

    The epoch is that of `set_epoch`, which reaches persistent workers too.

    >>> texts = [["a", "bcd", "ef"], ["ghijk"]]  # two shards
    >>> stream = BudgetedIterableDataset(
    ...     texts, PaddedCost(unit_bytes=1), 6, size=len, collate_fn=list, shuffle=False)
    >>> list(stream)
    [['ghijk'], ['bcd', 'ef'], ['a']]
    """

    def __init__(
        self,
        source: Any,
        cost: CostModel | ShouldAdd,
        budget: MemoryBudget | int | str | None,
        *,
        size: SizeKey = None,
        transforms: Sequence[Transform] = (),
        threads: int = 0,
        window: int | None = None,
        look_ahead: int | str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batches_per_epoch: int | None = None,
        uneven: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_batch_size: int | None = None,
        batch_size_multiple: int = 1,
        size_multiple: int = 1,
        oversize: Oversize = "raise",
        on_error: str = "raise",
        split: Split | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        check_flags(uneven=uneven)
        self.num_replicas, self.rank = ranks_of(num_replicas, rank)
        self.budget = None if budget is None else MemoryBudget.of(budget)
        self.look_ahead = None if look_ahead is None else parse_bytes(look_ahead)
        self.size_multiple = size_multiple
        checked = Source.of(source, split, shuffle=shuffle, seed=natural("seed", seed))
        known = uneven or batches_per_epoch is not None
        ranks = sharing_ranks(checked.split, self.num_replicas, known=known)
        grouping, rules = grouping_of(
            cost,
            self.budget,
            ranks,
            oversize,
            size_multiple=size_multiple,
            max_batch_size=max_batch_size,
            batch_size_multiple=batch_size_multiple,
        )
        self._settings = Settings(
            source=checked,
            transforms=(*reading(checked), *transforms),
            threads=threads,
            grouping=grouping,
            size=size,
            sized=isinstance(cost, CostModel) or size is not None,
            window=window_of(window, ranks),
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            on_error=on_error,
            batches_per_epoch=batches_per_epoch,
            collate_fn=collate_fn or PadCollate(size_multiple=size_multiple),
            rules=rules,
        )
        self._progress = Progress()
        self._changes = 0  # of the epoch or the state, as far as this copy knows them
        self._state: Mapping[str, Any] | None = None
        self._reader: EpochReader | None = None  # the last one of this process
        self._process = os.getpid()
        self._tracked: TrackedLoop | None = None  # the last one
        self._readers: weakref.WeakSet[EpochReader] = weakref.WeakSet()

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()`, in every worker, read this epoch from its beginning.

        If that is the next epoch anyway, a loaded position stays, and with `batches_per_epoch` the
        source goes on where the last epoch ended.
        """
        reader = self._reader
        if natural("epoch", epoch) != self.epoch:
            unused = reader is None and not self._progress.last_loop
            if unused and _is_within(self._loaded(self.epoch)):
                warnings.warn(
                    f"set_epoch({epoch}) discards the position that was loaded in epoch "
                    f"{self.epoch}; go on in that epoch, or do not load the state",
                    DiscardedStateWarning,
                    stacklevel=2,
                )
            self._begin_at(epoch, None)
        elif reader is not None and reader.cursor.epoch == epoch:
            self._reader = self._new_reader(reader.slot, reader.began)
        self._tracked = None
        self._progress.note_loop(in_worker=False)
        self._progress.forget_skipped()

    def _begin_at(self, epoch: int, state: Mapping[str, Any] | None) -> None:
        """Make all processes begin the epoch, or at the state."""
        self._state, self._reader, self._tracked = state, None, None
        if get_worker_info() is None:
            self._changes = self._progress.change(epoch, loaded=state is not None)
        else:  # of a StatefulDataLoader: each of its workers has a state of its own
            self._progress.begin(epoch)

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """Read the epoch from its beginning, or from the loaded position."""
        if sys._getframe(1).f_locals.get("auto_collation"):  # the fetcher of a DataLoader
            raise OptionError(
                "this stream yields whole batches, which the DataLoader would collate again: pass "
                "batch_size=None to the DataLoader"
            )
        info = get_worker_info()
        if info is None:
            return self._begin_loop(0, 1)
        try:
            return self._begin_loop(info.id, info.num_workers)
        except Exception as error:  # noqa: BLE001
            # A worker that persists dies of what `iter` raises, and passes on what `next` does.
            return _raising(error)

    def _begin_loop(self, number: int, workers: int) -> Iterator[Any]:
        check_workers(workers)
        self._heed_other_processes()
        epoch = self.epoch
        reader = self._reader
        if reader is not None and reader.cursor.finished and reader.cursor.epoch == epoch - 1:
            if self._settings.batches_per_epoch is None:
                reader = None
            else:
                reader.go_on(self._following(reader.cursor, reader.slot))
        elif reader is not None and reader.cursor.epoch == epoch:
            reader = self._new_reader(reader.slot, reader.began)
        else:
            reader = None
        if reader is None:
            slot = self._slot(number, workers, epoch)
            reader = self.reader_of(slot)
        self._progress.begin(epoch)
        self._progress.note_loop(in_worker=get_worker_info() is not None)
        reader.stamps = bool(self._progress.tracked)
        self._reader = reader
        self._readers.add(reader)
        return reader

    def _heed_other_processes(self) -> None:
        """Follow what another process has chosen since this copy of the stream was made.

        Raises:
            StateError: it loaded a state, which this one does not have.
        """
        if self._process != os.getpid():  # of the process from which this one was forked
            self._reader, self._process = None, os.getpid()
        if self._changes != self._progress.changes:
            if self._progress.was_loaded:
                raise StateError(
                    "these workers persist, and a state was loaded after they started: load it "
                    "before the first loop over the DataLoader"
                )
            self._state, self._reader = None, None
            self._changes = self._progress.changes

    def _loaded(self, epoch: int) -> Mapping[str, Any] | None:
        """The state at which this epoch begins, if one was loaded."""
        state = self._state
        return state if state is not None and state["epoch"] == epoch else None

    def _slot(self, number: int, workers: int, epoch: int) -> WorkerSlot:
        """Whose part of the source the worker of that number reads.

        A loader takes from its first worker first, so that one reads for the worker whose turn it
        was.
        """
        worker = (number + self._turn(epoch)) % workers
        return WorkerSlot(worker=worker, workers=workers, rank=self.rank, ranks=self.num_replicas)

    def _turn(self, epoch: int) -> int:
        state = self._loaded(epoch)
        return 0 if state is None else int(state["turn"])

    def _beginning(self, slot: WorkerSlot, epoch: int) -> StreamCursor:
        """Where a process begins the epoch.

        Raises:
            StateMismatchError: it cannot go on from the state that was loaded.
        """
        settings, state = self._settings, self._loaded(epoch)
        batches = slot.share(settings.batches_per_epoch)
        if state is None:
            if batches is not None and self._progress.was_read(epoch - 1, slot.worker):
                warnings.warn(
                    f"epoch {epoch} starts over at the source's beginning, since workers that have "
                    "just started do not know where the last epoch ended: use "
                    "persistent_workers=True, or loop over stream.tracked(loader)",
                    RepeatedSamplesWarning,
                    stacklevel=3,
                )
            return StreamCursor.beginning(epoch, batches)
        states = state["workers"]
        if len(states) > 1 and len(states) != slot.workers:
            raise StateMismatchError(
                f"the state is that of {len(states)} workers, here are {slot.workers}; it goes on "
                f"with num_workers={len(states)}"
            )
        mine = states[slot.worker if len(states) > 1 else 0]
        cursor = StreamCursor.of_plain(mine, settings.order)
        check_dealing(cursor, mine["dealing"], settings.dealing(slot, self._look_ahead(slot)))
        if cursor.to_come is not None and mine["dealing"]["workers"] != slot.workers:
            return replace(cursor, to_come=slot.share(cursor.to_come))
        return cursor

    def _look_ahead(self, slot: WorkerSlot) -> int | None:
        if self.look_ahead is None and self.budget is not None and self.budget.host is not None:
            return max(self.budget.host // _HOST_SHARE // slot.workers, 1)
        return self.look_ahead

    def reader_of(self, slot: WorkerSlot) -> EpochReader:
        """What one process reads of the present epoch.

        Raises:
            StateMismatchError: it cannot go on from the state that was loaded.
        """
        return self._new_reader(slot, self._beginning(slot, self.epoch))

    def _new_reader(self, slot: WorkerSlot, cursor: StreamCursor) -> EpochReader:
        return EpochReader(
            self._settings,
            slot,
            cursor,
            look_ahead=self._look_ahead(slot),
            count_skipped=partial(self._progress.count_skipped, slot.worker),
            when_finished=self._end_epoch,
        )

    def _end_epoch(self, reader: EpochReader) -> None:
        self._progress.end(reader.cursor.epoch, reader.slot.worker, reader.slot.workers)

    def __len__(self) -> int:
        """Batches of an epoch on this rank.

        Raises:
            TypeError: it is known with `batches_per_epoch` only.
        """
        batches = self._settings.batches_per_epoch
        if batches is None:
            raise TypeError("the length of a stream is known with batches_per_epoch only")
        return batches

    @property
    def skipped_samples(self) -> SkippedSamples:
        """How many samples were skipped."""
        oversize, failed = self._progress.skipped()
        return SkippedSamples(oversize=oversize, failed=failed)

    # ------------------------------------------------------------------ position

    def tracked(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of a loader over this stream, and know which of them came.

        After each of them `state_dict()` is the position after it, with any number of workers, that
        persist or not, in or out of order. The workers send their positions beside the batches,
        which the loader's `collate_fn` does not see.

        Args:
            loader: a `DataLoader` of this stream, with `batch_size=None`.

        Raises:
            OptionError: it is another loader.
            StateError: its workers were started by a loop that was not tracked.
        """
        check_loader(loader, self)
        batches = self._track(loader)
        next(batches)  # up to where the loop begins
        return batches

    def _track(self, loader: DataLoader[Any]) -> Iterator[Any]:
        progress, epoch, workers = self._progress, self.epoch, max(loader.num_workers, 1)
        slots = [
            WorkerSlot(worker=worker, workers=workers, rank=self.rank, ranks=self.num_replicas)
            for worker in range(workers)
        ]
        began = [self._beginning(slot, epoch) for slot in slots]
        progress.tracked = time.monotonic_ns()
        self._tracked = loop = TrackedLoop(progress.tracked, slots, began, self._turn(epoch))
        try:
            batches = stamped_batches(loader)
            yield None
            for stamped in batches:
                yield loop.note(stamped)
            loop.ended = True
        finally:
            progress.tracked = 0
            if not loop.finished:
                progress.reopen()  # workers may be done with the epoch already
            elif self._settings.batches_per_epoch is not None:
                self._state = self._state_of(loop)  # for workers that are started later

    def state_dict(self) -> dict[str, Any]:
        """The position, in plain JSON types, except for the source's own state.

        Without workers, and in each worker of torchdata's `StatefulDataLoader`, it is the position
        of the last iteration; of `tracked(loader)`, that after its last batch. A source that has a
        state of its own goes on by it (`"goes_on_by": "seeking"`), others are skipped through
        (`"skipping"`).

        Raises:
            StateError: workers read, and the loop is not tracked.
        """
        in_worker, reader, epoch = get_worker_info() is not None, self._reader, self.epoch
        last = self._progress.last_loop
        if last and not in_worker:
            if self._tracked is None or self._tracked.number != last:
                raise StateError(
                    "workers read this stream, ahead of what the loop has taken: loop over "
                    "stream.tracked(loader), use a StatefulDataLoader, or set_epoch first"
                )
            return self._state_of(self._tracked)
        if reader is not None and self._process == os.getpid():
            cursor = reader.cursor
            if cursor.finished and not in_worker:
                cursor = self._following(cursor, reader.slot)
            return self.state_at([reader.slot], [cursor])
        loaded = self._loaded(epoch)
        return self._state_at_beginning(epoch) if loaded is None else dict(loaded)

    def _state_of(self, loop: TrackedLoop) -> dict[str, Any]:
        slots, cursors = loop.slots, loop.cursors
        if loop.finished:
            if self._settings.batches_per_epoch is None:
                return self._state_at_beginning(cursors[0].epoch + 1)
            cursors = list(map(self._following, cursors, slots))
            return self.state_at(slots, cursors)
        if all(cursor.is_beginning for cursor in cursors):
            return self._state_at_beginning(cursors[0].epoch)
        return self.state_at(slots, cursors, turn=loop.turn)

    def _following(self, cursor: StreamCursor, slot: WorkerSlot) -> StreamCursor:
        return cursor.following(slot.share(self._settings.batches_per_epoch))

    def _state_at_beginning(self, epoch: int) -> dict[str, Any]:
        slot = WorkerSlot(worker=0, workers=1, rank=self.rank, ranks=self.num_replicas)
        cursor = StreamCursor.beginning(epoch, self._settings.batches_per_epoch)
        return self.state_at([slot], [cursor])

    def state_at(
        self, slots: Sequence[WorkerSlot], cursors: Sequence[StreamCursor], *, turn: int = 0
    ) -> dict[str, Any]:
        """The state of the processes that have these slots."""
        settings = self._settings
        return {
            "epoch": cursors[0].epoch,
            "turn": turn,
            "goes_on_by": "seeking" if settings.source.has_states else "skipping",
            "workers": [
                cursor.to_plain(settings.order, settings.dealing(slot, self._look_ahead(slot)))
                for slot, cursor in zip(slots, cursors, strict=True)
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make every `iter()` begin at a saved position, until its epoch ends.

        The state of a process without workers can go on with any number of them, on any number of
        ranks, and under another budget, cost or look-ahead if it is at a window's boundary; at an
        epoch's beginning any state can.

        Raises:
            StateError: the state is malformed; or, at the next loop, persistent workers had started
                before it was loaded.
            StateMismatchError: it is of another stream; or, at the next loop, this process cannot
                go on from it.
        """
        if not isinstance(state_dict, Mapping) or not state_dict.get("workers"):
            raise StateError("expected what BudgetedIterableDataset.state_dict() returned")
        states, turn = state_dict["workers"], state_dict.get("turn")
        if not isinstance(states, list) or turn not in range(len(states)):
            raise StateError(f"the state is malformed: turn {turn!r} of workers {states!r}")
        cursors = [StreamCursor.of_plain(state, self._settings.order) for state in states]
        epoch = cursors[0].epoch
        if {cursor.epoch for cursor in cursors} != {state_dict.get("epoch")}:
            raise StateError(f"the state is malformed: epoch {state_dict.get('epoch')!r}")
        if cursors[0].finished:  # of a worker: the next epoch may have been chosen already
            epoch = max(epoch, self.epoch)
        self._begin_at(epoch, dict(state_dict))

    # ------------------------------------------------------------------ resources

    def close(self) -> None:
        """End all iterations of this process, and their threads."""
        for reader in list(self._readers):
            reader.close()

    def __enter__(self) -> BudgetedIterableDataset:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins where `iter()` would; an iteration stays with the process that iterates.
        return {**self.__dict__, "_reader": None, "_readers": None, "_tracked": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _readers=weakref.WeakSet())


def _raising(error: Exception) -> Iterator[Any]:
    yield from ()
    raise error


def _is_within(state: Mapping[str, Any] | None) -> bool:
    """Whether a state is of the middle of an epoch."""
    return state is not None and any(
        worker["start"] or worker["rounds"] or worker["pass"] for worker in state["workers"]
    )
