"""Warnings that point at the user's own line, however deep inside they are found."""

from __future__ import annotations

import sys
import warnings
from typing import Final

# What calls in between: torch calls hooks and iterates over samplers, finalizers call at the end.
_INSIDE: Final = frozenset({"torchbudget", "torch", "contextlib", "weakref"})


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line of none of these packages.

    In a worker or a thread, which no line of the user's has called, that is one of Python's.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _package(frame.f_globals) in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def _package(module: dict[str, object]) -> str:
    # By names, since paths of files are written in several ways.
    return str(module.get("__name__", "")).partition(".")[0]
