"""The state of a stream: a cursor for each of its processes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from torchbudget.checks import is_int
from torchbudget.cost.protocol import IntArray
from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.cursor import BoolArray, as_mask, as_text
from torchbudget.plan.fingerprint import Plain, differences

Split: TypeAlias = Literal["none", "workers", "ranks"]

# Options without which a position means other samples.
_ORDER: Final = ("split", "shuffle", "seed", "window", "sized", "batches_per_epoch")
# Facts of a process without which it reads other samples in the rest of a part that was begun.
_READING: Final = ("worker", "workers", "rank", "ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlot:
    """One of the processes that share a source.

    Attributes:
        worker: number of the `DataLoader` worker on its rank.
        workers: on each rank, at least 1.
        rank: rank of the process.
        ranks: number of them.
    """

    worker: int
    workers: int
    rank: int
    ranks: int

    def part(self, split: Split) -> tuple[int, int]:
        """Return the number of the source's part that it reads, and the number of parts."""
        if split == "ranks":
            return self.rank * self.workers + self.worker, self.ranks * self.workers
        return (self.worker, self.workers) if split == "workers" else (0, 1)


def share_of(batches: int | None, worker: int, workers: int) -> int | None:
    """Return a worker's number of `batches`: a loader takes one from each worker in turn."""
    return None if batches is None else (batches + workers - 1 - worker) // workers


@dataclass(frozen=True, slots=True, eq=False)
class StreamPart:
    """The samples that are read and cut together from a cursor on.

    Attributes:
        checksum: of their sizes.
        done_after: number of the rounds after which each sample is done, in the order in which they
            were read; 0: no round takes it.
        dealt: which of the first samples were left to be dealt by this cut, where an earlier cut
            had dealt others; `None`: all.
    """

    checksum: int | None
    done_after: IntArray
    dealt: BoolArray | None = None

    def to_plain(self, rounds: int) -> list[Any]:
        """Return plain JSON types: a bit for each sample that is left after some rounds."""
        masks = self.dealt, self.done_after > rounds
        return [self.checksum, *(m if m is None else [len(m), as_text(m)] for m in masks)]

    @classmethod
    def of_plain(cls, plain: Any, rounds: int) -> StreamPart:
        """Return the part that was saved after some rounds."""
        checksum, dealt, (number, left) = plain
        done_after = np.where(as_mask(left, number), rounds + 1, 0)
        return cls(checksum, done_after, dealt and as_mask(dealt[1], dealt[0]))


class StreamCursor(NamedTuple):
    """A place between two micro-batches of one process.

    A tuple, since each batch has one: a dataclass takes ten times as long to make.

    Attributes:
        epoch: number of the epoch.
        start: the first item of the samples that are cut together, in the pass.
        rounds: number of their micro-batches that are done.
        first_epoch: from which passes are counted. With `batches_per_epoch` an epoch goes on where
            the one before ended.
        number: number of the pass over the source.
        to_come: micro-batches in this epoch; `None`: those that one pass has.
        source: the source's own state at or before `checked`, if it has one.
        checked: the first item of the samples that were begun; with no round done, of those before.
        checksum: of their sizes; with rounds done, of their cuts too; `None`: none were begun.
        part: the samples that are cut together; between two parts, those that an earlier cut has
            left of some; `None`: unknown, or all of them.
    """

    epoch: int
    start: int = 0
    rounds: int = 0
    first_epoch: int = 0
    number: int = 0
    to_come: int | None = None
    source: dict[str, Any] | None = None
    checked: int = 0
    checksum: int | None = None
    part: StreamPart | None = None

    def following(self, batches: int | None) -> StreamCursor:
        """Return the place before the first micro-batch of the next epoch."""
        if batches is None:
            return StreamCursor(self.epoch + 1, first_epoch=self.epoch + 1)
        return self._replace(epoch=self.epoch + 1, to_come=batches)

    def next_pass(self) -> StreamCursor:
        """Return the place where the source starts over."""
        number = self.number + 1
        return StreamCursor(self.epoch, 0, 0, self.first_epoch, number, self.to_come)

    def dealt_anew(self, checksum: int | None, left: BoolArray) -> StreamCursor:
        """Return the place at which samples that an earlier cut has left are cut again.

        Args:
            checksum: of the sizes of the samples from here on that the earlier cut has seen.
            left: which of them are left.
        """
        part = StreamPart(checksum, left.astype(np.int64), left)
        return self._replace(rounds=0, checksum=None, part=part)

    def window(self, length: int) -> int:
        """Number of the window that it is in, counted over passes."""
        return self.start // length + self.number


