"""A stream in its processes: epochs, loops, and where they stand."""

from __future__ import annotations

import copy
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchbudget.checks import natural
from torchbudget.data.frameworks import Caller
from torchbudget.data.run import warn_of_discarded_state
from torchbudget.data.same_on_ranks import check_same_on_ranks, check_same_samples
from torchbudget.data.stream import tracking
from torchbudget.data.stream.cursor import StreamCursor, StreamState
from torchbudget.data.stream.epoch_reader import EpochReader, Loops, raising
from torchbudget.data.stream.progress import OWN, TRACKED, UNCLEAR, Progress
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.slot import WorkerSlot, share_of
from torchbudget.distributed import AskedRanks
from torchbudget.errors import RepeatedSamplesWarning, StateError
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
        self._last_loops = Loops()
        # What collates beside it, in the processes that a tracked loop has started.
        self._beside: tracking.CollateBeside | None = None
        self._readers: weakref.WeakSet[EpochReader] = weakref.WeakSet()

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
        ranks, loaded = self.num_replicas, self._loaded() is not None
        begun = bool(self._loops.present or self._loops.number)
        self._settings_now = self._settings_now.for_ranks(ranks, begun=begun, loaded=loaded)
        return self._settings_now

    @property
    def _loops(self) -> Loops:
        """Those of this process, since any process has chosen an epoch."""
        loops, changes = self._last_loops, self._progress.changes
        if (loops.changes, loops.process) != (changes, os.getpid()):
            self._last_loops = Loops(loops.state if loops.changes == changes else None, changes)
        return self._last_loops

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
        Caller.find().check_loader(self.num_replicas)
        loops, reader, state = self._loops, self._loops.present, self._loaded()
        if natural("epoch", epoch) != self.epoch:
            if state is not None and reader is None and self._progress.last == OWN:
                warn_of_discarded_state(self.epoch, epoch, within=not state.is_beginning)
            self._begin_at(epoch, None)
        elif reader is not None and reader.began.epoch == epoch:
            again = EpochReader(self._settings, reader.slot, reader.began, self._progress)
            self._last_loops = Loops(loops.state, loops.changes, again)
        self._loops.number, self._progress.last = None, OWN
        self._progress.forget_skipped()

    def _begin_at(self, epoch: int, state: StreamState | None) -> None:
        """Make all processes begin the epoch, or at the state."""
        if get_worker_info() is None:
            self._progress.change(epoch, loaded=state is not None)
        else:  # of a StatefulDataLoader: each of its workers has a state of its own
            self._progress.last_begun = epoch
        self._last_loops = Loops(state, self._progress.changes)

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """Read the epoch from its beginning, or from the loaded position.

        Raises:
            ShardedTwiceError: a framework deals the batches of this rank to its processes again.
            RankError: as in `tracked`.
        """
        tracking.check_caller(sys._getframe(1))
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        try:
            reader = self._begin_loop(number, workers)
        except Exception as error:
            if info is None:
                raise
            # A worker that persists dies of what `iter` raises, and passes on what `next` does.
            return raising(error)
        running = self._progress.tracked
        if self._beside is None or not self._beside.begin(reader, running):
            is_clear = info is None and running != self._loops.number
            self._progress.last = OWN if is_clear else UNCLEAR
        return reader

    def _begin_loop(self, number: int, workers: int) -> EpochReader:
        """Begin to read.

        Raises:
            StateError: another process loaded a state, which this one does not have.
        """
        self.check_ranks()
        settings, loops, epoch = self._settings, self._loops, self._progress.advance()
        if self._progress.was_loaded and loops.state is None:
            raise StateError(
                "these workers had started before a state was loaded: load it before the first "
                "loop over the DataLoader"
            )
        reader, batches = loops.present, settings.batches_per_epoch
        if reader is not None and reader.began.epoch == epoch:
            reader = EpochReader(settings, reader.slot, reader.began, self._progress)
        elif batches and reader is not None and reader.finished and reader.began.epoch == epoch - 1:
            share = share_of(batches, reader.slot.worker, reader.slot.workers)
            reader.go_on(reader.cursor.following(share))
        else:
            # A loader takes from its first worker first, which reads for the one whose turn it was.
            reader = self.reader_of(self._slots(workers)[(number + self._start().turn) % workers])
            self._warn_of_start_over(reader.began, reader.slot)
        self._readers.add(reader)
        reader.loops, loops.present = weakref.ref(loops), reader
        reader.compare = partial(check_same_samples, self._ranks)
        if self._loaded() is not None and get_worker_info() is not None:
            reader.find_end()
        return reader

    def check_ranks(self) -> None:
        """See `tracked`, which does it itself."""
        settings, cursor = self._settings, self._start().cursors[0]
        at = {"epoch": cursor.epoch, "start": cursor.start, "rounds": cursor.rounds}
        Caller.find().check_loader(self.num_replicas)
        if settings.source.split != "ranks":  # else each reads its own samples, in its own way
            check_same_on_ranks(self._ranks, lambda: settings.shared | at)

    def _loaded(self) -> StreamState | None:
        """The state at which the next epoch begins, if one was loaded."""
        state = self._loops.state
        return state if state is not None and state.epoch == self.epoch else None

    def _start(self) -> StreamState:
        """Where new processes begin the present epoch."""
        settings, [slot] = self._settings, self._slots(1)
        beginning = StreamCursor.beginning(self.epoch, settings.batches_per_epoch)
        return self._loaded() or StreamState(cursors=[beginning], dealing=settings.dealing(slot))

    def _slots(self, workers: int) -> list[WorkerSlot]:
        """Those that share the source on this rank."""
        of = {"workers": workers, "rank": self.rank, "ranks": self.num_replicas}
        return [WorkerSlot(worker=n, **of) for n in range(workers)]

    def reader_of(self, slot: WorkerSlot) -> EpochReader:
        """What one process reads of the present epoch.

        Raises:
            StateMismatchError: it cannot go on from the state that was loaded.
        """
        settings = self._settings
        cursor = self._start().cursor_of(slot, settings.dealing(slot))
        return EpochReader(settings, slot, cursor, self._progress)

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
            RankError: ranks that plan from one source differ in what they plan by, or, at the first
                batch, in the samples that they read; or one does not come within its process
                group's timeout. Untracked workers cannot know.
        """
        tracking.check_loader(loader, self)
        self.check_ranks()
        batches: Iterator[Any] = self._track(loader)
        next(batches)  # up to where the loop begins
        return batches

    def _track(self, loader: DataLoader[Any]) -> Iterator[Any]:
        progress, settings, loops = self._progress, self._settings, self._loops
        start, slots = self._start(), self._slots(max(loader.num_workers, 1))
        dealing, batches_per_epoch = settings.dealing(slots[0]), settings.batches_per_epoch
        cursors = [start.cursor_of(slot, settings.dealing(slot)) for slot in slots]
        # Workers that live know where the last epoch ended, also after a loop that was not tracked.
        live = getattr(loader, "_iterator", None) is not None and self._loaded() is None
        goes_on = live and batches_per_epoch is not None and start.epoch > 0
        unknown = set(range(len(slots))) if goes_on else set()
        if loader.num_workers and not goes_on:
            self._warn_of_start_over(cursors[0], slots[0])
        state = StreamState(cursors=cursors, dealing=dealing, turn=start.turn)
        number = loops.number = progress.tracked = abs(progress.tracked) + 1
        try:
            batches = tracking.stamped(loader)
            if loops.present is not None and not loader.num_workers:  # it may have gone on
                state = StreamState(cursors=[loops.present.began], dealing=dealing)
            self._note(loops, number, None if unknown else state)
            yield None
            compared = settings.ranks == 1
            run = tracking.run_of(batches)
            for stamped in batches:
                tracking.check_alone(batches, run)
                tracking.check_stamp(stamped, start.epoch)
                if not compared:
                    check_same_samples(self._ranks, stamped.worker, stamped.sizes)
                    compared = True
                state.move(stamped.worker, stamped.cursor)
                unknown.discard(stamped.worker)
                self._note(loops, number, None if unknown else state)
                yield stamped.take()
            tracking.check_alone(batches, run)
            state = state.following(batches_per_epoch, ended=True)
            self._note(loops, number, state)
        finally:
            batches = iter(())  # ends workers that do not persist
            if progress.tracked == number:  # and no later one has begun
                progress.tracked = -number
            if self._loops.number == number and progress.last == TRACKED:
                state = state.following(batches_per_epoch)
                if state.epoch == start.epoch:
                    progress.opened += 1  # workers may be done with the epoch already
                elif batches_per_epoch is not None:  # for workers that are started later
                    loops.state = state

    def _note(self, loops: Loops, number: int, state: StreamState | None) -> None:
        """A tracked loop stands there: what counts, if it is the last one."""
        if self._last_loops is loops and loops.number == number:
            loops.tracked, self._progress.last = state, TRACKED

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
        settings, loops, last = self._settings, self._loops, self._progress.last
        in_worker, reader = get_worker_info() is not None, loops.present
        if (last == UNCLEAR or (last == TRACKED and loops.tracked is None)) and not in_worker:
            raise StateError(
                "workers read this stream ahead of a loop that is not tracked, or it is unclear "
                "which one counts of several loops, or no batch has come yet from some workers: "
                "loop over stream.tracked(loader) and save after its next batch, use a "
                "StatefulDataLoader, or set_epoch first"
            )
        if loops.tracked is not None and last == TRACKED:
            state = loops.tracked
        elif reader is not None:
            state = StreamState(cursors=[reader.cursor], dealing=settings.dealing(reader.slot))
        else:
            state = self._start()
        if not in_worker:
            state = state.following(settings.batches_per_epoch)
        return state.to_plain(settings.order, seeks=settings.source.has_states)

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
        is_over = state.cursors[0].finished  # a worker: the next epoch may have been chosen already
        self._begin_at(max(state.epoch, self.epoch) if is_over else state.epoch, state)

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
        Caller.find().check_loader(self.num_replicas)
        # A copy begins where `iter()` would; an iteration stays with the process that iterates.
        loops = Loops(self._loops.state, self._loops.changes)
        kept = {"_last_loops": loops, "_readers": None, "_progress": copy.copy(self._progress)}
        return {**self.__dict__, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _readers=weakref.WeakSet())
