"""The position of a stream: a cursor for each process, and what all processes share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch

from torchbudget.checks import is_int
from torchbudget.errors import OptionError, StateError, StateMismatchError
from torchbudget.plan.cursor import check_meaning
from torchbudget.plan.fingerprint import Plain

Split: TypeAlias = Literal["none", "workers", "ranks"]

WORKERS: Final = 512  # that may read a stream on one rank
_NUMBERS: Final = 7
_KEYS: Final = frozenset(["order", "dealing", "turn", "workers"])
# Names of the columns of a state: the fields of each worker's cursor, but for the epoch.
_COLUMNS: Final = ("start", "rounds", "first_epoch", "pass", "to_come", "finished", "source",
                   "checked", "checksum")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlot:
    """One of the processes that share a source.

    Attributes:
        worker: number of the `DataLoader` worker on its rank.
        workers: on each rank, at least 1.
        rank: of the process.
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


class StreamCursor(NamedTuple):
    """A place between two micro-batches of one process.

    A tuple, since each batch comes with one: a dataclass takes ten times as long to make.

    Attributes:
        epoch: number of the epoch.
        start: the first item of the samples that are cut together, in the pass.
        rounds: number of their micro-batches that are done.
        first_epoch: from which passes are counted. With `batches_per_epoch` an epoch goes on where
            the one before ended.
        number: of the pass over the source.
        to_come: micro-batches in this epoch, of `batches_per_epoch`; `None`: not limited.
        finished: the epoch has no more.
        source: the source's own state at or before `checked`, if it has one.
        checked: the first item of the samples that were begun; with no round done, of those before.
        checksum: of their sizes; with rounds done, of their cuts too; `None`: none were begun.
    """

    epoch: int
    start: int = 0
    rounds: int = 0
    first_epoch: int = 0
    number: int = 0
    to_come: int | None = None
    finished: bool = False
    source: dict[str, Any] | None = None
    checked: int = 0
    checksum: int | None = None

    @classmethod
    def beginning(cls, epoch: int, batches: int | None) -> StreamCursor:
        """Return the place before the first micro-batch of an epoch with that many."""
        return cls(epoch, first_epoch=epoch).limited(batches)

    def limited(self, batches: int | None) -> StreamCursor:
        """Return the same place in an epoch with that many micro-batches to come."""
        return self._replace(to_come=batches, finished=batches == 0)

    def following(self, batches: int | None) -> StreamCursor:
        """Return the place before the first micro-batch of the next epoch."""
        if batches is None:
            return self.beginning(self.epoch + 1, None)
        return self._replace(epoch=self.epoch + 1).limited(batches)

    def next_pass(self) -> StreamCursor:
        """Return the place where the source starts over."""
        return self._replace(
            number=self.number + 1, start=0, rounds=0, source=None, checked=0, checksum=None
        )

    def window(self, length: int) -> int:
        """Number of the window that it is in, counted over passes."""
        return self.start // length + self.number


