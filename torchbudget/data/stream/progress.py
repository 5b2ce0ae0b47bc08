"""One small shared tensor: what must reach workers that persist, and what they report.

Numbers are written by one process each, or are the same whoever writes them: no lock is needed.
"""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import torch

from torchbudget.errors import OptionError

WORKERS: Final = 512  # that may read a stream on one rank
_NUMBERS: Final = 7


class _Number:
    """An attribute whose value is in shared memory, at one of its places."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, progress: Progress, kind: type[Progress]) -> int:
        return int(progress._numbers[self._place])

    def __set__(self, progress: Progress, value: int) -> None:
        progress._numbers[self._place] = value


class Progress:
    """The epoch of a stream in all its processes, and what was skipped.

    Args:
        shared: the memory of another one; `None`: new memory.

    Attributes:
        begun: the last epoch that was begun, or chosen.
        chosen: 1 if `set_epoch` chose it, and no loop has begun since.
        changes: number of times that a position was chosen or loaded.
        loaded: 1 if the last change was to a position that only the process that trains has.
        runs: number of runs that were opened: workers' ends of loops before do not count.
        run: number of the workers that the open run reads; 0: no run is open.
        ahead: 1 if workers of an untracked loop have begun to read ahead.
    """

    begun, chosen, changes, loaded, runs, run, ahead = map(_Number, range(_NUMBERS))

    def __init__(self, shared: torch.Tensor | None = None) -> None:
        if shared is None:
            shared = torch.zeros(_NUMBERS + 5 * WORKERS, dtype=torch.int64, device="cpu")
        self._shared = shared.share_memory_()
        places = self._shared.numpy()  # torch takes ten times as long to write a number
        self._numbers, rows = places[:_NUMBERS], places[_NUMBERS:].reshape(WORKERS, 5)
        # Of each worker: the number of workers, of epochs done, and `runs` then; what it skipped.
        self._done, self._skipped = rows[:, :3], rows[:, 3:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the same memory in a process that is started; a copy has memory of its own."""
        shared = self._shared
        if get_spawning_popen() is None:
            shared = shared.clone()
            shared[_NUMBERS - 2 : _NUMBERS] = 0  # the copy has no run, and nobody reads ahead of it
        return Progress, (shared,)

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next loop: the one after the last, if all workers are done with it."""
        while True:
            epoch, workers = self.begun, int(self._done[0, 0])
            last = workers, epoch + 1, self.runs
            done = bool(workers) and bool((self._done[:workers] == last).all())
            # Another worker may meanwhile have gone on to the next one, and be done with it, too.
            if epoch == self.begun:
                return epoch + done

    def advance(self) -> None:
        """Begin a loop in a process.

        Nothing is written but for the step from one epoch to the next, at once: a late worker of an
        old loop must not undo what `set_epoch` has chosen meanwhile.
        """
        epoch = self.epoch
        if epoch > self.begun:
            self.begun = epoch

    def was_read(self, epoch: int, worker: int) -> bool:
        """True if this worker, or an earlier one of its number, was done with an epoch."""
        return epoch >= 0 and self._done[worker, 1:].tolist() == [epoch + 1, self.runs]

    def end(self, epoch: int, worker: int, workers: int, runs: int) -> None:
        """Note that a worker is done with an epoch, which it began when there were `runs`.

        Raises:
            OptionError: there are too many workers.
        """
        if workers > WORKERS:
            raise OptionError(f"at most {WORKERS} workers may read a stream, got {workers}")
        self._done[worker] = workers, epoch + 1, runs

    def change(self, epoch: int, *, loaded: bool) -> None:
        """Make all processes begin at an epoch, or at a position that was loaded."""
        self.begun, self.loaded, self.ahead, self.run, self.chosen = epoch, loaded, 0, 0, 0
        self.changes, self.runs = self.changes + 1, self.runs + 1

    # ------------------------------------------------------------------ skipped samples

    def count_skipped(self, worker: int, *, oversize: int = 0, failed: int = 0) -> None:
        """Add samples that a worker skipped."""
        self._skipped[worker] += oversize, failed

    def skipped(self) -> tuple[int, int]:
        """Return the number of samples that were oversize, and of those that failed."""
        oversize, failed = self._skipped.sum(axis=0).tolist()
        return oversize, failed

    def forget_skipped(self) -> None:
        """Count them anew."""
        self._skipped[:] = 0
