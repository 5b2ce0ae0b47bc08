"""Where a stream stands in one process: the plan's cursor, and where the source stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.fingerprint import Plain

Stamp: TypeAlias = tuple[int, int, int, int, int, int | None, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamCursor(Cursor):
    """A place between two micro-batches of one process.

    `start` is the first item of the samples that are cut together, in the pass; `rounds` of their
    micro-batches are done.

    Attributes:
        first_epoch: from which passes are counted. With `batches_per_epoch` an epoch goes on where
            the one before ended.
        number: of the pass over the source.
        to_come: micro-batches in this epoch, of `batches_per_epoch`; `None`: not limited.
        finished: whether the epoch has no more.
        source: the source's own state at or before `start`, if it has one.
    """

    first_epoch: int
    number: int = 0
    to_come: int | None = None
    finished: bool = False
    source: dict[str, Any] | None = None

    @classmethod
    def beginning(cls, epoch: int, batches: int | None) -> StreamCursor:
        """Before the first micro-batch of an epoch that has so many."""
        return cls(epoch=epoch, first_epoch=epoch, to_come=batches, finished=batches == 0)

    def following(self, batches: int | None) -> StreamCursor:
        """After the last micro-batch: before the first one of the next epoch."""
        if batches is None:
            return self.beginning(self.epoch + 1, None)
        return replace(self, epoch=self.epoch + 1, to_come=batches, finished=batches == 0)

    def next_pass(self) -> StreamCursor:
        """Where the source starts over."""
        number = self.number + 1
        return replace(self, number=number, start=0, stop=0, rounds=0, source=None)

    def window(self, length: int) -> int:
        """The number of the window that it is in, counted over passes."""
        return self.start // length + self.number

    @property
    def is_beginning(self) -> bool:
        """Whether nothing of the source was read before it."""
        return not (self.start or self.rounds or self.number)

    def stamp(self) -> Stamp:
        """The cursor as a tuple, which is pickled beside every batch."""
        return (
            self.epoch,
            self.first_epoch,
            self.number,
            self.start,
            self.rounds,
            self.to_come,
            self.source,
        )

    @classmethod
    def of_stamp(cls, stamp: Stamp) -> StreamCursor:
        """The cursor after a micro-batch that was stamped."""
        epoch, first_epoch, number, start, rounds, to_come, source = stamp
        return cls(
            epoch=epoch,
            first_epoch=first_epoch,
            number=number,
            start=start,
            stop=start,
            rounds=rounds,
            to_come=to_come,
            finished=to_come == 0,
            source=source,
        )

    def to_plain(self, order: Plain, dealing: Plain) -> dict[str, Any]:
        """In plain JSON types, except for the source's own state.

        Args:
            order: what must be the same for positions to mean the same samples.
            dealing: what must be the same for samples to be cut and dealt the same way.
        """
        return {
            **Cursor.encode(self, None, order, dealing),
            "stop": self.start,
            "first_epoch": self.first_epoch,
            "pass": self.number,
            "to_come": self.to_come,
            "finished": self.finished,
            "source": self.source,
        }

    @classmethod
    def of_plain(cls, state: Mapping[str, Any], order: Plain) -> StreamCursor:
        """The cursor of a state, whose `dealing` the caller compares.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: it belongs to another stream or version.
        """
        known = Cursor.decode(state, order, {})
        try:
            first_epoch, number = int(state["first_epoch"]), int(state["pass"])
            to_come = None if state["to_come"] is None else int(state["to_come"])
            finished, source = bool(state["finished"]), state["source"]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state is malformed: {type(error).__name__}: {error}") from error
        if min(first_epoch, number, to_come or 0) < 0:
            raise StateError("the state is malformed: a number is below 0")
        return cls(
            epoch=known.epoch,
            start=known.start,
            stop=known.start,
            rounds=known.rounds,
            first_epoch=first_epoch,
            number=number,
            to_come=to_come,
            finished=finished,
            source=source,
        )


def check_dealing(cursor: StreamCursor, saved: object, mine: Plain) -> None:
    """Whether a process can go on from a cursor that was saved under another dealing.

    Raises:
        StateError: the state is malformed.
        StateMismatchError: it cannot.
    """
    if saved == mine or (cursor.is_beginning and not cursor.finished):
        return
    if not isinstance(saved, Mapping) or set(saved) != set(mine):
        raise StateError(f"the state is malformed: its dealing is {saved!r}")
    changed = "; ".join(
        f"{name}: saved {saved[name]!r}, now {mine[name]!r}"
        for name in mine
        if saved[name] != mine[name]
    )
    if cursor.rounds:
        raise StateMismatchError(
            f"{cursor.rounds} micro-batches of a window are done; another number of ranks or "
            f"workers, budget, cost, look-ahead or rule needs a window's boundary: {changed}"
        )
    same_worker = all(saved[name] == mine[name] for name in ("workers", "worker"))
    if not same_worker and (mine["split"] != "none" or saved["workers"] != 1):
        raise StateMismatchError(
            f"the state is that of worker {saved['worker']} of {saved['workers']}, here is "
            f"worker {mine['worker']} of {mine['workers']}"
        )
    if mine["split"] == "ranks" and saved["ranks"] != mine["ranks"]:
        raise StateMismatchError(
            f"each of {saved['ranks']} ranks had a part of the source, here are {mine['ranks']}"
        )
