"""Where a stream stands: in each process the plan's cursor, and where the source stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from torchbudget.checks import is_int
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.cursor import VERSION, Cursor, check_meaning
from torchbudget.plan.fingerprint import Plain

_KEYS: Final = frozenset(["version", "order", "dealing", "turn", "workers"])
# What is saved of each worker's cursor, by the names of its attributes.
_OF_WORKERS: Final = {
    "start": "start",
    "rounds": "rounds",
    "first_epoch": "first_epoch",
    "pass": "number",
    "to_come": "to_come",
    "finished": "finished",
    "source": "source",
}


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
        return not (self.start or self.rounds or self.number or self.finished)


class Position(NamedTuple):
    """A place in a stretch of samples that are cut together, in a tenth of a cursor's time.

    Attributes:
        samples: where they begin.
        epoch: of the place, as all that follows.
        rounds: see `Cursor`.
        to_come: see `StreamCursor`.
        finished: likewise.
    """

    samples: StreamCursor
    epoch: int
    rounds: int
    to_come: int | None
    finished: bool

    @classmethod
    def at(cls, cursor: StreamCursor) -> Position:
        """The place of a cursor."""
        return cls(cursor, cursor.epoch, cursor.rounds, cursor.to_come, cursor.finished)

    @property
    def cursor(self) -> StreamCursor:
        """The same as a cursor."""
        samples, epoch, rounds, to_come, finished = self
        return replace(samples, epoch=epoch, rounds=rounds, to_come=to_come, finished=finished)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Where the processes stand that read a stream on one rank.

    Attributes:
        cursors: of each worker, by number; or of one process alone.
        dealing: what must be the same for the first of them to go on within a window; for the
            others the same but the number of the worker.
        turn: the worker whose batch comes next.
    """

    cursors: Sequence[StreamCursor]
    dealing: Plain
    turn: int = 0

    @property
    def epoch(self) -> int:
        """That they read."""
        return self.cursors[0].epoch

    @property
    def is_beginning(self) -> bool:
        """Whether nothing of the source was read before."""
        return all(cursor.is_beginning for cursor in self.cursors)

    def to_plain(self, order: Plain, *, seeks: bool) -> dict[str, Any]:
        """In plain JSON types, except for the source's own states; some 30 bytes a worker.

        Args:
            order: what must be the same for positions to mean the same samples.
            seeks: whether the source goes on by its own state, or is skipped through.

        Where each rank stands elsewhere, the state is named after its rank, so that those of all
        ranks have their place in one checkpoint.
        """
        workers = {
            name: [getattr(cursor, field) for cursor in self.cursors]
            for name, field in _OF_WORKERS.items()
        }
        plain = {
            "version": VERSION,
            "order": dict(order),
            "dealing": dict(self.dealing),
            "turn": self.turn,
            "workers": workers,
        }
        shown = {"epoch": self.epoch, "goes_on_by": "seeking" if seeks else "skipping"}
        # In a tuple, since torch.distributed.checkpoint takes lists and mappings apart: it loads
        # as many workers as the stream has that loads, and of each value that of any one rank.
        return shown | {_name_of(self.dealing): (plain,)}

    @classmethod
    def of_plain(cls, state: Any, order: Plain) -> StreamState:
        """The state that was saved.

        Raises:
            StateError: it is malformed.
            StateMismatchError: it belongs to another stream or version.
        """
        plain = _processes_of(state)
        check_meaning(plain, _KEYS, order)
        dealing, turn, workers = plain["dealing"], plain["turn"], plain["workers"]
        try:
            columns = [workers[name] for name in _OF_WORKERS]
            rows = list(zip(*columns, strict=True))
            cursors = [_cursor(state["epoch"], *row) for row in rows]
            if turn not in range(len(cursors)) or not isinstance(dealing, Mapping):
                raise ValueError(f"turn {turn!r} of {len(cursors)} workers, dealing {dealing!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state is malformed: {type(error).__name__}: {error}") from error
        return cls(cursors=cursors, dealing=dict(dealing), turn=turn)

    def cursor_of(self, slot: WorkerSlot, dealing: Plain) -> StreamCursor:
        """Where a process goes on.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: this process cannot go on from it.
        """
        several = len(self.cursors) > 1
        if several and len(self.cursors) != slot.workers:
            raise StateMismatchError(
                f"the state is that of {len(self.cursors)} workers, here are {slot.workers}; it "
                f"goes on with num_workers={len(self.cursors)}"
            )
        number = slot.worker if several else 0
        cursor, saved = self.cursors[number], self.dealing
        if several:
            saved = {**saved, "worker": number}
        _check_dealing(cursor, saved, dealing)
        if cursor.to_come is not None and saved["workers"] != slot.workers:
            return replace(cursor, to_come=slot.share(cursor.to_come))
        return cursor


