"""Bytes as people write them: `GiB(1.5)`, `parse_bytes("8GiB")`, `format_bytes(n)`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final, TypeAlias

import numpy as np

from torchbudget.checks import is_int
from torchbudget.errors import BudgetError

MAX_BYTES: Final = 2**63 - 1

Number: TypeAlias = "float | Fraction | np.integer[Any] | np.floating[Any]"
Amount: TypeAlias = "int | np.integer[Any] | str"

_PREFIXES: Final = ("", "k", "m", "g", "t")
_UNITS: Final = {
    "": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(_PREFIXES)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(_PREFIXES) if power},
}
_TEXT: Final = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def exact(number: object) -> Fraction | None:
    """`number` without rounding; None where it is no finite real number, or a bool.

    >>> exact(0.5)
    Fraction(1, 2)
    """
    if isinstance(number, bool):
        return None
    if isinstance(number, (int, np.integer, Fraction)):
        # NumPy's 64 bits would overflow in products: they become Python's integers first.
        return Fraction(int(number.numerator), int(number.denominator))
    if isinstance(number, (float, np.floating)) and np.isfinite(number):
        return Fraction(*number.as_integer_ratio())
    return None


def _count(number: Number, unit_bytes: int, came: object) -> int:
    """`number` units in whole bytes, rounded down, so that a budget never grows by rounding."""
    fraction = exact(number)
    if fraction is None:
        raise BudgetError(f"expected a finite number, got {came!r}")
    if not 0 <= fraction * unit_bytes <= MAX_BYTES:
        raise BudgetError(f"expected between 0 and 2**63 - 1 bytes, got {came!r}")
    return int(fraction * unit_bytes)


def KiB(number: Number) -> int:
    """`number` kibibytes (2¹⁰) in bytes, rounded down.

    Raises:
        BudgetError: `number` is no finite number, is negative, or is past 2⁶³ − 1 bytes.

    >>> KiB(4)
    4096
    """
    return _count(number, 2**10, number)


def MiB(number: Number) -> int:
    """`number` mebibytes (2²⁰) in bytes, rounded down.

    Raises:
        BudgetError: `number` is no finite number, is negative, or is past 2⁶³ − 1 bytes.

    >>> MiB(0.5)
    524288
    """
    return _count(number, 2**20, number)


def GiB(number: Number) -> int:
    """`number` gibibytes (2³⁰) in bytes, rounded down.

    Raises:
        BudgetError: `number` is no finite number, is negative, or is past 2⁶³ − 1 bytes.

    >>> GiB(1.5)
    1610612736
    """
    return _count(number, 2**30, number)


def parse_bytes(amount: Amount) -> int:
    """Read an amount of memory.

    Args:
        amount: bytes as an int, or text: a number and a unit. Binary units (`KiB`, `MiB`, `GiB`,
            `TiB`) are powers of 1024 and decimal ones (`kB`, `MB`, `GB`, `TB`) powers of 1000;
            their case does not matter; without a unit the number counts bytes.

    Returns:
        Bytes, rounded down.

    Raises:
        BudgetError: `amount` is not an int or such a text, is negative, or exceeds 2⁶³ − 1.

    >>> parse_bytes("8GiB")
    8589934592
    >>> parse_bytes("1.5 kB")
    1500
    """
    if isinstance(amount, str):
        match = _TEXT.fullmatch(amount)
        unit_bytes = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit_bytes is None:
            raise BudgetError(
                f"cannot read {amount!r} as bytes; write a number and one of "
                "B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, for example '8GiB'"
            )
        try:
            number = Fraction(match[1].replace("_", ""))
        except ValueError:  # Python refuses to convert text of thousands of digits
            raise BudgetError(
                f"expected at most 2**63 - 1 bytes, got {len(match[1])} digits"
            ) from None
        return _count(number, unit_bytes, amount)
    if not is_int(amount):
        raise BudgetError(
            f"expected whole bytes as an int or text such as '8GiB', got {amount!r}; "
            "GiB(1.5), MiB(…) and KiB(…) turn other numbers into bytes"
        )
    return _count(int(amount), 1, amount)


def format_bytes(num_bytes: int) -> str:
    """Format bytes for people, in binary units.

    At least three significant digits; a whole number of its unit has no decimals.

    >>> format_bytes(8589934592)
    '8 GiB'
    >>> format_bytes(1500)
    '1.46 KiB'
    >>> format_bytes(-512)
    '-512 B'
    """
    magnitude = abs(int(num_bytes))
    sign = "-" if num_bytes < 0 else ""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit_bytes = _UNITS[name.lower()]
        # From 1023.5 of the smaller unit on, which would read as 1024 of them.
        if 2048 * magnitude >= 2047 * unit_bytes:
            amount = magnitude / unit_bytes
            whole = magnitude % unit_bytes == 0 or amount >= 100
            return f"{sign}{amount:.0f} {name}" if whole else f"{sign}{amount:.3g} {name}"
    return f"{sign}{magnitude} B"
