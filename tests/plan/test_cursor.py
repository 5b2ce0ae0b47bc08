"""The cursor: what it encodes, it decodes; another order is refused, another dealing is not."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import StateMismatchError
from torchbudget.errors import StateError
from torchbudget.plan.cursor import Cursor

ORDER: Any = {"samples": 9000, "sizes": "abc", "num_samples": 9000, "seed": 3}
DEALING: Any = {"ranks": 4, "budget_bytes": 100}
TOO_LONG = base64.b85encode(zlib.compress(bytes(2**20))).decode()


@st.composite
def cursors(draw: st.DrawFn) -> tuple[Cursor, Any]:
    """A cursor in a window of up to 70 samples, and what is left of that window."""
    length = draw(st.integers(0, 70))
    start = draw(st.integers(0, 9000 - length))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def mask() -> Any:
        return None if draw(st.booleans()) else rng.random(length) < 0.5

    dealt, left = mask(), mask()
    if dealt is not None:
        left = dealt if left is None else left & dealt
    rounds = draw(st.integers(0, length))
    counted = draw(st.booleans())
    cursor = Cursor(
        epoch=draw(st.integers(0, 10**6)),
        start=start,
        stop=start + length,
        left=dealt,
        rounds=rounds,
        done=rounds + draw(st.integers(0, 10**6)),
        least=draw(st.integers(0, 10**6)) if counted else None,
        spare=draw(st.integers(0, 10**6)) if counted else 0,
    )
    return cursor, left


@dataclass
class Dealt:
    """A plan, as far as a cursor asks it."""

    dealing: Any
    strips: int = 3

    def arranged(self, epoch: int, start: int, stop: int, strips: int) -> Any:
        return np.random.default_rng((epoch, start, strips)).permutation(stop - start)


PLAN = Dealt(DEALING)


def same(one: Any, other: Any) -> bool:
    return one is other is None or (one is not None and np.array_equal(one, other))


@given(cursors())
def test_what_is_encoded_is_decoded(case: Any) -> None:
    """Through JSON, under the same dealing: the very same place in the very same window."""
    cursor, left = case
    state = json.loads(json.dumps(cursor.encode(left, ORDER, PLAN)))
    found = Cursor.decode(state, ORDER, PLAN)
    names = ("epoch", "start", "stop", "rounds", "done", "least", "spare")
    assert [getattr(found, name) for name in names] == [getattr(cursor, name) for name in names]
    assert same(found.left, cursor.left)


@given(cursors())
def test_another_dealing_gets_what_is_left(case: Any) -> None:
    """Of the window it is told which samples are left, and no round of it is done.

    Those of the epoch that are done stay done; what is left was counted by other rules.
    """
    cursor, left = case
    state = cursor.encode(left, ORDER, PLAN)
    found = Cursor.decode(state, ORDER, Dealt(DEALING | {"ranks": 3}, strips=5))
    assert found.rounds == 0
    assert (found.start, found.stop) == (cursor.start, cursor.stop)
    assert same(found.left, left)
    assert (found.done, found.least, found.spare) == (cursor.done, None, 0)


def test_another_order_is_refused_by_name() -> None:
    state = Cursor(epoch=0).encode(None, ORDER, PLAN)
    with pytest.raises(StateMismatchError, match="seed: saved 3, now 4"):
        Cursor.decode(state, ORDER | {"seed": 4}, PLAN)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epoch": -1}, "epoch must be an int of at least 0"),
        ({"rounds": True}, "rounds must be an int of at least 0"),
        ({"start": 5}, "are not within"),
        ({"stop": 9001}, "are not within"),
        ({"rounds": 1}, "more than its window"),
        ({"stop": 1, "rounds": 1}, "more than the 0 done"),
        ({"done": 1.0}, "done must be an int of at least 0"),
        ({"least": "4"}, "least must be an int of at least 0"),
        ({"strips": None}, "strips must be an int"),
        ({"stop": 8, "left": "!"}, "window of 8 samples is malformed"),
        ({"stop": 8, "left": '"'}, "window of 8 samples is malformed"),
        ({"stop": 8, "left": TOO_LONG}, "window of 8 samples is malformed"),
        ({"version": 2}, "version 2, this torchbudget reads 3"),
        ({"order": None}, "order is malformed"),
    ],
    ids=str,
)
def test_a_malformed_state_is_refused(change: Any, match: str) -> None:
    state = Cursor(epoch=0).encode(None, ORDER, PLAN) | change
    with pytest.raises(StateError, match=match):
        Cursor.decode(state, ORDER, PLAN)
