"""Small models of the classes that people train, each with its training step.

Each does with memory what the large ones do: masks and biases of the step, matrices of all pairs
of samples, loops over the length, experts, images of free sizes, steps of several optimizers.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.support.model_classes.attention import ATTENTION
from tests.support.model_classes.case import Case
from tests.support.model_classes.images import IMAGES
from tests.support.model_classes.losses import LOSSES
from tests.support.model_classes.others import OTHERS
from tests.support.model_classes.recurrent import RECURRENT
from tests.support.model_classes.steps import STEPS

CLASSES: dict[str, Callable[[], Case]] = {
    **ATTENTION,
    **LOSSES,
    **RECURRENT,
    **IMAGES,
    **STEPS,
    **OTHERS,
}
