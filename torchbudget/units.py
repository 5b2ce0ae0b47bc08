"""Bytes as people write them: `GiB(1.5)`, `parse_bytes("8GiB")`, `format_bytes(n)`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from torchbudget.errors import BudgetError

MAX_BYTES: Final = 2**63 - 1

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_TEXT: Final = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def _count(number: float | Fraction, unit_bytes: int, came: object) -> int:
    """`number` units in whole bytes, rounded down, so that a budget never grows by rounding."""
    if isinstance(number, bool) or not isinstance(number, (int, float, Fraction)):
        raise BudgetError(f"expected a number of bytes, got {came!r}")
    try:
        exact = Fraction(number) * unit_bytes
    except (ValueError, OverflowError):
        raise BudgetError(f"expected a finite number of bytes, got {came!r}") from None
    if not 0 <= exact <= MAX_BYTES:
        raise BudgetError(f"expected between 0 and 2**63 - 1 bytes, got {came!r}")
    return int(exact)


def KiB(number: float) -> int:  # noqa: N802  (the unit's own spelling)
    """`number` kibibytes (2¹⁰) in bytes, rounded down.

    >>> KiB(4)
    4096
    """
    return _count(number, 2**10, number)


def MiB(number: float) -> int:  # noqa: N802  (the unit's own spelling)
    """`number` mebibytes (2²⁰) in bytes, rounded down.

    >>> MiB(0.5)
    524288
    """
    return _count(number, 2**20, number)


def GiB(number: float) -> int:  # noqa: N802  (the unit's own spelling)
    """`number` gibibytes (2³⁰) in bytes, rounded down.

    >>> GiB(1.5)
    1610612736
    """
    return _count(number, 2**30, number)


def parse_bytes(amount: int | str) -> int:
    """Read an amount of memory.

    Args:
        amount: bytes as an int, or text: a number and a unit. Binary units (`KiB`, `MiB`, `GiB`,
            `TiB`) are powers of 1024 and decimal ones (`kB`, `MB`, `GB`, `TB`) powers of 1000;
            their case does not matter; without a unit the number counts bytes.

    Returns:
        Bytes, rounded down to a whole one.

    Raises:
        BudgetError: `amount` is no such int or text, is negative, or is past 2⁶³ − 1.

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
        return _count(Fraction(match[1].replace("_", "")), unit_bytes, amount)
    if isinstance(amount, bool) or not hasattr(amount, "__index__"):
        raise BudgetError(f"expected bytes as an int or text such as '8GiB', got {amount!r}")
    return _count(amount.__index__(), 1, amount)


def format_bytes(num_bytes: int) -> str:
    """Bytes for people, in binary units.

    Three significant digits where the amount is no whole number of its unit.

    >>> format_bytes(8589934592)
    '8 GiB'
    >>> format_bytes(1500)
    '1.46 KiB'
    >>> format_bytes(-512)
    '-512 B'
    """
    sign, magnitude = ("-", -num_bytes) if num_bytes < 0 else ("", int(num_bytes))
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit_bytes = _UNITS[name.lower()]
        if magnitude >= unit_bytes:
            amount = magnitude / unit_bytes
            text = (
                f"{amount:.0f}" if magnitude % unit_bytes == 0 or amount >= 100 else f"{amount:.3g}"
            )
            return f"{sign}{text} {name}"
    return f"{sign}{magnitude} B"
