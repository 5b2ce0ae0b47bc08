"""Small models with a training step each, written in the manner of many users.

Each does with memory what large ones do: masks and biases of the step, matrices of all pairs, loops
over the length, experts, images of free sizes, steps of several optimizers.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.model_classes.fields import FIELDS
from tests.support.model_classes.sequences import SEQUENCES
from tests.support.training_cases import Training

CLASSES: dict[str, Callable[[], Training]] = {**SEQUENCES, **FIELDS}
