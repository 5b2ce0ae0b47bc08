"""Checks of arguments that many functions take, and the size multiple and shapes of a source."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from numbers import Real
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np
from torch.utils.data import DataLoader

from torchbudget.errors import OptionError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def is_int(value: object) -> TypeGuard[int]:
    """Whether it is an integer of Python's or NumPy's, which a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a real number, which a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def natural(name: str, value: Any) -> int:
    """The value as an int, which must be one of at least 0."""
    return _at_least(name, value, 0)


def at_least_one(name: str, value: Any) -> int:
    """The value as an int, which must be one of at least 1."""
    return _at_least(name, value, 1)


def optional(name: str, value: Any) -> int | None:
    """The value as an int of at least 1, or `None`."""
    return None if value is None else _at_least(name, value, 1)


def positive_number(name: str, value: object) -> float:
    """The value as a float, which must be above 0 and finite."""
    if not is_number(value) or not 0 < value <= sys.float_info.max:
        raise OptionError(f"{name} must be a positive finite number, got {value!r:.50}")
    return float(value)


def several(name: str, value: Any, kind: type[T]) -> list[T]:
    """One of a kind, a list or tuple of them, or `None`, as a list."""
    values = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(one, kind) for one in values):
        raise OptionError(f"{name} must be one {kind.__name__} or a list of them, got {value!r}")
    return values


def check_flags(**flags: object) -> None:
    """Raise an `OptionError` where a flag is not a bool."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise OptionError(f"{name} must be a bool, got {flag!r}")


def check_call(call: Callable[..., Any], expected: str, *given: Any, **options: Any) -> None:
    """Raise an `OptionError` that names what to write where an argument is missing or unknown."""
    try:
        signature(call).bind(*given, **options)
    except ValueError:  # a function of C's, without a signature
        return
    except TypeError as error:
        hint, unknown = "", options.keys() - signature(call).parameters.keys()
        if unknown & signature(DataLoader).parameters.keys():
            hint = "; the budget sets the size of batches: max_batch_size= caps it, and "
            hint += "samples_per_step= sets the samples of an optimizer step; the order follows "
            hint += "shuffle= and weights=; other options of a DataLoader go to the DataLoader"
        raise OptionError(f"{error}; expected {expected}{hint}") from None


def called_as(expected: str) -> Callable[[F], F]:
    """Decorate a function whose arguments are checked by `check_call`."""

    def decorated(call: F) -> F:
        @wraps(call)
        def checked(*given: Any, **options: Any) -> Any:
            check_call(call, expected, *given, **options)
            return call(*given, **options)

        return checked  # type: ignore[return-value]

    return decorated


@runtime_checkable
class HasSizeMultiple(Protocol):
    """A sampler or a stream that rounds padded sizes up; its collate must round alike."""

    @property
    def size_multiple(self) -> int:
        """Padded sizes are multiples of it."""


def size_multiple_of(source: int | HasSizeMultiple) -> int:
    """A size multiple, given as an int or read from the sampler or stream that has it."""
    if isinstance(source, HasSizeMultiple):
        return source.size_multiple
    return at_least_one("size_multiple", source)


def shape_of(shapes: Sequence[tuple[int, int]], n: int, longest: int) -> tuple[int, int]:
    """The shape with the fewest rows that has room for n samples of up to a length.

    Args:
        shapes: pairs of rows and length, the fewest rows first.
        n: number of samples.
        longest: length of the longest one.

    Raises:
        OptionError: none has.
    """
    for rows, length in shapes:
        if rows >= n and length >= longest:
            return rows, length
    raise OptionError(
        f"{n} samples of up to {longest} fit none of the shapes {list(shapes)} of the sampler or "
        "stream: collate only batches that it has planned"
    )


def _at_least(name: str, value: Any, least: int) -> int:
    if not is_int(value) or value < least:
        raise OptionError(f"{name} must be an int of at least {least}, got {value!r}")
    return int(value)
