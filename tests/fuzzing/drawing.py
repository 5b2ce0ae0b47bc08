"""Random cases that anybody can make again from their number."""

from __future__ import annotations

import random
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from torchbudget import MeasuredCost

T = TypeVar("T", bound=tuple[Any, ...])


def chance_of(seed: int, kind: str, number: int) -> random.Random:
    """What a case is drawn from."""
    return random.Random(f"{seed} {kind} {number}")


def drawn(strategy: SearchStrategy[T], chance: random.Random) -> T:
    """What a strategy of the laws' tests makes, beginning with sizes and a cost.

    Measured costs, by which planning takes ten times as long, are one in ten.
    """
    while isinstance((found := _drawn(strategy, chance))[1], MeasuredCost):
        if chance.random() < 0.1:
            break
    return found


def _drawn(strategy: SearchStrategy[T], chance: random.Random) -> T:
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
