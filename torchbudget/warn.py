"""Warnings that point at the user's own line, however deep inside they are found."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import Final

import torch

# What calls in between: torch calls hooks and iterates over samplers, finalizers call at the end.
_INSIDE: Final = (
    *(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)),
    *(str(module.__file__) for module in (contextlib, weakref)),
)


def warn(text: str, category: type[Warning]) -> None:
    """Warn at the innermost line that is neither of this package nor of torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
