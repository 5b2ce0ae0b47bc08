"""One epoch of a stream in one process: its micro-batches, and where it stands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.data.grouping import Grouping
from torchbudget.data.held_bytes import held_bytes
from torchbudget.data.pipeline import Failed, Pipeline
from torchbudget.data.size_key import SizeKey, size_of, sizes_of_all
from torchbudget.data.source import Reader, Slot, Source, is_indexed
from torchbudget.data.transforms import Transform
from torchbudget.errors import (
    SampleError,
    SizesError,
    StateError,
    StateMismatchError,
    UnevenRanksError,
)
from torchbudget.plan.tight import reserve
from torchbudget.units import format_bytes

_VERSION: Final = 1
_log: Final = logging.getLogger("torchbudget")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where some samples begin that are put into micro-batches together.

    Attributes:
        number: of the pass over the source, within the epoch.
        window: number of the window, over all passes.
        position: of the first item in the pass.
        left: items from there to the end of the window.
        source: what the source itself can go on from, at or before that position.
    """

    number: int = 0
    window: int = 0
    position: int = 0
    left: int
    source: dict[str, Any] | None = None


@dataclass(slots=True)
class Held:
    """Samples that are in memory at a time.

    Attributes:
        start: where they begin.
        samples: in the order in which they were read.
        positions: of the items that they were made of.
        last: nothing follows in the pass.
        sizes: of the samples, once they were measured.
    """

    start: Start
    samples: list[Any]
    positions: Sequence[int]
    last: bool = False
    sizes: npt.NDArray[Any] | None = None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all processes that read a stream agree on."""

    source: Source
    transforms: tuple[Transform, ...]
    threads: int
    grouping: Grouping
    size: SizeKey
    sized: bool
    window: int
    shuffle: bool
    seed: int
    drop_last: bool
    skip_failed: bool
    batches_per_epoch: int | None
    collate_fn: Callable[[list[Any]], Any]
    identity: dict[str, Any]


class Walk(Iterator[Any]):
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
    """

    def __init__(
        self,
        settings: Settings,
        slot: Slot,
        epoch: int,
        *,
        most_bytes: int | None,
        count: Callable[[str, int], None],
    ) -> None:
        self.epoch = epoch
        self.finished = False
        self._settings = settings
        self.slot = slot
        self._most_bytes = most_bytes
        self._count = count
        self._start = self._next = Start(left=settings.window)
        self._done = 0  # micro-batches from there on
        self._given = 0  # in the epoch
        self._limit: int | None = None
        if settings.batches_per_epoch is not None:
            each, more = divmod(settings.batches_per_epoch, slot.workers)
            self._limit = each + (slot.worker < more)
        self._all = self._limit
        self._made = 0  # in this process, and not yet taken by anybody perhaps
        self._batches: Generator[tuple[Start, int, list[Any]]] | None = None
        self._pipeline = Pipeline(settings.transforms, settings.threads)
        self._told = False
        self._ahead: list[tuple[int, list[Any]]] = []  # read, and left for the next window
        self.buffered_bytes = 0
        self.largest_buffered_bytes = 0

    def __next__(self) -> Any:
        if self.finished or (self._limit is not None and self._given >= self._limit):
            self.finish()
            raise StopIteration
        if self._batches is None:
            self._batches = self._run(self._start, self._done)
        for start, done, samples in self._batches:
            self._made += 1
            self._start, self._done = start, done
            self._given += 1
            return self._settings.collate_fn(samples)
        self.finish()
        raise StopIteration

    def finish(self) -> None:
        """Nothing more comes."""
        self.finished = True
        self.close()

    def close(self) -> None:
        """End the threads, and drop what is held."""
        if self._batches is not None:
            self._batches.close()
        self._pipeline.close()

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, in plain types (and what the source itself says, if it can)."""
        seeks = self._start.source is not None or is_indexed(self._settings.source.given)
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "start": asdict(self._start),
            "done": self._done,
            "left": None if self._limit is None else self._limit - self._given,
            "look_ahead": self._most_bytes,
            "finished": self.finished,
            "slot": asdict(self.slot),
            "goes_on_by": "seeking" if seeks else "skipping",
            "identity": self._settings.identity,
        }

    def beginning(self) -> dict[str, Any]:
        """The state of before the first micro-batch."""
        start = Start(left=self._settings.window)
        fresh = {"start": asdict(start), "done": 0, "left": self._all, "finished": False}
        return {**self.state_dict(), **fresh}

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
        start, slot = Start(**state["start"]), Slot(**state["slot"])
        done, left = int(state["done"]), state["left"]
        if min(start.number, start.window, start.position, start.left, done, left or 0) < 0:
            raise ValueError("a number is below 0")
        self.epoch = int(state["epoch"])
        self.finished = bool(state["finished"])
        self._start, self._done, self._given, self._batches = start, done, 0, None
        if left is not None and slot.workers != self.slot.workers:
            each, more = divmod(left, self.slot.workers)
            left = each + (self.slot.worker < more)
        self._limit = left

    def _owner(self, window: int) -> int:
        if self._settings.source.split == "none":
            return window % self.slot.workers
        return self.slot.worker

    def _check(self, state: Mapping[str, Any]) -> None:
        mine = self._settings.identity
        saved = state["identity"]
        for name in ("window", "seed", "shuffle", "split", "sized", "batches_per_epoch"):
            if saved[name] != mine[name]:
                raise StateMismatchError(f"{name}: saved {saved[name]!r}, now {mine[name]!r}")
        slot = Slot(**state["slot"])
        as_it_was = saved == mine and state["look_ahead"] == self._most_bytes
        if slot == self.slot and as_it_was:
            return
        if state["done"]:
            raise StateMismatchError(
                f"{state['done']} micro-batches of a window are done; another number of ranks or "
                f"workers, budget or cost needs a window's boundary: saved {slot}, {saved}; now "
                f"{self.slot}, {mine}"
            )
        shared = self._settings.source.split == "none" and slot.workers == 1
        if slot.workers != self.slot.workers and not shared:
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
        rank, ranks = self._dealt
        waiting: Held | None = None  # could not be dealt evenly alone
        last: Round | None = None
        for held in self._held(start):
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
            for number, batches in enumerate(rounds, 1):
                if number < len(rounds):
                    if held.start != start or number > done:
                        yield held.start, number, _picked(held, batches[rank])
                elif ranks > 1:
                    all_ranks = [_picked(held, batch) for batch in batches]
                    last = Round(held.start, number, all_ranks)
                else:
                    yield self._next, 0, _picked(held, batches[rank])
            # Nothing of this may be in memory while what follows is read.
            held.samples.clear()
            rounds.clear()
        if waiting is not None and not self._settings.drop_last:
            at, before, samples = waiting.start, 0, waiting.samples
            if last is not None:
                at, before = last.start, last.number - 1
                samples = [sample for batch in last.batches for sample in batch] + samples
            joined = Held(waiting.start, samples, ())
            for number, batches in enumerate(self._rounds(joined), 1):
                if at != start or before + number > done:
                    yield at, before + number, _picked(joined, batches[rank])
        elif last is not None:
            yield self._next, 0, last.batches[rank]

    @property
    def _dealt(self) -> tuple[int, int]:
        """This process's part of a window, and how many parts there are."""
        if self._settings.source.split == "ranks":
            return 0, 1
        return self.slot.rank, self.slot.ranks

    @property
    def _part(self) -> tuple[int, ...]:
        """Which part of the source this process reads, so that no two draw the same numbers."""
        rank = self.slot.rank if self._settings.source.split == "ranks" else 0
        return (0, 0) if self._settings.source.split == "none" else (1 + self.slot.worker, rank)

    def _rounds(self, held: Held) -> list[list[list[int]]]:
        """Places of the samples in each round's micro-batches.

        Raises:
            UnevenRanksError: they cannot be dealt evenly.
        """
        settings, samples = self._settings, held.samples
        if not samples:
            return []
        if settings.sized and held.sizes is None:
            held.sizes = sizes_of_all(samples, settings.size, held.start.position)
        key = (settings.seed, self.epoch, held.start.number, held.start.window, held.start.position)
        return settings.grouping.rounds(
            samples,
            held.sizes,
            key=key if settings.shuffle else None,
            drop_last=settings.drop_last and held.last,
        )

    def _measure(self, held: Held) -> None:
        """Take the sizes, and leave out what has none or is too large."""
        settings, first = self._settings, held.start.position
        if not settings.sized or not held.samples:
            return
        try:
            held.sizes = sizes_of_all(held.samples, settings.size, first)
        except SizesError as error:
            if not settings.skip_failed:
                raise
            failed = [place for place, one in enumerate(held.samples) if not self._has_size(one)]
            if not failed:
                raise  # each has one, but of other axes
            self._leave_out("failed", len(failed), error)
            _remove(held, failed)
            self._measure(held)
            return
        over = settings.grouping.over(held.sizes, first)
        if over.size:
            self._count("oversize", over.size)
            held.sizes = np.delete(held.sizes, over, axis=0)
            _remove(held, over.tolist())

    def _has_size(self, sample: Any) -> bool:
        try:
            size_of(sample, self._settings.size, 0)
        except SizesError:
            return False
        return True

    def _leave_out(self, kind: str, number: int, error: Exception) -> None:
        if not self._told:
            _log.warning("%s; it is left out, and others like it", error)
            self._told = True
        self._count(kind, number)

    def _joined(self, waiting: Held, held: Held) -> Held:
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
        return Held(waiting.start, samples, (), held.last, sizes)

    # ------------------------------------------------------------------ reading

    def _held(self, start: Start) -> Iterator[Held]:
        """Samples that are in memory at a time: a window's, or as many as the bytes allow."""
        settings = self._settings
        at, barren = start, 0
        while not at.number or self._limit is not None:
            reader = settings.source.open(self.slot, epoch=self.epoch, number=at.number)
            if at.source is not None:
                reader.load(at.source)
            reader.skip(at.position - reader.position)
            if reader.position < at.position:
                raise StateMismatchError(
                    f"the state stands behind {at.position} items of the source, which has "
                    f"{reader.position}: it is another one"
                )
            number, made = at.number, self._made
            while not reader.ended:
                if self._owner(at.window) == self.slot.worker:
                    yield from self._window(reader, at)
                    at = self._next
                else:
                    reader.skip(at.left)
                    reader.skip(self._tail(reader))
                    at = self._behind(reader, at)
            if at.number == number:
                at = Start(number=number + 1, window=at.window, left=settings.window)
            barren = barren + 1 if self._made == made else 0
            if self._limit is not None and (not reader.position or barren > self.slot.workers + 1):
                raise SampleError(
                    f"the source has no samples for worker {self.slot.worker} of "
                    f"{self.slot.workers}, but batches_per_epoch asks for some; use fewer workers"
                )

    def _behind(self, reader: Reader, at: Start) -> Start:
        """Where the next window begins."""
        following = replace(
            at,
            window=at.window + 1,
            position=reader.position,
            left=self._settings.window,
            source=reader.state(),
        )
        if reader.ended:
            return replace(following, number=at.number + 1, position=0, source=None)
        return following

    def _tail(self, reader: Reader) -> int:
        """How many items follow a window, if they are too few to be dealt, and so belong to it."""
        ranks = self._dealt[1]
        if ranks == 1 and not self._settings.drop_last:
            return 0
        follow = reader.peek(ranks)
        return follow if follow < ranks else 0

    def _window(self, reader: Reader, at: Start) -> Iterator[Held]:
        """The samples of one window, all at once or as many as the bytes allow."""
        settings = self._settings
        if not settings.transforms and self._most_bytes is None:
            ahead, self._ahead = self._ahead, []
            read, left = reader.position, at.left - (reader.position - at.position)
            samples = [made for _, [made] in ahead]
            first = max(left - reserve(settings.window), 0)
            samples += reader.take(first)
            mark = reader.state()
            samples += reader.take(left - first)
            samples += reader.take(self._tail(reader))
            positions = [place for place, _ in ahead] + list(range(read, reader.position))
            yield from self._ended(reader, Held(at, samples, positions), mark)
            return
        positions = []
        held, begins, mark = Held(at, [], positions), at.position, None
        key = (settings.seed, self.epoch, at.number, *self._part)
        ahead, self._ahead = self._ahead, []
        left = at.left - (reader.position - at.position)
        items = chain(ahead, self._pipeline(self._items(reader, left), *key))
        for position, made in items:
            if position - begins == at.left - reserve(settings.window):
                mark = reader.state()
            if isinstance(made, Failed):
                if not settings.skip_failed:
                    raise made.error
                self._leave_out("failed", 1, made.error)
                continue
            needed = 0 if self._most_bytes is None else sum(map(held_bytes, made))
            full = self._most_bytes is not None and self.buffered_bytes + needed > self._most_bytes
            if full and held.samples:
                self._next = replace(at, position=position, left=at.left - (position - begins))
                self._measure(held)
                if held.samples:
                    yield held
                positions = []
                held = Held(self._next, [], positions)
                self.buffered_bytes = 0
            held.samples += made
            positions += [position] * len(made)
            self.buffered_bytes += needed
            self.largest_buffered_bytes = max(self.largest_buffered_bytes, self.buffered_bytes)
        yield from self._ended(reader, held, mark)
        self.buffered_bytes = 0

    def _ended(self, reader: Reader, held: Held, mark: dict[str, Any] | None) -> Iterator[Held]:
        """A window's last samples, less those that are left for the next one."""
        held.last = reader.ended
        self._measure(held)
        self._next = self._behind(reader, held.start)
        alone = self._settings.source.split != "none" or self.slot.workers == 1
        if alone and not reader.ended and held.sizes is not None:
            keep = self._settings.grouping.filled(held.sizes)
            while 0 < keep < len(held.samples) and held.positions[keep] == held.positions[keep - 1]:
                keep -= 1
            if 0 < keep < len(held.samples):
                position = held.positions[keep]
                # Threads read ahead, and samples that were left out count as positions.
                if mark is None or mark["position"] > position:
                    mark = held.start.source
                self._next = replace(self._next, position=position, source=mark)
                later = zip(held.positions[keep:], held.samples[keep:], strict=True)
                self._ahead = [
                    (at, [sample for _, sample in group])
                    for at, group in groupby(later, key=itemgetter(0))
                ]
                held.sizes = held.sizes[:keep]
                del held.samples[keep:]
        if held.samples:
            yield held

    def _items(self, reader: Reader, left: int) -> Iterator[tuple[int, Any]]:
        for _ in range(left):
            position = reader.position
            for item in reader.take(1):
                yield position, item
        for _ in range(self._tail(reader)):
            position = reader.position
            for item in reader.take(1):
                yield position, item


def _picked(held: Held, places: list[int]) -> list[Any]:
    if len(places) == 1:
        return [held.samples[places[0]]]
    return list(itemgetter(*places)(held.samples))  # half the time of a comprehension


def _remove(held: Held, places: list[int]) -> None:
    gone = set(places)
    kept = [place for place in range(len(held.samples)) if place not in gone]
    held.samples = [held.samples[place] for place in kept]
    held.positions = [held.positions[place] for place in kept]
