"""What is measured, and what there is to say of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchbudget.cost.measuring.shapes import Domain, Size
from torchbudget.cost.measuring.training_state import TrainingState
from torchbudget.errors import MeasureWarning


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """A training step and the batches to measure it on.

    Attributes:
        step: the full training step.
        make_batch: makes a batch of n samples padded to a size.
        domain: the range of sizes.
        state: what the step trains.
        notes: what the user should know; appended to while measuring.
    """

    step: Callable[[Any], object]
    make_batch: Callable[[int, Any], Any]
    domain: Domain
    state: TrainingState
    notes: list[str] = field(default_factory=list)

    def batch(self, n: int, size: Size) -> Any:
        """A batch of n samples of a size, which is an int for `make_batch` if it has one axis."""
        return self.make_batch(n, size if len(size) > 1 else size[0])

    def warn(self, text: str) -> None:
        """Note it, and warn of it."""
        self.notes.append(text)
        warnings.warn(text, MeasureWarning, stacklevel=4)
