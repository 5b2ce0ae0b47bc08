"""Consecutive windows of an epoch: where they are, and how they were solved."""

from __future__ import annotations

from dataclasses import dataclass

from torchbudget.cost.models.protocol import IntArray
from torchbudget.plan.cursor import BoolArray, Cursor
from torchbudget.plan.solver import Block


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Consecutive windows of one length.

    Attributes:
        start: position of the first window's first sample.
        length: positions in each window.
        left: which positions of the one window were dealt, shape `(length,)`; `None`: all.
        counted: `least` and `spare` of `Cursor` before each window and after the last one, shape
            `(windows + 1, 2)`; `None` where the epoch's micro-batches were not counted.
    """

    start: int
    length: int
    left: BoolArray | None
    counted: IntArray | None

    def cursor(self, epoch: int, window: int, rounds: int, done: int) -> Cursor:
        """Where the epoch stands after `rounds` rounds of window number `window`, `done` in all."""
        start = self.start + window * self.length
        least, spare = self._counted(window)
        return Cursor(
            epoch=epoch,
            start=start,
            stop=start + self.length,
            left=self.left,
            rounds=rounds,
            done=done,
            least=least,
            spare=spare,
        )

    def after(self, epoch: int, window: int, done: int) -> Cursor:
        """Where the epoch stands after window number `window`, `done` micro-batches in all."""
        stop = self.start + (window + 1) * self.length
        least, spare = self._counted(window + 1)
        return Cursor(epoch=epoch, start=stop, stop=stop, done=done, least=least, spare=spare)

    def _counted(self, window: int) -> tuple[int | None, int]:
        return (None, 0) if self.counted is None else tuple(self.counted[window].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The solution of a stretch.

    Attributes:
        stretch: where it is.
        indices: indices in the data set grouped by micro-batch, shape `(windows·S,)`.
        block: the micro-batches.
    """

    stretch: Stretch
    indices: IntArray
    block: Block
