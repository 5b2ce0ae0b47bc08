"""A part of `tests/fuzz.py`; and it finds what breaks a law."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz import KINDS, outcome
from torchbudget import GradAccumulator
from torchbudget.data.sampler import _Iteration
from torchbudget.data.stream.position import StreamLoop
from torchbudget.random_state import RandomState

# Of each kind, as many as take a second or two.
PART = {"samplers": 10, "streams": 6, "steps": 10, "fits": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_cases(kind: str) -> None:
    """No law is broken, and most cases are not refused."""
    found = [outcome(kind, number) for number in range(PART[kind])]
    assert [why for result, why, _ in found if result == "violation"] == []
    assert sum(result == "held" for result, *_ in found) > len(found) / 2


def repeat_an_index(next_of: Callable[[Any], list[int]]) -> Callable[[Any], list[int]]:
    def next_batch(iterator: _Iteration) -> list[int]:
        batch = next_of(iterator)
        return [*batch, batch[0]]

    return next_batch


def lose_a_sample(next_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda reader: next_of(reader)[1:]


def scale_the_loss(backward: Callable[..., None]) -> Callable[..., None]:
    return lambda accumulator, loss: backward(accumulator, loss * (1 + 1e-9))


def forget(_: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda _: None


BROKEN: dict[str, tuple[type, str, Callable[[Any], Any], str]] = {
    "samplers": (_Iteration, "__next__", repeat_an_index, "bytes of|max_batch_size|samples of"),
    "streams": (StreamLoop, "__next__", lose_a_sample, "missing|empty batch"),
    "steps": (GradAccumulator, "backward", scale_the_loss, "large batch's step"),
    "fits": (RandomState, "restore", forget, "epochs|statistics|not equal"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_law_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that comes twice, a lost sample, another gradient, other random numbers."""
    owner, name, breaking, law = BROKEN[kind]
    monkeypatch.setattr(owner, name, breaking(getattr(owner, name)))
    cases = (outcome(kind, number) for number in range(10))
    broken = next(why for result, why, _ in cases if result == "violation")
    assert re.search(law, broken)
