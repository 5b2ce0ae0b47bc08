"""A stream in its processes: epochs, loops, and where they stand."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchbudget.checks import natural
from torchbudget.data.framework_loader import check_framework_loader
from torchbudget.data.loaded_state import warn_of_discarded_state
from torchbudget.data.same_on_ranks import check_same_on_ranks
from torchbudget.data.stream.cursor import StreamCursor, StreamState
from torchbudget.data.stream.epoch_reader import EpochReader, Loops, raising
from torchbudget.data.stream.progress import Progress
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.data.stream.tracking import (
    TrackedLoop,
    check_loader,
    check_not_collated_again,
    stamped_batches,
)
from torchbudget.distributed import AskedRanks
from torchbudget.errors import RepeatedSamplesWarning, StateError
from torchbudget.plan.fingerprint import Plain
from torchbudget.protocols import ResumableSource
from torchbudget.warn import warn

Stream = TypeVar("Stream", bound="ResumableStream")


class ResumableStream(IterableDataset[Any], ResumableSource):
    """An iterable data set that any number of processes read, and that goes on from anywhere.

    Args:
        settings: of the stream, for the ranks of now.
        ranks: asked again whenever they are needed.
    """

    def __init__(self, settings: Settings, ranks: AskedRanks) -> None:
        super().__init__()
        self._settings_now, self._ranks = settings, ranks
        self._progress = Progress()
        self._changes = 0  # of the epoch or the state, as far as this copy knows them
        self._state: StreamState | None = None  # at which its epoch begins
        self._loops = Loops()  # of this process
        self._readers: weakref.WeakSet[EpochReader] = weakref.WeakSet()
        self._process = os.getpid()
        self._tracked: TrackedLoop | None = None  # the last one
        self._starting = 0  # the number of the tracked loop that starts workers now
        self._begun: int | None = None  # in a worker: that of the last loop

    @property
    def num_replicas(self) -> int:
        """Ranks that share the source."""
        return self._ranks.now()[0]

    @property
    def rank(self) -> int:
        """Of this process."""
        return self._ranks.now()[1]

    @property
    def _settings(self) -> Settings:
        # By this process: a loop's workers asked for themselves when it began.
        mine = self._process == os.getpid()
        begun = mine and (self._loops.present is not None or self._tracked is not None)
        ranks, loaded = self.num_replicas, self._loaded() is not None
        self._settings_now = self._settings_now.for_ranks(ranks, begun=begun, loaded=loaded)
        return self._settings_now

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()`, in every worker, read this epoch from its beginning.

        If that is the next epoch anyway, a loaded position stays, and with `batches_per_epoch` the
        source goes on where the last epoch ended.

        Raises:
            ShardedTwiceError: it is chosen by a framework that deals these batches again.
        """
        # Workers that it starts raise in the one process that reads: the others wait for ever.
        check_framework_loader(self.num_replicas)
        reader = self._loops.present
        if natural("epoch", epoch) != self.epoch:
            state = self._loaded()
            unused = reader is None and not self._progress.last_loop
            if unused and state is not None:
                warn_of_discarded_state(self.epoch, epoch, within=not state.is_beginning)
            self._begin_at(epoch, None)
        elif reader is not None and reader.began.epoch == epoch:
            self._loops = Loops(self._reader_at(reader.slot, reader.began))
        self._tracked = None
        self._progress.last_loop = 0
        self._progress.forget_skipped()

    def _begin_at(self, epoch: int, state: StreamState | None) -> None:
        """Make all processes begin the epoch, or at the state."""
        self._state, self._loops, self._tracked = state, Loops(), None
        if get_worker_info() is None:
            self._changes = self._progress.change(epoch, loaded=state is not None)
        else:  # of a StatefulDataLoader: each of its workers has a state of its own
            self._progress.last_begun = epoch

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """Read the epoch from its beginning, or from the loaded position.

        Raises:
            ShardedTwiceError: a framework deals the batches of this rank to its processes again.
            RankError: as in `tracked`.
        """
        check_not_collated_again(sys._getframe(1))
        info = get_worker_info()
        if info is None:
            return self._begin_loop(0, 1)
        try:
            return self._begin_loop(info.id, info.num_workers)
        except Exception as error:  # noqa: BLE001  (it is raised later)
            # A worker that persists dies of what `iter` raises, and passes on what `next` does.
            return raising(error)

    def _begin_loop(self, number: int, workers: int) -> EpochReader:
        self.check_ranks()
        self._heed_other_processes()
        progress, reader = self._progress, self._loops.present
        known = self._known_beginning(progress.advance())
        if reader is None or known is None:
            # A loader takes from its first worker first, which reads for the one whose turn it was.
            state = self._loaded()
            turn = 0 if state is None else state.turn
            reader = self.reader_of(self._slots(workers)[(number + turn) % workers])
            self._warn_of_start_over(reader.began, reader.slot)
        elif known.epoch == reader.began.epoch:
            reader = self._reader_at(reader.slot, known)
        else:
            reader.go_on(known)
        loop, in_worker = self._tracked_loop(), get_worker_info() is not None
        reader.stamps = bool(loop)
        self._readers.add(reader)
        reader.loops, self._loops.present = weakref.ref(self._loops), reader
        if in_worker and self._loaded() is not None:
            reader.find_end()
        progress.last_loop = loop or (-1 if in_worker else 0)
        return reader

    def check_ranks(self) -> None:
        """See `tracked`, which does it itself."""
        state, settings = self._loaded(), self._settings
        at: Plain = {"epoch": self.epoch} if state is None else state.cursors[0].position
        check_framework_loader(self.num_replicas)
        if settings.source.split != "ranks":  # else each reads its own samples, in its own way
            check_same_on_ranks(self._ranks, lambda: settings.shared | at)

    def _tracked_loop(self) -> int:
        """The number of the tracked loop that this process begins; 0: it is not tracked."""
        if get_worker_info() is None:
            return self._starting
        running = self._progress.tracked
        if self._begun is None:  # its first loop, in which it was started
            self._begun = self._starting
        elif self._begun and (running > 0 or -running != self._begun):
            self._begun = abs(running)  # that one may have been broken off before it came here
        else:
            return 0
        return self._begun

    def _heed_other_processes(self) -> None:
        """Follow what another process has chosen since this copy of the stream was made.

        Raises:
            StateError: it loaded a state, which this one does not have.
        """
        if self._process != os.getpid():  # of the process from which this one was forked
            self._loops, self._process = Loops(), os.getpid()
        if self._changes != self._progress.changes:
            if self._progress.was_loaded:
                raise StateError(
                    "these workers persist, and a state was loaded after they started: load it "
                    "before the first loop over the DataLoader"
                )
            self._state, self._loops = None, Loops()
            self._changes = self._progress.changes

    def _loaded(self) -> StreamState | None:
        """The state at which the next epoch begins, if one was loaded."""
        state = self._state
        return state if state is not None and state.epoch == self.epoch else None

    def _slots(self, workers: int) -> list[WorkerSlot]:
        """Those that share the source on this rank."""
        of = {"workers": workers, "rank": self.rank, "ranks": self.num_replicas}
        return [WorkerSlot(worker=n, **of) for n in range(workers)]

    def reader_of(self, slot: WorkerSlot) -> EpochReader:
        """What one process reads of the present epoch.

        Raises:
            StateMismatchError: it cannot go on from the state that was loaded.
        """
        return self._reader_at(slot, self._beginning(slot))

    def _reader_at(self, slot: WorkerSlot, cursor: StreamCursor) -> EpochReader:
        return EpochReader(self._settings, slot, cursor, self._progress)

    def _known_beginning(self, epoch: int) -> StreamCursor | None:
        """Where this process begins an epoch, if it has read it, or the one before it."""
        reader = self._loops.present
        if reader is not None and reader.began.epoch == epoch:
            return reader.began
        if reader is not None and reader.goes_on and reader.began.epoch == epoch - 1:
            return self._following(reader.cursor, reader.slot)
        return None

    def _beginning(self, slot: WorkerSlot) -> StreamCursor:
        """Where a new process begins the present epoch."""
        state, settings = self._loaded(), self._settings
        if state is not None:
            return state.cursor_of(slot, settings.dealing(slot))
        return StreamCursor.beginning(self.epoch, slot.share(settings.batches_per_epoch))

    def _warn_of_start_over(self, began: StreamCursor, slot: WorkerSlot) -> None:
        several = self._loaded() is None and began.to_come is not None
        if several and self._progress.was_read(began.epoch - 1, slot.worker):
            warn(
                f"epoch {began.epoch} starts over at the source's beginning, since workers that "
                "have just started do not know where the last epoch ended: use "
                "persistent_workers=True, or loop over stream.tracked(loader)",
                RepeatedSamplesWarning,
            )

    # ------------------------------------------------------------------ position

    def tracked(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the batches of a loader over this stream, and know which of them came.

        After each of them `state_dict()` is the position after it, with any number of workers, that
        persist or not, in or out of order. The workers send their positions beside the batches,
        which the loader's `collate_fn` does not see.

        Args:
            loader: a `DataLoader` of this stream, with `batch_size=None`.

        Raises:
            OptionError: another loader.
            StateError: its workers were started by a loop that was not tracked.
            RankError: ranks that plan from one source differ in what they plan by, or one does not
                come within its process group's timeout. Untracked workers cannot know.
        """
        check_loader(loader, self)
        self.check_ranks()
        batches: Iterator[Any] = self._track(loader)
        next(batches)  # up to where the loop begins
        return batches

    def _track(self, loader: DataLoader[Any]) -> Iterator[Any]:
        self._heed_other_processes()
        state, slots = self._loaded(), self._slots(max(loader.num_workers, 1))
        # Workers that live know where the last epoch ended, also after a loop that was not tracked.
        live = getattr(loader, "_iterator", None) is not None
        goes_on = live and state is None and self._settings.batches_per_epoch is not None
        known = None if loader.num_workers else self._known_beginning(self.epoch)
        cursors = list(map(self._beginning, slots)) if known is None else [known]
        if loader.num_workers and not goes_on:
            self._warn_of_start_over(cursors[0], slots[0])
        began = self._state_at(slots, cursors, turn=0 if state is None else state.turn)
        progress, number = self._progress, time.monotonic_ns()
        self._tracked = loop = TrackedLoop(number, began, unknown=goes_on and self.epoch > 0)
        self._starting = progress.tracked = progress.last_loop = number
        try:
            batches = stamped_batches(loader)
            self._starting = 0
            yield None
            for stamped in batches:
                batch = loop.note(stamped)
                if self._tracked is loop:
                    progress.last_loop = number  # also after a look at the stream within the loop
                yield batch
            loop.ended = True
        finally:
            batches = iter(())  # ends workers that do not persist
            if progress.tracked == number:  # and no later one has begun
                self._starting, progress.tracked = 0, -number
            if self._tracked is loop and progress.last_loop == number:
                self._end(loop)

    def _end(self, loop: TrackedLoop) -> None:
        loop.closed = True
        if not loop.finished:
            self._progress.reopen()  # workers may be done with the epoch already
        elif self._settings.batches_per_epoch is not None:
            self._state = self._state_after(loop)  # for workers that are started later

    def state_dict(self) -> dict[str, Any]:
        """The position, in plain JSON types, except for the source's own state.

        Without workers, and in each worker of torchdata's `StatefulDataLoader`, it is the position
        of the last iteration; of `tracked(loader)`, that after its last batch. A source that has a
        state of its own goes on by it (`"goes_on_by": "seeking"`), others are skipped through
        (`"skipping"`).

        Raises:
            StateError: workers read, and the loop is not tracked; or another loop began within a
                tracked one.
        """
        settings = self._settings
        return self._position().to_plain(settings.order, seeks=settings.source.has_states)

    def _position(self) -> StreamState:
        in_worker, reader, loop = get_worker_info() is not None, self._loops.present, self._tracked
        last = 0 if in_worker else self._progress.last_loop
        if loop is not None and last == loop.number:
            return self._state_after(loop)
        if last:
            raise StateError(
                "workers read this stream, ahead of what the loop has taken: loop over "
                "stream.tracked(loader), use a StatefulDataLoader, or set_epoch first"
            )
        if loop is not None and not loop.closed and not in_worker:
            raise StateError(
                "another loop over this stream began while a tracked one was open, so that it is "
                "unclear which one counts: save after the tracked loop's next batch, or begin a "
                "tracked loop"
            )
        if reader is not None and self._process == os.getpid():
            cursor = reader.cursor
            if cursor.finished and not in_worker:
                cursor = self._following(cursor, reader.slot)
            return self._state_at([reader.slot], [cursor])
        return self._loaded() or self._state_at_beginning(self.epoch)

    def _state_after(self, loop: TrackedLoop) -> StreamState:
        state, several = loop.state, self._settings.batches_per_epoch is not None
        if loop.finished and several:
            slots = self._slots(len(state.cursors))
            return self._state_at(slots, list(map(self._following, state.cursors, slots)))
        if loop.finished or state.is_beginning:
            return self._state_at_beginning(state.epoch + loop.finished)
        return state

    def _following(self, cursor: StreamCursor, slot: WorkerSlot) -> StreamCursor:
        return cursor.following(slot.share(self._settings.batches_per_epoch))

    def _state_at_beginning(self, epoch: int) -> StreamState:
        cursor = StreamCursor.beginning(epoch, self._settings.batches_per_epoch)
        return self._state_at(self._slots(1), [cursor])

    def _state_at(
        self, slots: Sequence[WorkerSlot], cursors: Sequence[StreamCursor], *, turn: int = 0
    ) -> StreamState:
        return StreamState(cursors=cursors, dealing=self._settings.dealing(slots[0]), turn=turn)

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
        state = StreamState.of_plain(state_dict, self._settings.order)
        epoch = state.epoch
        if state.cursors[0].finished:  # of a worker: the next epoch may have been chosen already
            epoch = max(epoch, self.epoch)
        self._begin_at(epoch, state)

    def close(self) -> None:
        """End all iterations of this process, and their threads."""
        for reader in list(self._readers):
            reader.close()

    def __enter__(self: Stream) -> Stream:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not see what starts it.
        check_framework_loader(self.num_replicas)
        # A copy begins where `iter()` would; an iteration stays with the process that iterates.
        progress = self._progress.passed_on()
        kept = {"_loops": Loops(), "_readers": None, "_tracked": None, "_progress": progress}
        return {**self.__dict__, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _readers=weakref.WeakSet())
