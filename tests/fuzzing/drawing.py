"""Random cases that anybody can make again from their number."""

from __future__ import annotations

import random
from typing import TypeVar

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

T = TypeVar("T")


def chance_of(seed: int, kind: str, number: int) -> random.Random:
    """What a case is drawn from."""
    return random.Random(f"{seed} {kind} {number}")


def drawn(strategy: SearchStrategy[T], chance: random.Random) -> T:
    """A value of a strategy that the laws are tested with, drawn by `chance` alone."""
    found: list[T] = []

    @settings(database=None)
    @given(strategy)
    def take(value: T) -> None:
        found.append(value)

    enough = 4000
    while not found:
        take.hypothesis.fuzz_one_input(chance.randbytes(enough))  # type: ignore[attr-defined]
        enough *= 2
    return found[0]
