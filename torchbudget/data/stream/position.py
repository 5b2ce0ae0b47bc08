"""The position of a stream: in one process, and in all of its processes together.

A cursor is the place of one process within an epoch; a state is the cursors of all processes that
read on one rank. A process keeps one state, which moves in one of three ways. In a loop that is not
tracked, the process that reads moves it after each batch. In a tracked loop, the run moves it after
each batch that came. A load or `set_epoch` chooses it. Processes share no states. They share which
epoch is next, whether a state was chosen since, and how many samples were skipped (`Progress`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Generator, Iterator
from itertools import chain
from multiprocessing.context import get_spawning_popen
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import get_worker_info

from torchbudget.data.run import warn_of_discarded_state
from torchbudget.data.stream.cursor import StreamCursor, StreamState, WorkerSlot
from torchbudget.data.stream.options import StreamOptions
from torchbudget.data.stream.sending import Planned, Sending, collated
from torchbudget.data.stream.windows import Found, StreamWindows
from torchbudget.errors import OptionError, OtherNumbersWarning, StateError, warn
from torchbudget.plan.plan import ALL_DROPPED

WORKERS: Final = 512  # that may read a stream on one rank
_NUMBERS: Final = 8
_DONE: Final = 3


class StreamLoop(Iterator[Any]):
    """The micro-batches of one process, from a cursor to the end of its epoch.

    After an error it stands where it stood: the next call begins with the same samples.

    Args:
        position: position of the stream.
        slot: slot of this process.
        cursor: where it begins.
        turn: the number of the slot that the loader's first worker reads for: a loader begins with
            its first worker, but the next batch may be that of another slot.
        last: the loop of the epoch before, whose samples in memory come first.

    Attributes:
        slot: see above.
        cursor: the place after the last batch.
        windows: what it reads.
        planned: of the last batch.
        sending: sends the places of a tracked loop; `None`: the loop moves the position itself.
        choice: the loop moves the position as long as this is the position's present choice;
            `None`: never, since the loop is inside a tracked one.
        runs: `Progress.runs` when it began; `None`: its end is not noted for other processes.
    """

    def __init__(
        self,
        position: StreamPosition,
        slot: WorkerSlot,
        cursor: StreamCursor,
        turn: int = 0,
        last: StreamLoop | None = None,
    ) -> None:
        options = self._options = position.options
        self._position, self._turn, self._dealing = position, turn, options.dealing(slot)
        self.slot, self.cursor = slot, cursor
        self._batches: Iterator[Found]
        if last is None:
            skipped = position.progress.skipped[slot.worker % WORKERS]
            self.windows = StreamWindows(options, slot, skipped)
            self._batches = self.windows.micro_batches(cursor)
        else:
            self.windows, self._batches = last.windows, last._batches
        self.planned: Planned = None, 0
        self.sending: Sending | None = None
        self.choice: object = None
        self.runs: int | None = None

    @property
    def state(self) -> StreamState:
        """The state of this process alone."""
        return StreamState(cursors=[self.cursor], dealing=self._dealing, turn=self._turn)

    def __next__(self) -> Any:
        at, collate_fn = self.cursor, self._options.collate_fn
        try:
            left = iter(()) if at.to_come == 0 else self._batches
            begun, rounds, (batch, padded_size, _) = next(left)
            self.planned = padded_size, len(batch)
            if collate_fn is not list:  # otherwise the batch is the list of samples itself
                batch = collated(collate_fn, batch)
        except StopIteration:
            self._check_dropped()
            self.end(noticed=True)
            raise
        except BaseException:
            self.close()  # the next call must not return the next batch
            raise
        to_come = None if at.to_come is None else at.to_come - 1
        self.cursor = StreamCursor(
            at.epoch, begun.start, rounds, begun.first_epoch, begun.number, to_come, *begun[6:]
        )
        self._position.moved(self)
        if to_come == 0:
            self.end()
        return batch

    def _check_dropped(self) -> None:
        """Warn if `drop_last` has dropped each sample of the epoch in this process.

        Raises:
            OptionError: no other process has samples.
        """
        slot, at, options = self.slot, self.cursor, self._options
        has_given = at.start or at.rounds or at.number
        if has_given or not self.windows.samples or not options.drop_last:
            return
        if slot.workers == slot.part(options.source.split)[1] == 1:
            raise OptionError(ALL_DROPPED.format("samples of the epoch"))
        of = f"samples of worker {slot.worker} of {slot.workers} on rank {slot.rank}"
        warn(ALL_DROPPED.format(of), OtherNumbersWarning)

    def is_over(self) -> bool:
        """Look whether anything is left of the epoch, without taking it."""
        first = None if self.cursor.to_come == 0 else next(self._batches, None)
        if first is not None:
            self._batches = chain([first], self._batches)
        return first is None

    def end(self, *, noticed: bool = False) -> None:
        """Note that the epoch has no more batches.

        Args:
            noticed: another batch was asked for.
        """
        self.cursor = self.cursor._replace(to_come=0)
        self._position.ended(self, noticed=noticed)

    def close(self) -> None:
        """End the threads, close the source and drop the samples in memory."""
        batches, self._batches = self._batches, self.windows.micro_batches(self.cursor)
        if isinstance(batches, Generator):
            batches.close()


class StreamPosition:
    """The position of a stream in this process.

    Args:
        options: options of the stream.

    Attributes:
        options: see above.
        progress: what all processes of the stream share.
        start: where loops begin, if its epoch is the next one; `None`: at an epoch's beginning.
            With `batches_per_epoch` it may be the end of the epoch before.
        place: where the loop stands that moved last; `None`: at the next loop's beginning.
        loaded: the epoch that the next loop reads, if no loop has begun since a state was loaded.
        runs: the open runs. After a choice it is another set: runs of before are in the old one,
            and do not move the position any more.
        sending: the collate function that sends places, in processes that a tracked loop started.
    """

    def __init__(self, options: StreamOptions) -> None:
        self.options, self.progress = options, Progress()
        self.sending: Sending | None = None
        self._loops: WeakSet[StreamLoop] = WeakSet()
        self._go_to(None)

    def _go_to(self, start: StreamState | None) -> None:
        self.start = start
        self.place: StreamState | None = None
        self.loaded: int | None = None
        self.runs: WeakSet[Any] = WeakSet()
        self._choice = object()  # a new one for each choice: see `StreamLoop.choice`
        self._kept: StreamLoop | None = None  # at its epoch's end, with samples in memory
        self._changes, self._process = self.progress.changes, os.getpid()

    def _notice(self) -> None:
        """Drop the place if another process has chosen one since, and what a fork has copied."""
        if self._changes != self.progress.changes:
            self._go_to(None)
        elif self._process != os.getpid():
            self._go_to(self.start)

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins where the next loop would; loops stay with the process that reads them.
        progress = copy.copy(self.progress)
        left = dict.fromkeys(["place", "loaded", "runs", "_kept", "_loops", "_choice"])
        return {**vars(self), **left, "progress": progress}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, runs=WeakSet(), _loops=WeakSet(), _choice=object())
        self._process = os.getpid()

    # ------------------------------------------------------------------ where

    def where(self) -> StreamState | None:
        """The state at which the next loop begins; `None`: at the beginning of its epoch."""
        if self.start is None:
            return None
        state = self.start.following(self.options.batches_per_epoch)
        return state if state.epoch == self.progress.epoch else None

    def begins(self) -> StreamState:
        """The state at which the next loop begins.

        Raises:
            StateError: with `batches_per_epoch` it is where other processes have ended an epoch.
        """
        self._notice()
        return self.where() or self._epoch_begins()

    def _epoch_begins(self) -> StreamState:
        epoch, batches = self.progress.epoch, self.options.batches_per_epoch
        if batches is not None and epoch != self.progress.first:
            raise StateError(
                f"epoch {epoch} of batches_per_epoch={batches} goes on in the source where workers "
                f"have ended epoch {epoch - 1}, and only they know where: loop over "
                "stream.tracked(loader), or use persistent_workers=True in all loops"
            )
        cursor = StreamCursor(epoch, first_epoch=epoch, to_come=batches)
        return StreamState(cursors=[cursor], dealing=self.options.dealing(self.options.slot()))

    def state(self) -> StreamState:
        """The state after the last batch.

        Raises:
            StateError: workers prefetch batches, and the loop is not tracked.
        """
        self._notice()
        if self.progress.ahead and get_worker_info() is None:
            raise StateError(
                "workers of the DataLoader prefetch batches, so the position of its loop is "
                "unknown: loop over stream.tracked(loader), use a StatefulDataLoader, or call "
                "set_epoch first"
            )
        return self.place or self.begins()

    # ------------------------------------------------------------------ choices

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop of every process read an epoch: see the stream's `set_epoch`."""
        self._notice()
        progress, loaded, kept = self.progress, self.loaded, self._kept
        if epoch == progress.epoch:
            self._go_to(self.start)
            self.loaded, self._kept = None if loaded is None else epoch, kept
            progress.ahead = progress.run = 0
        else:
            state = self.where()
            if state is not None and loaded is not None and not progress.ahead:
                warn_of_discarded_state(state.epoch, epoch, within=not state.is_beginning)
            progress.change(epoch, loaded=False)
            self._go_to(None)
        progress.chosen = epoch + 1
        progress.skipped[:] = 0

    def load(self, state: StreamState) -> None:
        """Make loops begin at a state, until its epoch ends.

        In a worker it is that of a `StatefulDataLoader`, each of whose workers has its own.

        Raises:
            StateMismatchError: it belongs to another source or order.
        """
        self._notice()
        progress = self.progress
        state.check_order(self.options.dealing(self.options.slot()))
        epoch, is_chosen = progress.epoch, progress.chosen == progress.epoch + 1
        if get_worker_info() is None:
            # An epoch that `set_epoch` has chosen is read even if nothing is left of it.
            if not (is_chosen and epoch == state.epoch):
                state = state.following(self.options.batches_per_epoch)
            progress.change(state.epoch, loaded=True)
        self._go_to(state)
        self.place, self.loaded = state, max(epoch if is_chosen else 0, state.epoch)

    # ------------------------------------------------------------------ loops

    def begin_loop(self) -> StreamLoop:
        """Begin to read in this process, which may be a worker.

        Raises:
            StateError: another process loaded a state, which this one does not have; or `set_epoch`
                chose another epoch than that within which a loaded state stands.
            StateMismatchError: this process cannot go on from the state.
        """
        self._notice()
        progress, info, sending = self.progress, get_worker_info(), self.sending
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        is_first = is_tracked = False
        if sending is not None:
            is_first = not sending.has_begun  # this process was started for this loop
            is_tracked = is_first or progress.run == sending.number
            sending.has_begun, sending.after = True, None
        if progress.run and not is_tracked:
            return self.loop_at(None, self.options.slot(number, workers))
        if progress.loaded and self.start is None and not is_first:
            raise StateError(
                "these workers started before a state was loaded or a tracked loop was left: load "
                "before the first loop over the DataLoader, or begin a tracked loop"
            )
        loaded, self.loaded = self.loaded, None
        if not is_tracked:
            progress.advance()
        # The first loop of a run begins where the run began, although the run may be over before a
        # slow worker comes here. A loaded state counts even if another epoch was chosen.
        state = self.start if is_first or loaded is not None else self.where()
        # A loader takes from its first worker first, so that one reads for the slot in turn.
        turn = 0 if state is None else state.turn
        slot = self.options.slot((number + turn) % workers, workers)
        loop = self.loop_at(state, slot, turn % workers)
        loop.choice = self._choice
        if is_tracked:
            loop.sending = sending
            return loop
        loop.runs, progress.ahead = progress.runs, int(info is not None)
        if info is None:
            progress.chosen = 0
        if loaded is None or state is None or not (loaded > state.epoch or info is not None):
            return loop
        progress.begun, progress.first, is_over = loaded, state.epoch, loop.is_over()
        if loaded > state.epoch:
            if not is_over:
                raise StateError(
                    f"set_epoch({loaded}) was called, and then a state within epoch {state.epoch} "
                    f"was loaded: call set_epoch({state.epoch}), or do not load the state"
                )
            loop.end()
            loop = self.loop_at(self.where(), slot, turn % workers)
            loop.choice = self._choice
            # A `StatefulDataLoader` that loads the state of an epoch's end begins two loops in its
            # workers. What the first one prefetches must not count as read.
            loop.runs = progress.runs if info is None else None
        elif is_over:
            loop.end()
        return loop

    def loop_at(self, state: StreamState | None, slot: WorkerSlot, turn: int = 0) -> StreamLoop:
        """Return the loop of one process from a state on; `None`: from the epoch's beginning.

        Args:
            state: see above.
            slot: slot of the process.
            turn: see `StreamLoop`.

        Raises:
            StateError: see `begins`.
            StateMismatchError: this process cannot go on from the state.
        """
        begins = state or self._epoch_begins()
        cursor = begins.cursor_of(slot, self.options.dealing(slot))
        last, self._kept = self._kept, None
        if last is not None:
            # Without the source's own state, which need not be compared.
            ended = last.cursor.following(cursor.to_come)
            if last.slot != slot or ended[:6] != cursor[:6]:
                last.close()
                last = None
        loop = StreamLoop(self, slot, cursor, turn, last)
        self._loops.add(loop)
        return loop

    def moved(self, loop: StreamLoop) -> None:
        """Note that a loop has made a batch."""
        if loop.sending is not None:
            sizes = loop.windows.first_sizes
            loop.sending.after = loop.slot.worker, loop.cursor, loop.planned, sizes
        elif loop.choice is self._choice:
            self.place = loop.state

    def ended(self, loop: StreamLoop, *, noticed: bool) -> None:
        """Note that a loop has no more batches in its epoch.

        Args:
            loop: the loop.
            noticed: another batch was asked for.
        """
        if loop.runs is not None:
            self.progress.end(loop.slot, loop.cursor.epoch, loop.runs)
        if loop.choice is not self._choice:
            return
        batches, state = self.options.batches_per_epoch, loop.state
        if batches is not None and (loop.runs is not None or loop.sending is not None):
            self.start, self._kept = state, loop
        if loop.sending is None:
            here = noticed and get_worker_info() is None  # a worker's loader has its own end
            self.place = state.following(batches) if here else state

    def close_loops(self) -> None:
        """End all loops of this process, and close their sources."""
        for loop in list(self._loops):
            loop.close()

    # ------------------------------------------------------------------ runs

    def begin_run(self, number: int, workers: int) -> StreamState:
        """Begin a run and return the places of its workers.

        Args:
            number: number of the run that has started the workers, which may be an earlier one.
            workers: how many there are.

        Raises:
            StateError: see `begins`.
            StateMismatchError: so many workers cannot go on from the state.
        """
        begins, options, progress = self.begins(), self.options, self.progress
        progress.advance()
        slots = [options.slot(worker, workers) for worker in range(workers)]
        dealings = [*map(options.dealing, slots)]
        cursors = [*map(begins.cursor_of, slots, dealings)]
        self.start = StreamState(cursors=cursors, dealing=dealings[0], turn=begins.turn)
        self.place, self.loaded, self._choice = None, None, object()
        progress.runs, progress.run = progress.runs + 1, number
        progress.ahead = progress.chosen = 0
        return self.start

    def stands_at(self, place: StreamState) -> None:
        """Note a batch that a run has received: the position is now after it."""
        self.start = self.place = place
        self.progress.begun = place.epoch

    def run_closed(self, *, broken_off: bool) -> None:
        """Note the end of a run: workers of other loaders do not know where it was left."""
        if self._process != os.getpid():
            return  # a fork has copied the run
        self.progress.run = max((one.number for one in self.runs), default=0)
        state = self.where()
        if broken_off and state is not None and not self.runs:
            self.progress.change(state.epoch, loaded=True)
            self._changes = self.progress.changes


