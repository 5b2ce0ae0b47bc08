"""Where in an epoch a run stands: one frozen value, its encoding as plain JSON types, and back."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.checks import is_int
from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.fingerprint import MEANING, Plain

BoolArray: TypeAlias = npt.NDArray[np.bool_]

VERSION: Final = 3
_PLACE: Final = ("epoch", "start", "stop", "rounds", "done", "spare", "strips")  # natural numbers
_KEYS: Final = frozenset([*_PLACE, "version", "least", "dealt", "left", "order", "dealing"])


class DealsWindows(Protocol):
    """What a cursor asks of a plan."""

    @property
    def dealing(self) -> Plain:
        """What must be the same for a window to be cut and dealt the same way."""

    @property
    def strips(self) -> int:
        """By which windows of several axes are cut: see `arrange`."""

    def arranged(self, epoch: int, start: int, stop: int, strips: int) -> IntArray:
        """The positions of a window in the order in which so many strips cut it.

        Shape `(stop − start,)`; a function of the sizes.
        """


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

    def encode(self, left: BoolArray | None, order: Plain, plan: DealsWindows) -> dict[str, Any]:
        """The cursor as plain JSON types.

        Its size does not depend on the data set or the position: some hundred bytes, and inside a
        window at most one bit for each of its samples, so that another number of ranks can take
        over. In the order in which a window is cut, micro-batches are runs: their lengths are what
        is saved.

        Args:
            left: which of the window's positions are still to come, shape `(stop − start,)`;
                `None`: all that were dealt.
            order: what must be the same for positions to mean the same samples.
            plan: by which the window was dealt.
        """
        dealt = self.left
        if left is not None:
            positions = plan.arranged(self.epoch, self.start, self.stop, plan.strips)
            left = left[positions]
            if dealt is not None:
                dealt = dealt[positions]
                left = left[dealt]
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "start": self.start,
            "stop": self.stop,
            "rounds": self.rounds,
            "done": self.done,
            "least": self.least,
            "spare": self.spare,
            "strips": plan.strips,
            "dealt": _text(dealt),
            "left": _text(left),
            "order": dict(order),
            "dealing": dict(plan.dealing),
        }

    @classmethod
    def decode(cls, state: Mapping[str, Any], order: Plain, plan: DealsWindows) -> Cursor:
        """The cursor that a state names, under this order and plan.

        Where the same dealing goes on, the cursor is the very same. Where the ranks, the budget or
        another rule changed, what is left of the window is dealt anew.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: it belongs to another data set, order or version.
        """
        check_meaning(state, _KEYS, order)
        epoch, start, stop, rounds, done, spare, strips = (_natural(state, key) for key in _PLACE)
        positions = int(order["num_samples"] or 0)
        if not start <= stop <= positions:
            raise StateError(f"positions {start} … {stop} are not within the epoch's {positions}")
        if rounds > stop - start:
            raise StateError(
                f"the state's rounds, {rounds}, are more than its window's {stop - start} samples"
            )
        if rounds > done:
            raise StateError(f"the state's rounds, {rounds}, are more than the {done} done")
        dealt = left = None
        if state["left"] is not None:
            among = plan.arranged(epoch, start, stop, max(strips, 1))
            if state["dealt"] is not None:
                among = among[_mask(state["dealt"], stop - start)]
                dealt = _spread(among, stop - start)
            left = _spread(among[_mask(state["left"], len(among))], stop - start)
        known = cls(
            epoch=epoch,
            start=start,
            stop=stop,
            left=dealt,
            rounds=rounds,
            done=done,
            least=None if state["least"] is None else _natural(state, "least"),
            spare=spare,
        )
        return known if state["dealing"] == plan.dealing else known.dealt_anew(left)


def check_meaning(state: object, keys: frozenset[str], order: Plain) -> None:
    """Check that a state is one, and that its positions mean the same samples here.

    Args:
        state: with a version, an order and what else it consists of.
        keys: of all that.
        order: what must be the same.

    Raises:
        StateError: the state is malformed.
        StateMismatchError: it belongs to another data set, order or version.
    """
    if not isinstance(state, Mapping):
        raise StateError(f"expected a mapping from state_dict(), got {type(state).__name__}")
    if state.get("version", VERSION) != VERSION:
        raise StateMismatchError(
            f"the state has version {state['version']!r}, this torchbudget reads {VERSION}"
        )
    missing = sorted(keys - set(state))
    if missing:
        raise StateError(
            f"the state lacks {', '.join(missing)}: it is no sampler's or stream's state_dict()"
        )
    saved = state["order"]
    if not isinstance(saved, Mapping) or set(saved) != set(order):
        raise StateError(
            "the state's order is malformed: it is no sampler's or stream's state_dict()"
        )
    differing = "; ".join(
        f"{MEANING.get(name, name)}: saved {saved[name]!r}, now {order[name]!r}"
        for name in order
        if saved[name] != order[name]
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
    """The lengths of its runs in a byte each, the first one of those that are false.

    They are Huffman coded: of a mask without any pattern that takes a bit for each of its values.
    """
    if mask is None:
        return None
    ends = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0))
    runs = np.diff(ends, prepend=0, append=len(mask))
    # A longer run is several, with runs of none of the other kind between them: 255, 0, 255, 0, 9.
    more = np.maximum(runs - 1, 0) // 255
    number = np.repeat(np.arange(len(runs)), 2 * more + 1)
    lengths = np.where((np.arange(len(number)) - number) % 2, 0, 255).astype(np.uint8)
    lengths[np.cumsum(2 * more + 1) - 1] = runs - 255 * more
    coder = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return base64.b85encode(coder.compress(lengths.tobytes()) + coder.flush()).decode("ascii")


def _mask(text: object, length: int) -> BoolArray:
    try:
        coded = base64.b85decode(str(text))
        # No more is made of what may come from anywhere.
        lengths = np.frombuffer(zlib.decompressobj().decompress(coded, length + 2), np.uint8)
    except (ValueError, zlib.error):
        lengths = np.empty(0, np.uint8)
    if lengths.sum() != length:
        raise StateError(f"the state's window of {length} samples is malformed")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)


def _spread(positions: IntArray, length: int) -> BoolArray:
    mask = np.zeros(length, np.bool_)
    mask[positions] = True
    return mask