@dataclass(slots=True, kw_only=True)
class StreamState:
    """The places of the processes that read a stream on one rank.

    Not frozen, which would double the time of a tracked loop's step. Nothing changes one.

    Attributes:
        cursors: of each worker, by number; or of one process alone.
        dealing: what must be the same for the first of them to go on within a window; for the
            others the same but the number of the worker.
        turn: the worker whose batch comes next.
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
        cursors[worker] = cursor
        turn = (worker + 1) % len(cursors)
        return StreamState(cursors=cursors, dealing=self.dealing, turn=turn)

    @property
    def is_beginning(self) -> bool:
        """True if nothing of the source was read before."""
        return not any(at.start or at.rounds or at.number or at.finished for at in self.cursors)

    def following(self, batches: int | None, *, ended: bool = False) -> StreamState:
        """Return the next epoch's beginning if this one has no more, else the same state.

        Args:
            batches: of the next epoch.
            ended: this epoch has no more, though the cursors do not say so.
        """
        if not (ended or all(cursor.finished for cursor in self.cursors)):
            return self
        shares = [share_of(batches, n, len(self.cursors)) for n in range(len(self.cursors))]
        cursors = [one.following(share) for one, share in zip(self.cursors, shares, strict=True)]
        return StreamState(cursors=cursors, dealing=self.dealing)

    def to_plain(self, order: Plain, *, seeks: bool) -> dict[str, Any]:
        """Return plain JSON types, except for the source's own states; some 50 bytes a worker.

        Args:
            order: what must be the same for positions to mean the same samples.
            seeks: the source goes on by its own state; otherwise it is skipped through.

        Where each rank stands elsewhere, the state is named after its rank, so that those of all
        ranks have their place in one checkpoint.
        """
        columns = map(list, zip(*(cursor[1:] for cursor in self.cursors), strict=True))
        plain = {
            "order": dict(order),
            "dealing": dict(self.dealing),
            "turn": self.turn,
            "workers": dict(zip(_COLUMNS, columns, strict=True)),
        }
        rank, ranks = self.dealing["rank"], self.dealing["ranks"]
        name = "processes" if rank is None else f"rank {rank} of {ranks}"
        shown = {"epoch": self.epoch, "goes_on_by": "seeking" if seeks else "skipping"}
        # In a tuple, since torch.distributed.checkpoint takes lists and mappings apart: it loads
        # as many workers as the stream has that loads, and of each value that of any one rank.
        return shown | {name: (plain,)}

    @classmethod
    def of_plain(cls, state: Any, order: Plain) -> StreamState:
        """Return the state that was saved.

        Raises:
            StateError: it is malformed.
            StateMismatchError: it belongs to another stream.
        """
        names = state if isinstance(state, Mapping) else ()
        named = [name for name in names if str(name).startswith(("processes", "rank "))]
        match [state[name] for name in named]:
            case [[plain]]:
                check_meaning(plain, _KEYS, order)
            case _:
                several = f"; pass that of one rank of {named}" if len(named) > 1 else ""
                raise StateError(
                    f"expected what BudgetedIterableDataset.state_dict() returned{several}"
                )
        dealing, turn, columns = plain["dealing"], plain["turn"], plain["workers"]
        try:
            rows = zip(*(columns[name] for name in _COLUMNS), strict=True)
            cursors = [StreamCursor(state["epoch"], *row) for row in rows]
            counts = [
                count
                for *places, to_come, _, _, checked, checksum in cursors
                for count in (*places, to_come or 0, checked, checksum or 0)
            ]
            dealt = turn in range(len(cursors)) and len(cursors) in (1, dealing["workers"])
            finished = [cursor.finished in (True, False) for cursor in cursors]
            wrong = [count for count in counts if not is_int(count) or count < 0]
            if wrong or not dealt or not all(finished):
                raise ValueError(f"{wrong} are no numbers from 0 on, or turn {turn!r} is of none")
            return cls(cursors=cursors, dealing=dict(dealing), turn=turn)
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state is malformed: {type(error).__name__}: {error}") from error

    def cursor_of(self, slot: WorkerSlot, dealing: Plain) -> StreamCursor:
        """Return the cursor at which a process goes on.

        Raises:
            StateError: the state is malformed.
            StateMismatchError: this process cannot go on from it.
        """
        number, saved = slot.worker % len(self.cursors), self.dealing
        if saved.keys() != dealing.keys():
            raise StateError(f"the state is malformed: its dealing is {saved!r}")
        if len(self.cursors) > 1:
            saved = {**saved, "worker": number}
        cursor, workers = self.cursors[number], saved["workers"]
        # Any process goes on where one has read the whole source alone, others in their own part.
        alone = workers == 1 and dealing["split"] == "none"
        part = set() if alone else {"worker", "workers"}
        if dealing["split"] == "ranks":
            part |= {"rank", "ranks"}
        changed = [name for name in dealing if saved[name] != dealing[name]]
        if not self.is_beginning and changed and (cursor.rounds or part & {*changed}):
            differs = (f"{one}: saved {saved[one]!r}, now {dealing[one]!r}" for one in changed)
            raise StateMismatchError(
                f"worker {slot.worker} of {slot.workers} cannot go on from a state of worker "
                f"{saved['worker']} of {workers} after {cursor.rounds} micro-batches of a window: "
                "other rules, ranks or workers need a window's boundary, and the same part of the "
                f"source needs num_workers={workers}: {'; '.join(differs)}"
            )
        if cursor.to_come is None or workers == slot.workers:
            return cursor
        to_come = sum(each.to_come or 0 for each in self.cursors)
        return cursor.limited(share_of(to_come, slot.worker, slot.workers))


class _Number:
    """An attribute whose value is in shared memory, at one of its places."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, progress: Progress, kind: type[Progress]) -> int:
        return int(progress._numbers[self._place])

    def __set__(self, progress: Progress, value: int) -> None:
        progress._numbers[self._place] = value


