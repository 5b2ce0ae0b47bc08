"""What the processes of a stream know together, in shared memory: it reaches workers that persist.

Numbers are written by one process each, or are the same whoever writes them: no lock is needed.
"""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import torch

from torchbudget.errors import OptionError

WORKERS: Final = 512  # that may read a stream on one rank
_NUMBER_OF_WORKERS, _EPOCHS_DONE, _WHEN_OPENED, _OVERSIZE, _FAILED = range(5)
_DONE: Final = slice(_NUMBER_OF_WORKERS, _OVERSIZE)


class _Number:
    """An attribute whose value is in shared memory, at one of its places."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, progress: Progress, kind: type[Progress]) -> int:
        return int(progress._numbers[self._place])

    def __set__(self, progress: Progress, value: int) -> None:
        progress._numbers.numpy()[self._place] = value  # torch takes ten times as long


class Progress:
    """The epoch of a stream, the loops over it, and what was skipped.

    Attributes:
        last_begun: the last epoch that was begun, or chosen.
        changes: how often an epoch was chosen or a state loaded.
        was_loaded: whether the last change was a state that was loaded.
        tracked: the number of the tracked loop that is running; below 0: it is over.
        last_loop: of workers: its number if it was tracked, else -1; 0: this process read, or none.
        opened: how often an epoch was opened again: what workers have done before does not count.
    """

    last_begun, changes, was_loaded, tracked, last_loop, opened = map(_Number, range(6))

    def __init__(self) -> None:
        self._numbers = torch.zeros(6, dtype=torch.int64).share_memory_()
        self._workers = torch.zeros(WORKERS, 5, dtype=torch.int64).share_memory_()

    def passed_on(self) -> Progress:
        """For a copy of the stream: the same memory for a process that is started, else another."""
        if get_spawning_popen() is not None:
            return self
        other = Progress()
        other._numbers.copy_(self._numbers)
        other.tracked = other.last_loop = 0
        other._workers.copy_(self._workers)
        return other

    def __deepcopy__(self, memo: object) -> Progress:
        return self.passed_on()

    def __reduce__(self) -> tuple[Any, ...]:
        return _progress, (self._numbers, self._workers)

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> int:
        """That the next loop reads: the one after the last one, if all workers are done with it."""
        while True:
            epoch, workers = self.last_begun, int(self._workers[0, _NUMBER_OF_WORKERS])
            last = torch.tensor([workers, epoch + 1, self.opened])
            done = bool(workers) and bool((self._workers[:workers, _DONE] == last).all())
            # Another worker may meanwhile have gone on to the next one, and be done with it, too.
            if epoch == self.last_begun:
                return epoch + done

    def advance(self) -> int:
        """A process begins a loop: the epoch that it reads.

        Nothing is written but for the step from one epoch to the next, at once: a late worker of an
        old loop must not undo what `set_epoch` has chosen meanwhile.
        """
        epoch = self.epoch
        if epoch > self.last_begun:
            self.last_begun = epoch
        return epoch

    def was_read(self, epoch: int, worker: int) -> bool:
        """Whether this worker, or an earlier one of its number, was done with an epoch."""
        done = self._workers[worker, [_EPOCHS_DONE, _WHEN_OPENED]].tolist()
        return epoch >= 0 and done == [epoch + 1, self.opened]

    def end(self, epoch: int, worker: int, workers: int, *, opened: int | None = None) -> None:
        """A worker is done with an epoch.

        Args:
            epoch: that it has read.
            worker: its number.
            workers: their number.
            opened: what `opened` was when it began; `None`: what it is now.

        Raises:
            OptionError: there are too many workers.
        """
        if workers > WORKERS:
            raise OptionError(f"at most {WORKERS} workers may read a stream, got {workers}")
        opened = self.opened if opened is None else opened
        self._workers[worker, _DONE] = torch.tensor([workers, epoch + 1, opened])

    def reopen(self) -> None:
        """A loop was broken off: the epoch is not over, although workers are done with it, or will.

        Those that persist go on with what the loop has asked for, ahead of what it took.
        """
        self.opened += 1

    def change(self, epoch: int, *, loaded: bool) -> int:
        """Another epoch was chosen, or a state loaded: all processes begin there.

        Returns:
            The number of this change.
        """
        self.reopen()
        self.last_begun, self.was_loaded, self.last_loop = epoch, loaded, 0
        self.changes += 1
        return self.changes

    # ------------------------------------------------------------------ skipped samples

    def count_skipped(self, worker: int, *, oversize: int = 0, failed: int = 0) -> None:
        """Add samples that a worker skipped."""
        self._workers[worker, _OVERSIZE:] += torch.tensor([oversize, failed])

    def skipped(self) -> tuple[int, int]:
        """How many were oversize, and how many failed."""
        oversize, failed = self._workers[:, _OVERSIZE:].sum(dim=0).tolist()
        return oversize, failed

    def forget_skipped(self) -> None:
        """Count them anew."""
        self._workers[:, _OVERSIZE:] = 0


def _progress(numbers: torch.Tensor, workers: torch.Tensor) -> Progress:
    """Of tensors that came through a pipe, shared or not."""
    progress = Progress()
    progress._numbers, progress._workers = numbers.share_memory_(), workers.share_memory_()
    return progress
