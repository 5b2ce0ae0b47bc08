"""Checks of arguments that many functions take: ints, flags, choices."""

from __future__ import annotations

import numpy as np

from torchbudget.errors import OptionError


def natural(name: str, value: int) -> int:
    """The value as an int, which must be one of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise OptionError(f"{name} must be an int of at least 0, got {value!r}")
    return int(value)


def at_least_one(name: str, value: int) -> int:
    """The value as an int, which must be one of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise OptionError(f"{name} must be an int of at least 1, got {value!r}")
    return int(value)


def optional(name: str, value: int | None) -> int | None:
    """Likewise, or `None`."""
    return None if value is None else at_least_one(name, value)
