"""Arguments of an accumulator, checked."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, TypeGuard, TypeVar

from torch import Tensor

from torchbudget.errors import OptionError

T = TypeVar("T")


def several(name: str, value: Any, kind: type[T]) -> list[T]:
    """One of a kind, a list or tuple of them, or `None`, as a list."""
    values = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(one, kind) for one in values):
        raise OptionError(f"{name} must be of {kind.__name__}, one or several, got {value!r}")
    return values


def positive_number(name: str, value: object) -> float:
    """The value as a float, which must be above 0; infinity is."""
    if not _is_number(value) or not value > 0:
        raise OptionError(f"{name} must be a positive number, got {value!r}")
    return float(value)


def weight_of(weight: float | Tensor) -> float:
    """A weight as a float: a finite number of at least 0, or a tensor of one.

    Raises:
        OptionError: it is something else.
    """
    value = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if not _is_number(value) or not 0 <= value < math.inf:
        raise OptionError(f"weight must be a number of at least 0, got {weight!r}")
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
