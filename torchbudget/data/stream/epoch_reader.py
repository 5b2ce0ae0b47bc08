"""One epoch of a stream in one process: its micro-batches, and where it stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from torchbudget.data.sizes.key import sizes_of_all
from torchbudget.data.stream.positions import END, Position
from torchbudget.data.stream.sample_bytes import held_bytes
from torchbudget.data.stream.source import WorkerSlot, is_indexed
from torchbudget.data.stream.windows import BufferedSamples, Settings, Start, Windows
from torchbudget.errors import StateError, StateMismatchError, UnevenRanksError
from torchbudget.plan.solver import WindowKey
from torchbudget.units import format_bytes

_VERSION: Final = 1
_RECENT: Final = 256  # positions that are kept


@dataclass(frozen=True, slots=True)
class Round:
    """One micro-batch for each rank.

    Attributes:
        start: of the samples that were held.
        number: of the round, from 1.
        batches: of each rank, the samples.
    """

    start: Start
    number: int
    batches: list[list[Any]]


class EpochReader(Iterator[Any]):
    """The micro-batches of an epoch that come in one process.

    Args:
        settings: of the stream.
        slot: which process this is.
        epoch: that is read.
        most_bytes: that samples may hold while they wait for their micro-batch; `None`: any number.
        count: called with the kind and the number of samples that were left out.

    Attributes:
        epoch: that is read.
        finished: whether the last micro-batch was given.
        slot: which process this is.
        refused: raised instead of the first micro-batch.
        watch: called with the position behind each micro-batch, and with `END`.
        windows: that it reads.
    """

    def __init__(
        self,
        settings: Settings,
        slot: WorkerSlot,
        epoch: int,
        *,
        most_bytes: int | None,
        count: Callable[[str, int], None],
    ) -> None:
        self.epoch = epoch
        self.finished = False
        self.slot = slot
        self.refused: Exception | None = None
        self.watch: Callable[[Position], None] | None = None
        self._settings = settings
        self._most_bytes = most_bytes
        self._start = Start(left=settings.window)
        self._done = 0  # micro-batches from there on
        self._given = 0  # since it began
        self._recent: deque[tuple[Start, int]] = deque(maxlen=_RECENT)  # where it stood behind each
        self._limit: int | None = None
        if settings.batches_per_epoch is not None:
            self._limit = slot.share(settings.batches_per_epoch)
        self._limit_at_first = self._limit
        self._batches: Generator[tuple[Start, int, list[Any]]] | None = None
        self.windows = Windows(
            settings, slot, most_bytes=most_bytes, count=count, endless=self._limit is not None
        )

    def __next__(self) -> Any:
        if self.refused is not None:
            raise self.refused
        if self.finished or (self._limit is not None and self._given >= self._limit):
            self.finish()
            raise StopIteration
        if self._batches is None:
            self._batches = self._run(self._start, self._done)
        made = next(self._batches, None)
        if made is None:
            self.finish()
            raise StopIteration
        start, done, samples = made
        self._start, self._done = start, done
        self.windows.made += 1
        self._given += 1
        self._recent.append((start, done))
        if self.watch is not None:
            self.watch(self.position)
        return self._settings.collate_fn(samples)

    def finish(self) -> None:
        """Nothing more comes."""
        if self.watch is not None:
            self.watch(END)
        self.finished = True
        self.close()

    def close(self) -> None:
        """End the threads, and drop what is held."""
        if self._batches is not None:
            self._batches.close()
        self.windows.close()

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in plain types (and what the source itself says, if it can)."""
        left = None if self._limit is None else self._limit - self._given
        return self._state(self._start, self._done, left, finished=self.finished)

    def state_after(self, batches_done: int) -> dict[str, Any]:
        """Where it stood behind so many micro-batches.

        Raises:
            StateError: more than were given, or long ago.
        """
        back = self._given - batches_done
        if not 0 <= back < len(self._recent):
            raise StateError(
                f"where {batches_done} micro-batches were given is not known: {self._given} were, "
                f"and the last {len(self._recent)} positions are kept"
            )
        start, done = self._recent[-1 - back]
        left = None if self._limit is None else self._limit - batches_done
        return self._state(start, done, left, finished=self.finished and not back)

    def beginning(self) -> dict[str, Any]:
        """The state of before the first micro-batch."""
        return self._state(Start(left=self._settings.window), 0, self._limit_at_first)

    def state_at(self, at: Position) -> dict[str, Any]:
        """The state of a position."""
        if at == END:
            return {**self.beginning(), "finished": True}
        start = Start(number=at.number, window=at.window, position=at.position, left=at.left)
        return self._state(start, at.done, None if at.to_come < 0 else at.to_come)

    @property
    def position(self) -> Position:
        """Where it stands, in numbers alone: a source is skipped through to there."""
        at, to_come = self._start, -1 if self._limit is None else self._limit - self._given
        return Position(at.number, at.window, at.position, at.left, self._done, to_come)

    def _state(
        self, start: Start, done: int, left: int | None, *, finished: bool = False
    ) -> dict[str, Any]:
        seeks = start.source is not None or is_indexed(self._settings.source.given)
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "start": asdict(start),
            "done": done,
            "left": left,
            "look_ahead": self._most_bytes,
            "finished": finished,
            "slot": asdict(self.slot),
            "goes_on_by": "seeking" if seeks else "skipping",
            "identity": self._settings.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state stands; before the first micro-batch.

        Raises:
            StateError: it is no such state.
            StateMismatchError: it is of another stream, or cannot go on in this process.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise StateError("expected what BudgetedIterableDataset.state_dict() gave")
        try:
            self._check(state)
            self._load(state)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(
                f"the state is malformed: {type(error).__name__}: {error}; it is no stream's"
            ) from error

    def _load(self, state: Mapping[str, Any]) -> None:
        start, slot = Start(**state["start"]), WorkerSlot(**state["slot"])
        done, left = int(state["done"]), state["left"]
        if min(start.number, start.window, start.position, start.left, done, left or 0) < 0:
            raise ValueError("a number is below 0")
        self.epoch = int(state["epoch"])
        self.finished = bool(state["finished"])
        self._start, self._done, self._given, self._batches = start, done, 0, None
        if left is not None and slot.workers != self.slot.workers:
            left = self.slot.share(left)
        self._limit = left

    def _check(self, state: Mapping[str, Any]) -> None:
        mine = self._settings.identity
        saved = state["identity"]
        for name in ("window", "seed", "shuffle", "split", "sized", "batches_per_epoch"):
            if saved[name] != mine[name]:
                raise StateMismatchError(f"{name}: saved {saved[name]!r}, now {mine[name]!r}")
        slot = WorkerSlot(**state["slot"])
        as_it_was = saved == mine and state["look_ahead"] == self._most_bytes
        if slot == self.slot and as_it_was:
            return
        if state["done"]:
            raise StateMismatchError(
                f"{state['done']} micro-batches of a window are done; another number of ranks or "
                f"workers, budget or cost needs a window's boundary: saved {slot}, {saved}; now "
                f"{self.slot}, {mine}"
            )
        start = Start(**state["start"])
        anybodys = self._settings.source.split == "none" or not (start.number or start.position)
        if slot.workers != self.slot.workers and not (anybodys and slot.workers == 1):
            raise StateMismatchError(
                f"the state is that of worker {slot.worker} of {slot.workers}, here are "
                f"{self.slot.workers}"
            )
        if self._settings.source.split == "ranks" and slot.ranks != self.slot.ranks:
            raise StateMismatchError(
                f"each of {slot.ranks} ranks had a part of the source, here are {self.slot.ranks}"
            )

    # ------------------------------------------------------------------ micro-batches

    def _run(self, start: Start, done: int) -> Generator[tuple[Start, int, list[Any]]]:
        """This rank's micro-batches: where what follows begins, and how many are done from there.

        With several ranks the last round of samples that are held waits for the next ones, and goes
        together with what could not be dealt evenly at the end of the stream.
        """
        windows = self.windows
        rank, ranks = windows.dealt
        waiting: BufferedSamples | None = None  # could not be dealt evenly alone
        last: Round | None = None
        for held in windows.held(self.epoch, start):
            if waiting is not None:
                held = self._joined(waiting, held)
            try:
                rounds = self._rounds(held)
            except UnevenRanksError:
                waiting = held
                continue
            waiting = None
            if last is not None and rounds:
                yield held.start, 0, last.batches[rank]
                last = None
            # Nothing of this may be in memory while what follows is read.
            held.samples.clear()
            begin, final = held.start, len(rounds) // ranks
            for number in range(1 + (done if begin == start else 0), final):
                yield begin, number, rounds[(number - 1) * ranks + rank]
            if rounds and ranks > 1:
                last = Round(begin, final, rounds[-ranks:])
            elif rounds:
                yield windows.next, 0, rounds[-1]
            rounds.clear()
        if waiting is not None and not self._settings.drop_last:
            at, before, samples = waiting.start, 0, waiting.samples
            if last is not None:
                at, before = last.start, last.number - 1
                samples = [sample for batch in last.batches for sample in batch] + samples
            joined = BufferedSamples(waiting.start, samples)
            for number, batch in enumerate(self._rounds(joined)[rank::ranks], before + 1):
                if at != start or number > done:
                    yield at, number, batch
        elif last is not None:
            yield windows.next, 0, last.batches[rank]

    def _rounds(self, held: BufferedSamples) -> list[list[Any]]:
        """The samples of each micro-batch: those of a round's ranks, then those of the next one.

        Raises:
            UnevenRanksError: they cannot be dealt evenly.
        """
        settings, samples = self._settings, held.samples
        if not samples:
            return []
        if settings.sized and held.sizes is None:
            held.sizes = sizes_of_all(samples, settings.size, held.start.position)
        start = held.start
        key = WindowKey(
            seed=settings.seed,
            path=(self.epoch, start.number),
            places=np.array([start.position]),
            numbers=np.array([start.window]),
            shuffle=settings.shuffle,
        )
        places, starts, stops = settings.grouping.rounds(
            samples,
            held.sizes,
            key=key,
            drop_last=settings.drop_last and held.last,
        )
        # An array of objects picks several times as fast as a list.
        arranged = np.fromiter(samples, dtype=object, count=len(samples))[places].tolist()
        return [arranged[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _joined(self, waiting: BufferedSamples, held: BufferedSamples) -> BufferedSamples:
        """Samples that could not be dealt evenly, with those behind them."""
        samples = waiting.samples + held.samples
        if self._most_bytes is not None and sum(map(held_bytes, samples)) > self._most_bytes:
            raise UnevenRanksError(
                f"{len(waiting.samples)} samples fill the look-ahead of "
                f"{format_bytes(self._most_bytes)}, and cannot be dealt evenly to "
                f"{self.slot.ranks} ranks; give it more bytes, or use fewer ranks"
            )
        sizes = None
        if waiting.sizes is not None and held.sizes is not None:
            sizes = np.concatenate([waiting.sizes, held.sizes])
        return BufferedSamples(waiting.start, samples, held.last, sizes)
