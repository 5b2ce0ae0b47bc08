"""Where in an epoch a run stands: one frozen value, its encoding as plain JSON types, and back."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.checks import is_int
from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.fingerprint import MEANING, Plain

BoolArray: TypeAlias = npt.NDArray[np.bool_]

VERSION: Final = 2
_PLACE: Final = ("epoch", "start", "stop", "rounds", "done", "spare")  # natural numbers
_KEYS: Final = frozenset([*_PLACE, "version", "least", "dealt", "left", "order", "dealing"])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cursor:
    """A place between two micro-batches of an epoch.

    The epoch's positions before `start` are done, those from `stop` on are untouched. Those between
    are one window that was dealt: as a whole, or what was `left` of it when another number of ranks
    or another budget took over; `rounds` of its rounds are done.

    Attributes:
        epoch: number of the epoch.
        start: first position of the window.
        stop: the position after its last one.
        left: which of its positions were dealt, shape `(stop − start,)`; `None`: all.
        rounds: how many of its micro-batches each rank is done with.
        done: micro-batches of the epoch that each rank is done with, those included, as the ranks
            were then.
        least: micro-batches that each rank needs from the window's first one to the epoch's last;
            `None`: they were not counted, or not by these rules.
        spare: those that it gets beyond, to have the number that the epoch was to have.
    """

    epoch: int
    start: int = 0
    stop: int = 0
    left: BoolArray | None = None
    rounds: int = 0
    done: int = 0
    least: int | None = None
    spare: int = 0

    @property
    def position(self) -> Plain:
        """Where it stands, without what was left of a window."""
        return {"epoch": self.epoch, "start": self.start, "rounds": self.rounds}

    def same_window(self, other: Cursor) -> bool:
        """Whether both stand in the same window of the same epoch, dealt alike."""
        return self._window() == other._window() and self.left is other.left

    def _window(self) -> tuple[int | None, ...]:
        return self.epoch, self.start, self.stop, self.least, self.spare

    @property
    def is_uncounted(self) -> bool:
        """Whether it is within an epoch whose micro-batches were not counted by these rules."""
        return bool(self.done) and self.least is None

    def dealt_anew(self, left: BoolArray | None) -> Cursor:
        """The same place, under other rules: what is left of the window is dealt once more."""
        return replace(self, left=left, rounds=0, least=None, spare=0)

    def encode(self, left: BoolArray | None, order: Plain, dealing: Plain) -> dict[str, Any]:
        """The cursor as plain JSON types.

        Its size does not depend on the data set or the position: some hundred bytes, and inside a
        window one bit for each of its samples, so that another number of ranks can take over.

        Args:
            left: which of the window's positions are still to come, shape `(stop − start,)`;
                `None`: all.
            order: what must be the same for positions to mean the same samples.
            dealing: what must be the same for the window to be dealt the same way.
        """
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "start": self.start,
            "stop": self.stop,
            "rounds": self.rounds,
            "done": self.done,
            "least": self.least,
            "spare": self.spare,
            "dealt": _text(self.left),
            "left": _text(left),
            "order": dict(order),
            "dealing": dict(dealing),
        }

    @classmethod
    def decode(cls, state: Mapping[str, Any], order: Plain, dealing: Plain) -> Cursor:
        """The cursor that a state names, under this order and dealing.

        Where the same dealing goes on, the cursor is the very same. Where the ranks, the budget or
        another rule changed, what is left of the window is dealt anew.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: it belongs to another data set, order or version.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"expected a mapping from state_dict(), got {type(state).__name__}")
        missing = sorted(_KEYS - set(state))
        if missing:
            raise StateError(
                f"the state lacks {', '.join(missing)}: it is no sampler's state_dict()"
            )
        if state["version"] != VERSION:
            raise StateMismatchError(
                f"the state has version {state['version']!r}, this torchbudget reads {VERSION}"
            )
        _check_order(state["order"], order)
        epoch, start, stop, rounds, done, spare = (_natural(state, key) for key in _PLACE)
        positions = order["num_samples"]  # `None`: it is unknown, and so is where windows end
        if positions is None:
            return cls(epoch=epoch, start=start, stop=start, rounds=rounds)
        if not start <= stop <= int(positions):
            raise StateError(f"positions {start} … {stop} are not within the epoch's {positions}")
        if rounds > stop - start:
            raise StateError(
                f"the state's rounds, {rounds}, are more than its window's {stop - start} samples"
            )
        if rounds > done:
            raise StateError(f"the state's rounds, {rounds}, are more than the {done} done")
        known = cls(
            epoch=epoch,
            start=start,
            stop=stop,
            left=_mask(state["dealt"], stop - start),
            rounds=rounds,
            done=done,
            least=None if state["least"] is None else _natural(state, "least"),
            spare=spare,
        )
        if state["dealing"] == dealing:
            return known
        return known.dealt_anew(_mask(state["left"], stop - start))


def _check_order(saved: object, mine: Plain) -> None:
    if not isinstance(saved, Mapping) or set(saved) != set(mine):
        raise StateError("the state's order is malformed: it is no sampler's state_dict()")
    differing = "; ".join(
        f"{MEANING.get(name, name)}: saved {saved[name]!r}, now {mine[name]!r}"
        for name in mine
        if saved[name] != mine[name]
    )
    if differing:
        raise StateMismatchError(
            "the state belongs to another data set or order, so its position means other samples: "
            + differing
        )


def _natural(state: Mapping[str, Any], key: str) -> int:
    value = state[key]
    if not is_int(value) or value < 0:
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
