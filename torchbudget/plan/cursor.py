"""Where in an epoch a run stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Position:
    """A place between two micro-batches of an epoch.

    The epoch's positions before `start` are done, those from `stop` on are untouched. Those between
    are one window that was dealt: as a whole, or what was `left` of it when another number of ranks
    or another budget took over; `rounds` of its rounds are done.

    Attributes:
        epoch: number of the epoch.
        start: first position of the window.
        stop: behind its last position.
        left: which of its positions were dealt, shape `(stop − start,)`; `None`: all.
        rounds: how many of its micro-batches each rank is done with.
    """

    epoch: int
    start: int = 0
    stop: int = 0
    left: BoolArray | None = None
    rounds: int = 0

    def same_window(self, other: Position) -> bool:
        """Whether both stand in the same window of the same epoch, dealt alike."""
        return (self.epoch, self.start, self.stop) == (other.epoch, other.start, other.stop) and (
            self.left is other.left
        )
