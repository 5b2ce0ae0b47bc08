"""The state of an accumulator, saved and loaded; in the middle of a step with its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any, Final

from torch import Tensor

from torchbudget.errors import StateError
from torchbudget.train.step import Pending

_VERSION: Final = 1


def encode_state(steps: int, pending: Pending, parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The state as plain types; the gradients of what is pending are copied.

    Args:
        steps: that were taken.
        pending: what was accumulated since the last one.
        parameters: that have the gradients of what is pending.
    """
    gradients = [p.grad for p in parameters] if pending.micro_batches else []
    return {
        "version": _VERSION,
        "steps": steps,
        **asdict(replace(pending, loss=float(pending.loss))),
        "gradients": [None if g is None else g.detach().clone() for g in gradients],
    }


def load_state(state: Mapping[str, Any], parameters: Sequence[Tensor]) -> tuple[int, Pending]:
    """Set the parameters' gradients to those of the state.

    Returns:
        The number of steps, and what is pending.

    Raises:
        StateError: it is not the state of an accumulator, or of other parameters.
    """
    if not isinstance(state, Mapping) or state.get("version") != _VERSION:
        raise StateError("expected what GradAccumulator.state_dict() returned")
    gradients = state["gradients"] or [None] * len(parameters)
    if len(gradients) != len(parameters) or any(
        gradient is not None and gradient.shape != parameter.shape
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ):
        raise StateError("the state's gradients are of other parameters")
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    return state["steps"], Pending(**{field.name: state[field.name] for field in fields(Pending)})
