"""The iterations of a sampler, and which of several that are open is the one that counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from torchbudget.data.sampler_loader import WorkersLoop
from torchbudget.errors import RepeatedSamplesWarning, StateError
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.iterator import PlanIterator
from torchbudget.warn import warn

# Loops that were broken off where the last one was, too, until somebody is told.
_REPEATED: Final = 3


@dataclass(slots=True, kw_only=True)
class Iteration:
    """What is known of an iteration beside where it stands.

    Attributes:
        number: of those before it, and itself.
        came: batches that came in a tracked loop over it; `None`: it is not tracked.
        is_open: a tracked loop over it has not ended.
        workers: the loop of a loader whose workers read ahead of it; `None`: another one.
        is_left: another one began after it was asked for batches.
    """

    number: int
    came: int | None = None
    is_open: bool = False
    workers: WorkersLoop | None = None
    is_left: bool = False


class Iterations:
    """The iterations since a position was chosen; those before it do not count any more.

    The one that was asked for a batch last is the present one: an evaluation inside a training
    loop, over the same loader, has its own position, and the loop goes on with the loop's.

    Attributes:
        begun: how many there were, also before the position was chosen.
        present: the one that counts.
    """

    def __init__(self, begun: int = 0) -> None:
        self.begun = begun
        self.present: PlanIterator | None = None
        # The last loop that was broken off began here, and so did that many in a row.
        self._broken_from: Cursor | None = None
        self._broken_off = 0
        self._each: WeakKeyDictionary[PlanIterator, Iteration] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Iterations], tuple[int]]:
        # A copy begins where `iter()` would; an iteration stays with the process that iterates.
        return Iterations, (self.begun,)

    def begin(self, iterator: PlanIterator, workers: WorkersLoop | None, *, shuffled: bool) -> None:
        """Another one begins, and is the present one.

        Args:
            iterator: that begins.
            workers: see `Iteration`.
            shuffled: the order is random, so that nobody who repeats samples means to.

        Warns:
            RepeatedSamplesWarning: it is one of several that read the same batches.
        """
        before = self.present
        # A loader with workers begins two for one loop, and a loop may go on after one within it.
        if before is not None and before.drawn and not (left := self._each[before]).is_left:
            again = before.began is self._broken_from and left.came is None
            self._broken_from, self._broken_off = before.began, self._broken_off + 1 if again else 1
            left.is_left = True
        repeats = self._broken_off == _REPEATED and iterator.began is self._broken_from
        if repeats and shuffled:
            self._broken_off += 1  # told once
            warn(
                f"the last {_REPEATED} loops over this sampler were broken off, and all began at "
                "the same batch, as the next one does: next(iter(loader)) is the same batch each "
                "time. Keep one iterator, call set_epoch, or loop over sampler.tracked(loader), "
                "which goes on where it was broken off",
                RepeatedSamplesWarning,
            )
        self.begun += 1
        self._each[iterator] = Iteration(number=self.begun, workers=workers)
        self.present = iterator

    def find(self, iterator: PlanIterator) -> Iteration | None:
        """What is known of one; `None` if it does not count any more."""
        return self._each.get(iterator)

    def goes_on(self, iterator: PlanIterator) -> bool:
        """One was asked for a batch; whether another one was the present one."""
        changes = iterator is not self.present and iterator in self._each
        if changes:
            self.present = iterator
        return changes

    @property
    def number(self) -> int:
        """Of the present one; of the last, where there is none."""
        return self.begun if self.present is None else self._each[self.present].number

    def came(self) -> int | None:
        """Batches of the present one that came to its loop; `None`: all that were drawn.

        Raises:
            StateError: it is not tracked, and began within a tracked loop, or workers read ahead
                of its loop.
        """
        if self.present is None:
            return None
        present = self._each[self.present]
        if present.came is not None:
            return present.came
        if any(one.is_open for one in self._each.values()):
            raise StateError(
                "another loop over this sampler began while a tracked one was open, so "
                "that it is unclear which one counts: save after the tracked loop's next "
                "batch, begin a tracked loop, or give batches_done"
            )
        if present.workers is not None:
            present.workers.check_not_ahead(self.present)
        return None
