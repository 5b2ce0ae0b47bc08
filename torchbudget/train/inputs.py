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
    held = () if value is None else [value] if isinstance(value, kind) else value
    if not isinstance(held, (list, tuple)) or not all(isinstance(one, kind) for one in held):
        raise OptionError(f"{name} must be of {kind.__name__}, one or several, got {value!r}")
    return list(held)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number of Python's or NumPy's, which a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def weight_of(weight: float | Tensor) -> float:
    """A weight as a float: a number of at least 0, or a tensor of one.

    Raises:
        OptionError: it is none.
    """
    value = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if not is_number(value) or not 0 <= value < math.inf:
        raise OptionError(f"weight must be a number of at least 0, got {weight!r}")
    return float(value)