@dataclass(slots=True, kw_only=True)
class StreamState:
    """The places of the processes that read a stream on one rank.

    Not frozen, which would double the time of a tracked loop's step. Nothing changes one.

    Attributes:
        cursors: cursors of the workers, by number; or that of one process alone.
        dealing: the options of the first of them, which must be the same to go on within a window.
            Those of the others differ in the number of the worker alone.
        turn: the worker of the next batch; of one process alone, that of the first process.
    """

    cursors: list[StreamCursor]
    dealing: Plain
    turn: int = 0

    @property
    def epoch(self) -> int:
        """The epoch that the processes read."""
        return self.cursors[0].epoch

    def moved(self, worker: int, cursor: StreamCursor) -> StreamState:
        """Return the state after a batch of a worker, which stands there now."""
        cursors = self.cursors.copy()
        if cursor.rounds and cursor.part is None:  # it was sent with the part's first batch
            cursor = cursor._replace(part=cursors[worker].part)
        cursors[worker] = cursor
        turn = (worker + 1) % len(cursors)
        return StreamState(cursors=cursors, dealing=self.dealing, turn=turn)

    @property
    def is_beginning(self) -> bool:
        """True if nothing of the source was read before."""
        return not any(
            at.start or at.rounds or at.number or at.part or at.to_come == 0 for at in self.cursors
        )

    def following(self, batches: int | None, *, ended: bool = False) -> StreamState:
        """Return the next epoch's beginning if this one has no more, else the same state.

        Args:
            batches: number of batches of the next epoch.
            ended: this epoch has no more, though the cursors do not say so.
        """
        if not (ended or all(cursor.to_come == 0 for cursor in self.cursors)):
            return self
        first, workers = int(self.dealing["worker"] or 0), int(self.dealing["workers"] or 1)
        cursors = [
            cursor.following(share_of(batches, number, workers))
            for number, cursor in enumerate(self.cursors, first)
        ]
        turn = self.turn if len(cursors) == 1 else 0
        return StreamState(cursors=cursors, dealing=self.dealing, turn=turn)

    def to_plain(self, *, seeks: bool) -> dict[str, Any]:
        """Return plain JSON types, except for the source's own states; some 50 bytes a worker.

        Within a part of a worker, there is one bit more for each of the part's samples.

        Args:
            seeks: the source continues by its own state; otherwise its items are skipped.

        If each rank stands elsewhere, the state is named after its rank, so that those of all
        ranks have their place in one checkpoint.
        """
        workers = [
            [*at[1:-1], None if at.part is None else at.part.to_plain(at.rounds)]
            for at in self.cursors
        ]
        plain = {"dealing": dict(self.dealing), "turn": self.turn, "workers": workers}
        rank, ranks = self.dealing["rank"], self.dealing["ranks"]
        name = "processes" if rank is None else f"rank {rank} of {ranks}"
        shown = {"epoch": self.epoch, "goes_on_by": "seeking" if seeks else "skipping"}
        # A tuple, since torch.distributed.checkpoint splits lists and mappings: it would load as
        # many workers as the loading stream has, and each value from any one rank.
        return shown | {name: (plain,)}

    @classmethod
    def of_plain(cls, state: Any) -> StreamState:
        """Return the state that was saved.

        Raises:
            StateError: it is malformed.
        """
        names = state if isinstance(state, Mapping) else ()
        named = [name for name in names if str(name).startswith(("processes", "rank "))]
        if len(named) != 1:
            several = f"; pass that of one rank of {named}" if named else ""
            raise StateError(
                f"expected the result of BudgetedIterableDataset.state_dict(){several}"
            )
        try:
            [plain] = state[named[0]]
            epoch, dealing, turn = state["epoch"], dict(plain["dealing"]), plain["turn"]
            cursors = [
                StreamCursor._make([epoch, *row, part and StreamPart.of_plain(part, row[1])])
                for *row, part in plain["workers"]
            ]
            default = StreamCursor(0)  # `None` is a valid value of the fields that are `None` in it
            of = [one for at in cursors for one in zip(at[:-1], default[:-1], strict=True)]
            numbers = [n for n, usual in of if n is not None or usual is not None]
            wrong = [n for n in numbers if not (isinstance(n, dict) or (is_int(n) and n >= 0))]
            dealt = turn in range(dealing["workers"]) and len(cursors) in (1, dealing["workers"])
            if wrong or not dealt:
                raise ValueError(f"{wrong} must be ints of at least 0, turn={turn!r} a worker")
            return cls(cursors=cursors, dealing=dealing, turn=turn)
        except (LookupError, TypeError, ValueError, zlib.error) as error:
            raise StateError(f"the state is malformed: {type(error).__name__}: {error}") from error

    def check_order(self, dealing: Plain) -> None:
        """Raise a `StateMismatchError` if positions mean other samples than with these options."""
        if differs := differences(self.dealing, dealing, _ORDER):
            raise StateMismatchError(
                "the state belongs to another source or order, so its position means other "
                f"samples: {differs}; use the source and order of the state"
            )

    def cursor_of(self, slot: WorkerSlot, dealing: Plain) -> StreamCursor:
        """Return the cursor at which a process continues.

        Raises:
            StateMismatchError: this process cannot continue from it.
        """
        self.check_order(dealing)
        number, saved = slot.worker % len(self.cursors), self.dealing
        if len(self.cursors) > 1:
            saved = {**saved, "worker": number}
        cursor, workers = self.cursors[number], saved["workers"]
        # After one process that read the whole source, any can continue; others only in their part.
        alone = workers == 1 and dealing["split"] == "none"
        part = [] if alone else ["worker", "workers"]
        if dealing["split"] == "ranks":
            part += ["rank", "ranks"]
        # A part whose samples the state does not list can only be cut by the same rules.
        same = _READING if cursor.part else dealing if cursor.rounds else ()
        inside = differences(saved, dealing, same)
        differs = inside or differences(saved, dealing, part)
        if differs and not self.is_beginning:
            raise StateMismatchError(
                f"worker {slot.worker} of {slot.workers} cannot continue from a state of worker "
                f"{saved['worker']} of {workers} after {cursor.rounds} micro-batches of a window: "
                "other ranks or workers can continue only at the end of a window, and "
                f"from the same part of the source, which needs num_workers={workers}: {differs}"
            )
        if cursor.rounds and cursor.part and differences(saved, dealing, dealing):
            left = cursor.part.done_after > cursor.rounds
            cursor = cursor.dealt_anew(cursor.part.checksum, left)
        if cursor.to_come is None or workers == slot.workers:
            return cursor
        to_come = sum(each.to_come or 0 for each in self.cursors)
        return cursor._replace(to_come=share_of(to_come, slot.worker, slot.workers))