def _name_of(dealing: Plain) -> str:
    """What a state's processes are called: those of one rank, or of all where they stand alike."""
    rank = dealing["rank"]
    return "processes" if rank is None else f"rank {rank} of {dealing['ranks']}"


def _processes_of(state: Any) -> Any:
    """What a state says of its processes.

    Raises:
        StateError: it is none, or it has those of several ranks.
    """
    named = []
    if isinstance(state, Mapping):
        named = [name for name in state if name == "processes" or str(name).startswith("rank ")]
    if len(named) > 1:
        raise StateError(f"the state has several ranks' positions, pass that of one: {named}")
    value = state[named[0]] if named else None
    if not isinstance(value, (list, tuple)) or len(value) != 1:
        raise StateError("expected what BudgetedIterableDataset.state_dict() returned")
    return value[0]


def _cursor(
    epoch: int,
    start: int,
    rounds: int,
    first_epoch: int,
    number: int,
    to_come: int | None,
    finished: bool,
    source: dict[str, Any] | None,
) -> StreamCursor:
    """A worker's cursor, of values that may be anything.

    Raises:
        TypeError: a number is none.
        ValueError: one is below 0.
    """
    numbers = [epoch, start, rounds, first_epoch, number, 0 if to_come is None else to_come]
    if not all(map(is_int, numbers)):
        raise TypeError(f"expected ints, got {numbers}")
    if min(numbers) < 0:
        raise ValueError("a number is below 0")
    return StreamCursor(
        epoch=epoch,
        start=start,
        stop=start,
        rounds=rounds,
        first_epoch=first_epoch,
        number=number,
        to_come=to_come,
        finished=bool(finished),
        source=source,
    )


def _check_dealing(cursor: StreamCursor, saved: object, mine: Plain) -> None:
    """Whether a process can go on from a cursor that was saved under another dealing.

    Raises:
        StateError: the state is malformed.
        StateMismatchError: it cannot.
    """
    if not isinstance(saved, Mapping) or set(saved) != set(mine):
        raise StateError(f"the state is malformed: its dealing is {saved!r}")
    if saved == mine or cursor.is_beginning:
        return
    changed = "; ".join(
        f"{name}: saved {saved[name]!r}, now {mine[name]!r}"
        for name in mine
        if saved[name] != mine[name]
    )
    if cursor.rounds:
        raise StateMismatchError(
            f"{cursor.rounds} micro-batches of a window are done; another number of ranks or "
            "workers, budget, cost, predicate, size, transforms, look-ahead or rule needs a "
            f"window's boundary: {changed}"
        )
    same_worker = all(saved[name] == mine[name] for name in ("workers", "worker"))
    if not same_worker and (mine["split"] != "none" or saved["workers"] != 1):
        raise StateMismatchError(
            f"the state is that of worker {saved['worker']} of {saved['workers']}, here is "
            f"worker {mine['worker']} of {mine['workers']}"
        )
    if mine["split"] == "ranks" and any(saved[name] != mine[name] for name in ("ranks", "rank")):
        raise StateMismatchError(
            f"each of {saved['ranks']} ranks had a part of the source, and this is the state of "
            f"rank {saved['rank']}; here is rank {mine['rank']} of {mine['ranks']}"
        )
