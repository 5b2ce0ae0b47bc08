"""Where a stream stands: in each process the plan's cursor, and where the source stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from torchbudget.checks import is_int
from torchbudget.data.stream.slot import WorkerSlot
from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.cursor import VERSION, check_meaning
from torchbudget.plan.fingerprint import Plain

_KEYS: Final = frozenset(["version", "order", "dealing", "turn", "workers"])
# What each worker's cursor is called in a state, in the order of its fields, but for the epoch.
_COLUMNS: Final = ("start", "rounds", "first_epoch", "pass", "to_come", "finished", "source")


class StreamCursor(NamedTuple):
    """A place between two micro-batches of one process.

    A tuple, since each batch comes with one: to make a dataclass takes ten times as long.

    Attributes:
        epoch: number of the epoch.
        start: the first item of the samples that are cut together, in the pass.
        rounds: how many of their micro-batches are done.
        first_epoch: from which passes are counted. With `batches_per_epoch` an epoch goes on where
            the one before ended.
        number: of the pass over the source.
        to_come: micro-batches in this epoch, of `batches_per_epoch`; `None`: not limited.
        finished: whether the epoch has no more.
        source: the source's own state at or before `start`, if it has one.
    """

    epoch: int
    start: int
    rounds: int
    first_epoch: int
    number: int
    to_come: int | None
    finished: bool
    source: dict[str, Any] | None

    @classmethod
    def beginning(cls, epoch: int, batches: int | None) -> StreamCursor:
        """Before the first micro-batch of an epoch that has so many."""
        return cls(epoch, 0, 0, epoch, 0, batches, batches == 0, None)

    def following(self, batches: int | None) -> StreamCursor:
        """After the last micro-batch: before the first one of the next epoch."""
        if batches is None:
            return self.beginning(self.epoch + 1, None)
        return self._replace(epoch=self.epoch + 1, to_come=batches, finished=batches == 0)

    def next_pass(self) -> StreamCursor:
        """Where the source starts over."""
        return self._replace(number=self.number + 1, start=0, rounds=0, source=None)

    def within(
        self, epoch: int, rounds: int, to_come: int | None, *, finished: bool
    ) -> StreamCursor:
        """After so many rounds of these samples, in an epoch that has so many batches to come."""
        _, start, _, first_epoch, number, _, _, source = self
        return StreamCursor(epoch, start, rounds, first_epoch, number, to_come, finished, source)

    def window(self, length: int) -> int:
        """The number of the window that it is in, counted over passes."""
        return self.start // length + self.number

    @property
    def position(self) -> Plain:
        """Where it stands, without the source's own state."""
        return {"epoch": self.epoch, "start": self.start, "rounds": self.rounds}

    @property
    def is_beginning(self) -> bool:
        """Whether nothing of the source was read before it."""
        return not (self.start or self.rounds or self.number or self.finished)


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
        rows = [cursor[1:] for cursor in self.cursors]
        plain = {
            "version": VERSION,
            "order": dict(order),
            "dealing": dict(self.dealing),
            "turn": self.turn,
            "workers": dict(zip(_COLUMNS, map(list, zip(*rows, strict=True)), strict=True)),
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
            rows = zip(*(workers[name] for name in _COLUMNS), strict=True)
            cursors = [_checked(StreamCursor(state["epoch"], *row)) for row in rows]
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
            return cursor._replace(to_come=slot.share(cursor.to_come))
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


def _checked(cursor: StreamCursor) -> StreamCursor:
    """A cursor of values that came from anywhere.

    Raises:
        TypeError: a number is none.
        ValueError: one is below 0.
    """
    *numbers, to_come, finished, _ = cursor
    numbers.append(0 if to_come is None else to_come)
    if not all(map(is_int, numbers)):
        raise TypeError(f"expected ints, got {numbers}")
    if min(numbers) < 0:
        raise ValueError("a number is below 0")
    return cursor._replace(finished=bool(finished))


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