# ---------------------------------------------------------------------- what all processes share


class _Number:
    """An attribute whose value is in shared memory, at one of its places."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, progress: Progress, kind: type[Progress]) -> int:
        return int(progress.numbers[self._place])

    def __set__(self, progress: Progress, value: int) -> None:
        progress.numbers[self._place] = value


class Progress:
    """The epoch of a stream in all its processes, and what was skipped: one small shared tensor.

    Numbers are written by one process each, or are the same whoever writes them, without a lock.

    Args:
        shared: the memory of another one; `None`: new memory.

    Attributes:
        begun: the last epoch in which a loop has begun, or which was chosen.
        first: the epoch that was chosen or loaded last. With `batches_per_epoch`, only this epoch
            is known to begin where the source begins, or where the loaded state says.
        chosen: 1 more than the epoch that `set_epoch` chose last; 0: a loop of the process that
            trains has begun since.
        changes: number of times that a position was chosen or loaded: a process that has seen fewer
            drops its own.
        loaded: 1 if the last change was to a position that only the process that trains has.
        runs: number of runs that were opened: workers' ends of loops before do not count.
        run: number of the workers that the open run reads; 0: no run is open.
        ahead: 1 if workers of an untracked loop have begun to read ahead.
        skipped: samples of each worker that were oversize, and that failed, since `set_epoch`.
    """

    begun, first, chosen, changes, loaded, runs, run, ahead = map(_Number, range(_NUMBERS))

    def __init__(self, shared: torch.Tensor | None = None) -> None:
        if shared is None:
            numbers = _NUMBERS + WORKERS * (2 * _DONE + 2)
            shared = torch.zeros(numbers, dtype=torch.int64, device="cpu")
        self._shared = shared.share_memory_()
        # torch takes ten times as long to write a number.
        self.numbers, done, skipped = np.split(
            self._shared.numpy(), [_NUMBERS, _NUMBERS + WORKERS * 2 * _DONE]
        )
        # Of each worker, for the last even and odd epoch: how many workers read it, the number of
        # epochs done, and `runs` when it was begun.
        self._done, self.skipped = done.reshape(2, WORKERS, _DONE), skipped.reshape(WORKERS, 2)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the same memory in a process that is started; a copy has memory of its own."""
        shared = self._shared
        if get_spawning_popen() is None:
            shared = shared.clone()
            shared[_NUMBERS - 2 : _NUMBERS] = 0  # the copy has no run and no workers
        return Progress, (shared,)

    @property
    def epoch(self) -> int:
        """The epoch of the next loop: the one after the last, if all workers are done with it."""
        epoch = self.begun
        rows = self._done[epoch % 2]
        workers = int(rows[0, 0])
        last = workers, epoch + 1, self.runs
        return epoch + (workers > 0 and bool((rows[:workers] == last).all()))

    def advance(self) -> None:
        """Begin a loop in a process.

        Nothing is written but for the step from one epoch to the next, at once: a late worker of an
        old loop must not undo what `set_epoch` has chosen meanwhile.
        """
        epoch = self.epoch
        if epoch > self.begun:
            self.begun = epoch

    def end(self, slot: WorkerSlot, epoch: int, runs: int) -> None:
        """Note that a worker is done with an epoch, which it began when there were `runs`.

        Raises:
            OptionError: there are too many workers.
        """
        if slot.workers > WORKERS:
            raise OptionError(f"at most {WORKERS} workers may read a stream, got {slot.workers}")
        self._done[epoch % 2, slot.worker] = slot.workers, epoch + 1, runs

    def change(self, epoch: int, *, loaded: bool) -> None:
        """Make all processes begin at an epoch, or at a position that was loaded."""
        self.begun = self.first = epoch
        self.loaded, self.ahead, self.run, self.chosen = loaded, 0, 0, 0
        self.changes, self.runs = self.changes + 1, self.runs + 1
