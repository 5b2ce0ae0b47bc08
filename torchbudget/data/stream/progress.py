"""Facts that all processes of a stream share: the next epoch, and how many samples were skipped."""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import numpy as np
import torch

from torchbudget.data.stream.cursor import WorkerSlot
from torchbudget.errors import OptionError

WORKERS: Final = 512  # that may read a stream on one rank
_NUMBERS: Final = 8
_DONE: Final = 3


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
