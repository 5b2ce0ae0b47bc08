"""`Cursor`: the place where a run stands in an epoch, and its encoding as plain JSON types."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.fingerprint import Plain, differences, fingerprint
from torchbudget.plan.mixture import Turns

if TYPE_CHECKING:
    from torchbudget.plan.plan import Plan

BoolArray: TypeAlias = npt.NDArray[np.bool_]

# Samples in a part, if a window is planned again. A state then has one bit for each sample of the
# window, and a second bit only for samples of the unfinished part: 1.3 KB of text. A window has at
# most 16 parts: with thousands of ranks, a smaller part would not fill a batch on each rank.
PART: Final = 8192
_MOST_PARTS: Final = 16

# Fields of a state that are integers of at least 0.
PLACE: Final = ("epoch", "first", "number", "start", "stop", "rounds", "done", "steps", "parts")
_KEYS: Final = (*PLACE, "groups", "turns", "dealt", "left", "order", "dealing")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cursor:
    """A place between two micro-batches of an epoch.

    Positions of the pass before `start` are done, those from `stop` on are untouched. The positions
    between are one window. It was planned as a whole; or, after a change of ranks, budget or cost,
    the samples `left` of it were planned again, in `parts`, one after the other. `rounds` of its
    rounds are done.

    Attributes:
        epoch: number of the epoch.
        first: epoch from which passes over the data are counted. Default: the epoch itself.
        number: of the pass, from 0. Only epochs of a given length have several passes.
        start: first position of the window.
        stop: the position after its last one.
        left: true for the window's samples in the plan, shape `(samples,)`; `None`: all of them.
        rounds: micro-batches of the window that each rank is done with.
        done: micro-batches of the epoch that each rank is done with, those included, as the ranks
            were then.
        steps: windows of the epoch that are done.
        parts: number of parts in which the window is planned, 1 unless it is planned again.
        groups: samples of each group in windows before this one, if windows are of one group
            each: positions of other groups than the window's are done, too. `None`: none.
        turns: how the sources of a mixture take turns up to here; `None`: nothing was drawn, or
            there is no mixture.
        plan: the plan of the window; `None` between windows.
    """

    epoch: int
    first: int = -1
    number: int = 0
    start: int = 0
    stop: int = 0
    left: BoolArray | None = None
    rounds: int = 0
    done: int = 0
    steps: int = 0
    parts: int = 1
    groups: tuple[int, ...] | None = None
    turns: Turns | None = None
    plan: Plan | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.first < 0:
            object.__setattr__(self, "first", self.epoch)

    @property
    def pass_key(self) -> tuple[int, int]:
        """The key of the order of the present pass."""
        return self.first, self.number

    @property
    def place(self) -> tuple[int, int, int]:
        """Epoch, pass, and positions in windows up to the present one."""
        before = self.start if self.groups is None else sum(self.groups)
        return self.epoch, self.number, before + self.stop - self.start

    def next_epoch(self) -> Cursor:
        """The beginning of the next epoch, with a fresh pass."""
        return Cursor(epoch=self.epoch + 1)

    def next_pass(self) -> Cursor:
        """The beginning of the next pass, in the same epoch."""
        kept = {name: getattr(self, name) for name in ("epoch", "first", "done", "steps")}
        return Cursor(**kept, number=self.number + 1)

    def dealt_by(self, plan: Plan) -> Cursor:
        """The same place under another plan, which plans the rest of the window again."""
        if self.plan is None or self.plan is plan:
            return self
        return self.dealt_anew(self.plan.left_of(self), plan)

    def dealt_anew(self, left: BoolArray | None, plan: Plan) -> Cursor:
        """The same place under another plan, which has not planned the rest of the window yet."""
        parts = 1 if left is None else min(-(-int(left.sum()) // PART), _MOST_PARTS)
        return replace(self, left=left, rounds=0, parts=parts, plan=plan)

    def encode(self, order: Plain) -> dict[str, Any]:
        """The cursor as plain JSON types.

        Their size does not depend on the data set: some hundred bytes, two numbers for each source
        of a mixture, and inside a window at most one bit for each of its samples, so that other
        ranks can take over. Where it was dealt anew, each sample of the part that was begun has
        another bit.

        Args:
            order: what must be the same for positions to mean the same samples.
        """
        plan, turns, dealt, left = self.plan, self.turns, None, None
        if plan is not None:
            dealt, left = self.left, plan.left_of(self)
            left = left if left is None or dealt is None else left[dealt]
        state = {
            **{name: getattr(self, name) for name in PLACE},
            "groups": None if self.groups is None else list(self.groups),
            "turns": None if turns is None else [list(turns.drawn), list(turns.weights)],
            "dealt": None if dealt is None else as_text(dealt),
            "left": None if left is None else as_text(left),
            "order": dict(order),
            "dealing": None if plan is None else plan.dealing_digest,
        }
        return {**state, "digest": _digest(state)}

    @classmethod
    def decode(cls, state: Mapping[str, Any], order: Plain, plan: Plan) -> Cursor:
        """The cursor of a state, under this order and plan.

        Under the same dealing the cursor is the very same. Under other ranks, another budget or
        another rule, what is left of the window is dealt anew.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: it belongs to another data set or order.
        """
        _check(state, order)
        place = {name: state[name] for name in PLACE}
        groups = None if state["groups"] is None else tuple(state["groups"])
        turns = None if state["turns"] is None else Turns(*map(tuple, state["turns"]))
        if state["start"] == state["stop"]:
            return cls(**place, groups=groups, turns=turns)
        same = state["dealing"] == plan.dealing_digest
        found = cls(**place, groups=groups, turns=turns, plan=plan)
        samples = len(plan.order.indices(found.pass_key, found.start, found.stop, turns))
        left = None
        for text in (state["dealt"], None if same else state["left"]):
            if text is not None:
                left = np.ones(samples, np.bool_) if left is None else left
                left[left] = as_mask(text, int(left.sum()))
        return replace(found, left=left) if same else found.dealt_anew(left, plan)


def _check(state: object, order: Plain) -> None:
    """Check that a state is one, and that its positions mean the same samples here.

    Raises:
        StateError: the state is malformed.
        StateMismatchError: it belongs to another data set or order.
    """
    if not isinstance(state, Mapping) or state.get("digest") != _digest(state):
        got = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise StateError(f"expected the unchanged result of state_dict(), got {got}")
    if differing := differences(state["order"], order, order):
        raise StateMismatchError(
            "the state belongs to another data set or order, so its position means other samples: "
            + differing
        )


def _digest(state: Mapping[str, Any]) -> str:
    parts = [state.get(key) for key in _KEYS]
    return fingerprint(json.dumps(parts, sort_keys=True, default=repr))


def as_text(mask: BoolArray) -> str:
    """The bits of a mask, as text."""
    return base64.b85encode(zlib.compress(np.packbits(mask).tobytes(), 9)).decode("ascii")


def as_mask(text: str, length: int) -> BoolArray:
    """The mask of a text."""
    packed = zlib.decompress(base64.b85decode(text))
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=length).astype(np.bool_)