class Progress:
    """The epoch of a stream in all its processes, and what was skipped: one small shared tensor.

    Numbers are written by one process each, or are the same whoever writes them, without a lock.

    Args:
        shared: the memory of another one; `None`: new memory.

    Attributes:
        begun: the last epoch that was begun, or chosen.
        chosen: 1 if `set_epoch` chose it, and no loop has begun since.
        changes: number of times that a position was chosen or loaded.
        loaded: 1 if the last change was to a position that only the process that trains has.
        runs: number of runs that were opened: workers' ends of loops before do not count.
        run: number of the workers that the open run reads; 0: no run is open.
        ahead: 1 if workers of an untracked loop have begun to read ahead.
    """

    begun, chosen, changes, loaded, runs, run, ahead = map(_Number, range(_NUMBERS))

    def __init__(self, shared: torch.Tensor | None = None) -> None:
        if shared is None:
            shared = torch.zeros(_NUMBERS + 5 * WORKERS, dtype=torch.int64, device="cpu")
        self._shared = shared.share_memory_()
        places = self._shared.numpy()  # torch takes ten times as long to write a number
        self._numbers, rows = places[:_NUMBERS], places[_NUMBERS:].reshape(WORKERS, 5)
        # Of each worker: the number of workers, of epochs done, and `runs` then; what it skipped.
        self._done, self._skipped = rows[:, :3], rows[:, 3:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the same memory in a process that is started; a copy has memory of its own."""
        shared = self._shared
        if get_spawning_popen() is None:
            shared = shared.clone()
            shared[_NUMBERS - 2 : _NUMBERS] = 0  # the copy has no run, and nobody reads ahead of it
        return Progress, (shared,)

    # ------------------------------------------------------------------ epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next loop: the one after the last, if all workers are done with it."""
        while True:
            epoch, workers = self.begun, int(self._done[0, 0])
            last = workers, epoch + 1, self.runs
            done = bool(workers) and bool((self._done[:workers] == last).all())
            # Another worker may meanwhile have gone on to the next one, and be done with it, too.
            if epoch == self.begun:
                return epoch + done

    def advance(self) -> None:
        """Begin a loop in a process.

        Nothing is written but for the step from one epoch to the next, at once: a late worker of an
        old loop must not undo what `set_epoch` has chosen meanwhile.
        """
        epoch = self.epoch
        if epoch > self.begun:
            self.begun = epoch

    def was_read(self, epoch: int, worker: int) -> bool:
        """True if this worker, or an earlier one of its number, was done with an epoch."""
        return epoch >= 0 and self._done[worker, 1:].tolist() == [epoch + 1, self.runs]

    def end(self, epoch: int, worker: int, workers: int, runs: int) -> None:
        """Note that a worker is done with an epoch, which it began when there were `runs`.

        Raises:
            OptionError: there are too many workers.
        """
        if workers > WORKERS:
            raise OptionError(f"at most {WORKERS} workers may read a stream, got {workers}")
        self._done[worker] = workers, epoch + 1, runs

    def change(self, epoch: int, *, loaded: bool) -> None:
        """Make all processes begin at an epoch, or at a position that was loaded."""
        self.begun, self.loaded, self.ahead, self.run, self.chosen = epoch, loaded, 0, 0, 0
        self.changes, self.runs = self.changes + 1, self.runs + 1

    # ------------------------------------------------------------------ skipped samples

    def count_skipped(self, worker: int, *, oversize: int = 0, failed: int = 0) -> None:
        """Add samples that a worker skipped."""
        self._skipped[worker] += oversize, failed

    def skipped(self) -> tuple[int, int]:
        """Return the number of samples that were oversize, and of those that failed."""
        oversize, failed = self._skipped.sum(axis=0).tolist()
        return oversize, failed

    def forget_skipped(self) -> None:
        """Count them anew."""
        self._skipped[:] = 0
