"""What the processes of a stream know together, in shared memory: it reaches workers that persist.

Numbers are written by one process each, or are the same whoever writes them: no lock is needed.
"""

from __future__ import annotations

from multiprocessing.context import get_spawning_popen
from typing import Any, Final

import torch

from torchbudget.errors import OptionError

WORKERS: Final = 512  # that may read a stream on one rank
# Where a stream stands: where the last loop of this process does, or the last tracked one; it is
# unclear where workers run ahead of a loop, or one began while a tracked one was open.
OWN, TRACKED, UNCLEAR = range(3)
_NUMBERS: Final = 6


class _Number:
    """An attribute whose value is in shared memory, at one of its places."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, progress: Progress, kind: type[Progress]) -> int:
        return int(progress._numbers[self._place])

    def __set__(self, progress: Progress, value: int) -> None:
        progress._numbers[self._place] = value


class Progress:
    """The epoch of a stream, the loops over it, and what was skipped.

    Args:
        shared: the memory of another one; `None`: new memory.

    Attributes:
        last: one of `OWN`, `TRACKED` and `UNCLEAR`.
        last_begun: the last epoch that was begun, or chosen.
        changes: how often an epoch was chosen or a state loaded.
        was_loaded: whether the last change was a state that was loaded.
        tracked: the number of the last tracked loop; below 0: it is over.
        opened: how often an epoch was opened again: what workers have done before does not count.
    """

    last, last_begun, changes, was_loaded, tracked, opened = map(_Number, range(_NUMBERS))

    def __init__(self, shared: torch.Tensor | None = None) -> None:
        if shared is None:
            shared = torch.zeros(_NUMBERS + 5 * WORKERS, dtype=torch.int64, device="cpu")
        self._shared = shared.share_memory_()
        places = self._shared.numpy()  # torch takes ten times as long to write a number
        self._numbers, rows = places[:_NUMBERS], places[_NUMBERS:].reshape(WORKERS, 5)
        # Of each worker: the number of workers, of epochs done, and `opened` then; what it skipped.
        self._done, self._skipped = rows[:, :3], rows[:, 3:]

    def __reduce__(self) -> tuple[Any, ...]:
        """The same memory in a process that is started; a copy has epochs and loops of its own."""
        shared = self._shared
        if get_spawning_popen() is None:
            shared = shared.clone()
            shared[0] = OWN  # the place of `last`
        return Progress, (shared,)

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> int:
        """That the next loop reads: the one after the last one, if all workers are done with it."""
        while True:
            epoch, workers = self.last_begun, int(self._done[0, 0])
            last = workers, epoch + 1, self.opened
            done = bool(workers) and bool((self._done[:workers] == last).all())
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
        return epoch >= 0 and self._done[worker, 1:].tolist() == [epoch + 1, self.opened]

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
        self._done[worker] = workers, epoch + 1, self.opened if opened is None else opened

    def change(self, epoch: int, *, loaded: bool) -> None:
        """Another epoch was chosen, or a state loaded: all processes begin there."""
        self.last_begun, self.was_loaded, self.last = epoch, loaded, OWN
        self.changes, self.opened = self.changes + 1, self.opened + 1

    # ------------------------------------------------------------------ skipped samples

    def count_skipped(self, worker: int, *, oversize: int = 0, failed: int = 0) -> None:
        """Add samples that a worker skipped."""
        self._skipped[worker] += oversize, failed

    def skipped(self) -> tuple[int, int]:
        """How many were oversize, and how many failed."""
        oversize, failed = self._skipped.sum(axis=0).tolist()
        return oversize, failed

    def forget_skipped(self) -> None:
        """Count them anew."""
        self._skipped[:] = 0
