"""Positions as plain JSON, and back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.cursor import BoolArray, Position
from torchbudget.plan.fingerprint import Plain
from torchbudget.plan.plan import Plan

VERSION: Final = 1
_KEYS: Final = frozenset(
    ["version", "epoch", "start", "stop", "rounds", "dealt", "left", "order", "dealing"]
)
_MEANING: Final = {
    "samples": "the number of samples",
    "sizes": "the samples' sizes",
    "skipped": "the samples that are skipped as oversize",
    "weights": "the weights",
}


def encode(plan: Plan, position: Position, order: Plain) -> dict[str, Any]:
    """A position as plain JSON types.

    Its size does not depend on the data set or the position: some hundred bytes, and inside a
    window one bit for each of its samples, so that another number of ranks can take over.
    """
    return {
        "version": VERSION,
        "epoch": position.epoch,
        "start": position.start,
        "stop": position.stop,
        "rounds": position.rounds,
        "dealt": _text(position.left),
        "left": _text(plan.left_of(position)),
        "order": dict(order),
        "dealing": dict(plan.dealing),
    }


def decode(state: Mapping[str, Any], order: Plain, dealing: Plain) -> Position:
    """The position that a state names, for a sampler of this order and dealing.

    Where the same dealing goes on, the position is the very same. Where the ranks, the budget or
    another rule changed, what is left of the window is dealt anew.

    Raises:
        StateError: the state is malformed.
        StateMismatchError: it belongs to another data set, order or version.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"expected a mapping from state_dict(), got {type(state).__name__}")
    missing = sorted(_KEYS - set(state))
    if missing:
        raise StateError(f"the state lacks {', '.join(missing)}: it is no sampler's state_dict()")
    if state["version"] != VERSION:
        raise StateMismatchError(
            f"the state has version {state['version']!r}, this torchbudget reads {VERSION}"
        )
    _check_order(state["order"], order)
    epoch, start, stop, rounds = (
        _natural(state, key) for key in ("epoch", "start", "stop", "rounds")
    )
    positions = order["num_samples"]
    if not start <= stop <= int(positions or 0):
        raise StateError(f"positions {start} … {stop} are not within the epoch's {positions}")
    if rounds > stop - start:
        raise StateError(
            f"the state's rounds, {rounds}, are more than its window's {stop - start} samples"
        )
    if state["dealing"] == dealing:
        dealt = _mask(state["dealt"], stop - start)
        return Position(epoch=epoch, start=start, stop=stop, left=dealt, rounds=rounds)
    return Position(epoch=epoch, start=start, stop=stop, left=_mask(state["left"], stop - start))


def _check_order(saved: object, mine: Plain) -> None:
    if not isinstance(saved, Mapping) or set(saved) != set(mine):
        raise StateError("the state's order is malformed: it is no sampler's state_dict()")
    differing = [name for name in mine if saved[name] != mine[name]]
    if differing:
        told = "; ".join(
            f"{_MEANING.get(name, name)}: saved {saved[name]!r}, now {mine[name]!r}"
            for name in differing
        )
        raise StateMismatchError(
            f"the state belongs to another data set or order, so its position means other samples: "
            f"{told}"
        )


def _natural(state: Mapping[str, Any], key: str) -> int:
    value = state[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateError(f"the state's {key} must be an int of at least 0, got {value!r}")
    return value


def _text(mask: BoolArray | None) -> str | None:
    return None if mask is None else base64.b64encode(np.packbits(mask).tobytes()).decode("ascii")


def _mask(text: object, length: int) -> BoolArray | None:
    if text is None:
        return None
    try:
        packed = np.frombuffer(base64.b64decode(str(text), validate=True), np.uint8)
    except binascii.Error:
        packed = np.empty(0, np.uint8)
    if len(packed) != -(-length // 8):
        raise StateError(f"the state's window of {length} samples is malformed")
    return np.unpackbits(packed, count=length).astype(np.bool_)
