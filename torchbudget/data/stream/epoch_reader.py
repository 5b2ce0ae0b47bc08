"""One epoch of a stream in one process: its micro-batches, and its position."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from torchbudget.data.sizes.key import sizes_of_all
from torchbudget.data.stream.positions import END, Position
from torchbudget.data.stream.sample_bytes import held_bytes
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.source import WorkerSlot, is_indexed
from torchbudget.data.stream.windows import BufferedSamples, Start, Windows
from torchbudget.errors import StateError, StateMismatchError, UnevenRanksError
from torchbudget.plan.solver import WindowKey
from torchbudget.units import format_bytes

_VERSION: Final = 1
_RECENT: Final = 256  # positions that are kept


@dataclass(frozen=True, slots=True)
class Round:
    """One micro-batch for each rank.

    Attributes:
        start: of the samples that were cut together.
        number: of the round among theirs, from 1.
        batches: the samples of each rank.
    """

    start: Start
    number: int
    batches: list[list[Any]]


class EpochReader(Iterator[Any]):
    """The micro-batches of an epoch in one process.

    Args:
        settings: of the stream.
        slot: of this process.
        epoch: that is read.
        look_ahead: bytes of the samples that wait for their micro-batch; `None`: no limit.
        count_skipped: called with the kind and the number of samples that were skipped.

    Attributes:
        epoch: that is read.
        finished: whether the last micro-batch was yielded.
        slot: of this process.
        first_error: raised instead of the first micro-batch.
        record: called with the position after each micro-batch, and with `END`.
        windows: that it reads.
    """

    def __init__(
        self,
        settings: Settings,
        slot: WorkerSlot,
        epoch: int,
        *,
        look_ahead: int | None,
        count_skipped: Callable[[str, int], None],
    ) -> None:
        self.epoch = epoch
        self.finished = False
        self.slot = slot
        self.first_error: Exception | None = None
        self.record: Callable[[Position], None] | None = None
        self._settings = settings
        self._look_ahead = look_ahead
        self._start = Start(left=settings.window)
        self._done = 0  # micro-batches from `_start` on
        self._yielded = 0  # since the epoch began, or the state was loaded
        self._recent: deque[tuple[Start, int]] = deque(maxlen=_RECENT)  # after each micro-batch
        self._limit: int | None = None
        if settings.batches_per_epoch is not None:
            self._limit = slot.share(settings.batches_per_epoch)
        self._whole_limit = self._limit  # of an epoch from its beginning
        self._batches: Generator[tuple[Start, int, list[Any]]] | None = None
        self.windows = Windows(
            settings,
            slot,
            look_ahead=look_ahead,
            count_skipped=count_skipped,
            endless=self._limit is not None,
        )

    def __next__(self) -> Any:
        if self.first_error is not None:
            raise self.first_error
        if self._batches is None:
            self._batches = self._read(self._start, self._done)
        batch = None
        if not self.finished and (self._limit is None or self._yielded < self._limit):
            batch = next(self._batches, None)
        if batch is None:
            self._finish()
            raise StopIteration
        self._start, self._done, samples = batch
        self.windows.num_batches += 1
        self._yielded += 1
        self._recent.append((self._start, self._done))
        if self.record is not None:
            self.record(self._position)
        return self._settings.collate_fn(samples)

    def _finish(self) -> None:
        if self.record is not None:
            self.record(END)
        self.finished = True
        self.close()

    def close(self) -> None:
        """End the threads, and drop the samples in memory."""
        if self._batches is not None:
            self._batches.close()
        self.windows.close()

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """The position, in plain types, and a state of the source itself if it has one."""
        left = None if self._limit is None else self._limit - self._yielded
        return self._state(self._start, self._done, left, finished=self.finished)

    def state_after(self, batches_done: int) -> dict[str, Any]:
        """The state after so many micro-batches.

        Raises:
            StateError: fewer were yielded, or too many since.
        """
        back = self._yielded - batches_done
        if not 0 <= back < len(self._recent):
            raise StateError(
                f"the position after {batches_done} micro-batches is unknown: {self._yielded} were "
                f"yielded, and the last {len(self._recent)} positions are kept"
            )
        start, done = self._recent[-1 - back]
        left = None if self._limit is None else self._limit - batches_done
        return self._state(start, done, left, finished=self.finished and not back)

    def beginning(self) -> dict[str, Any]:
        """The state before the first micro-batch of the epoch."""
        return self._state(Start(left=self._settings.window), 0, self._whole_limit)

    def state_at(self, position: Position) -> dict[str, Any]:
        """The state of a position."""
        if position == END:
            return {**self.beginning(), "finished": True}
        number, window, place, left, done, to_come = position
        start = Start(number=number, window=window, position=place, left=left)
        return self._state(start, done, None if to_come < 0 else to_come)

    @property
    def _position(self) -> Position:
        """The position in numbers alone: a source is skipped through to there."""
        start, to_come = self._start, -1 if self._limit is None else self._limit - self._yielded
        return Position(start.number, start.window, start.position, start.left, self._done, to_come)

    def _state(
        self, start: Start, done: int, left: int | None, *, finished: bool = False
    ) -> dict[str, Any]:
        seeks = start.source is not None or is_indexed(self._settings.source.data)
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "start": asdict(start),
            "done": done,
            "left": left,
            "look_ahead": self._look_ahead,
            "finished": finished,
            "slot": asdict(self.slot),
            "goes_on_by": "seeking" if seeks else "skipping",
            "identity": self._settings.identity,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; before the first micro-batch.

        Raises:
            StateError: it is no such state.
            StateMismatchError: it is of another stream, or cannot go on in this process.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise StateError("expected what BudgetedIterableDataset.state_dict() returned")
        try:
            self._check(state)
            self._load(state)
        except StateError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"the state is malformed: {type(error).__name__}: {error}") from error

    def _load(self, state: Mapping[str, Any]) -> None:
        start, slot = Start(**state["start"]), WorkerSlot(**state["slot"])
        done, left = int(state["done"]), state["left"]
        if min(start.number, start.window, start.position, start.left, done, left or 0) < 0:
            raise ValueError("a number is below 0")
        self.epoch = int(state["epoch"])
        self.finished = bool(state["finished"])
        self._start, self._done, self._yielded, self._batches = start, done, 0, None
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
        unchanged = saved == mine and state["look_ahead"] == self._look_ahead
        if slot == self.slot and unchanged:
            return
        if state["done"]:
            raise StateMismatchError(
                f"{state['done']} micro-batches of a window are done; another number of ranks or "
                f"workers, budget, cost or look-ahead needs a window's boundary: saved {slot}, "
                f"{saved}; now {self.slot}, {mine}"
            )
        start = Start(**state["start"])
        of_all_workers = self._settings.source.split == "none" or not (
            start.number or start.position
        )
        if slot.workers != self.slot.workers and not (of_all_workers and slot.workers == 1):
            raise StateMismatchError(
                f"the state is that of worker {slot.worker} of {slot.workers}, here are "
                f"{self.slot.workers}"
            )
        if self._settings.source.split == "ranks" and slot.ranks != self.slot.ranks:
            raise StateMismatchError(
                f"each of {slot.ranks} ranks had a part of the source, here are {self.slot.ranks}"
            )

    # ------------------------------------------------------------------ micro-batches

    def _read(self, start: Start, done: int) -> Generator[tuple[Start, int, list[Any]]]:
        """Yield this rank's micro-batches, each with the position after it.

        That is where the samples begin that are cut together, and how many of their micro-batches
        are done. With several ranks the last round of buffered samples waits for the next ones: at
        the end of the stream it is cut anew, with samples that cannot be dealt evenly alone.
        """
        windows = self.windows
        rank, ranks = windows.rank_and_ranks
        uneven: BufferedSamples | None = None  # cannot be dealt evenly alone
        last: Round | None = None
        for buffered in windows.read(self.epoch, start):
            if uneven is not None:
                buffered = self._joined(uneven, buffered)
            try:
                rounds = self._rounds(buffered)
            except UnevenRanksError:
                uneven = buffered
                continue
            uneven = None
            if last is not None and rounds:
                yield buffered.start, 0, last.batches[rank]
                last = None
            # Nothing of these may be in memory while the next samples are read.
            buffered.samples.clear()
            first, final = buffered.start, len(rounds) // ranks
            for number in range(1 + (done if first == start else 0), final):
                yield first, number, rounds[(number - 1) * ranks + rank]
            if rounds and ranks > 1:
                last = Round(first, final, rounds[-ranks:])
            elif rounds:
                yield windows.next, 0, rounds[-1]
            rounds.clear()
        if uneven is not None and not self._settings.drop_last:
            first, before, samples = uneven.start, 0, uneven.samples
            if last is not None:
                first, before = last.start, last.number - 1
                samples = [sample for batch in last.batches for sample in batch] + samples
            joined = self._rounds(BufferedSamples(uneven.start, samples))
            for number, batch in enumerate(joined[rank::ranks], before + 1):
                if first != start or number > done:
                    yield first, number, batch
        elif last is not None:
            yield windows.next, 0, last.batches[rank]

    def _rounds(self, buffered: BufferedSamples) -> list[list[Any]]:
        """The samples of each micro-batch: those of a round's ranks, then those of the next round.

        Raises:
            UnevenRanksError: they cannot be dealt evenly.
        """
        settings, samples, start = self._settings, buffered.samples, buffered.start
        if not samples:
            return []
        if settings.sized and buffered.sizes is None:
            buffered.sizes = sizes_of_all(samples, settings.size, start.position)
        key = WindowKey(
            seed=settings.seed,
            path=(self.epoch, start.number),
            places=np.array([start.position]),
            numbers=np.array([start.window]),
            shuffle=settings.shuffle,
        )
        places, starts, stops = settings.grouping.rounds(
            samples, buffered.sizes, key=key, drop_last=settings.drop_last and buffered.last
        )
        # An array of objects picks several times as fast as a list.
        arranged = np.fromiter(samples, dtype=object, count=len(samples))[places].tolist()
        return [arranged[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _joined(self, uneven: BufferedSamples, following: BufferedSamples) -> BufferedSamples:
        """Samples that cannot be dealt evenly, with those after them."""
        samples = uneven.samples + following.samples
        if self._look_ahead is not None and sum(map(held_bytes, samples)) > self._look_ahead:
            raise UnevenRanksError(
                f"{len(uneven.samples)} samples fill the look-ahead of "
                f"{format_bytes(self._look_ahead)}, and cannot be dealt evenly to "
                f"{self.slot.ranks} ranks; allow more bytes, or use fewer ranks"
            )
        sizes = None
        if uneven.sizes is not None and following.sizes is not None:
            sizes = np.concatenate([uneven.sizes, following.sizes])
        return BufferedSamples(uneven.start, samples, following.last, sizes)
