"""What one epoch did, and what it has done so far."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from torchbudget.train.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What one epoch did, over all ranks.

    Attributes:
        number: of the epoch, from 0.
        loss: Σ loss / Σ weight of its steps.
        validation: the same of the validation data after it; `None` without.
        steps: optimizer steps.
        skipped: those of them that changed nothing.
        seconds: that it took, evaluation included.
    """

    number: int
    loss: float
    validation: float | None
    steps: int
    skipped: int
    seconds: float


@dataclass(slots=True, eq=False)
class Tally:
    """An epoch as far as it is done: see `Epoch`.

    Attributes:
        loss: Σ loss, in float64; of steps whose loss nobody has read, it is on their device.
    """

    loss: Tensor | float = 0.0
    weight: float = 0.0
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def add(self, step: Step) -> None:
        """Count a step; nothing is read."""
        self.loss = self.loss + step.loss_sum()
        self.weight += step.weight
        self.steps += 1
        self.skipped += step.skipped

    def encode(self) -> dict[str, Any]:
        """The state as plain types; waits for the device."""
        return asdict(replace(self, loss=float(self.loss)))

    def epoch(self, number: int, validation: float | None) -> Epoch:
        """The epoch that is done now; waits for the device."""
        return Epoch(
            number=number,
            loss=float(self.loss) / self.weight if self.weight else math.nan,
            validation=validation,
            steps=self.steps,
            skipped=self.skipped,
            seconds=self.seconds,
        )
