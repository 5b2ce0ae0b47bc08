"""What a stream reads at a time: windows, or as much of one as the bytes allow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.data.sizes.key import SizeKey, size_of, sizes_of_all
from torchbudget.data.stream.pipeline import Failed, Item, Pipeline
from torchbudget.data.stream.sample_bytes import held_bytes
from torchbudget.data.stream.source import Reader, Source, WorkerSlot
from torchbudget.data.stream.transforms import Transform
from torchbudget.errors import SampleError, SizesError, StateMismatchError
from torchbudget.plan.grouping import Grouping

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
class BufferedSamples:
    """Samples that are in memory at a time.

    Attributes:
        start: where they begin.
        samples: in the order in which they were read.
        last: nothing follows in the pass.
        sizes: of the samples, once they were measured.
    """

    start: Start
    samples: list[Any]
    last: bool = False
    sizes: npt.NDArray[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all processes that read a stream agree on.

    Attributes:
        source: with its transforms, and the threads that apply them in each process.
        grouping: how a window is cut and dealt.
        size: where a sample's stands.
        sized: whether samples are asked for it.
        window: items that are read, sorted and cut together.
        shuffle: shards, and the micro-batches of a window.
        seed: of all randomness.
        drop_last: the last micro-batch of a pass, where it is incomplete.
        skip_failed: leave out samples that cannot be made.
        batches_per_epoch: on each rank; `None`: as many as one pass gives.
        collate_fn: makes a batch.
        identity: what a state must agree with.
    """

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


class Windows:
    """The windows of one process, one after the other.

    Args:
        settings: of the stream.
        slot: which process this is.
        most_bytes: that samples may hold while they wait for their micro-batch; `None`: any number.
        count: called with the kind and the number of samples that were left out.
        endless: begin again where the source ends.

    Attributes:
        next: where what follows the last samples begins.
        made: micro-batches, counted by who makes them.
        buffered_bytes: that the samples of the present window hold.
        largest_buffered_bytes: that they ever held.
    """

    def __init__(
        self,
        settings: Settings,
        slot: WorkerSlot,
        *,
        most_bytes: int | None,
        count: Callable[[str, int], None],
        endless: bool,
    ) -> None:
        self._settings = settings
        self._slot = slot
        self._most_bytes = most_bytes
        self._count = count
        self._endless = endless
        self._pipeline = Pipeline(settings.transforms, settings.threads, settings.source.called)
        self._told = False
        self.next = Start(left=settings.window)
        self.made = 0
        self.buffered_bytes = 0
        self.largest_buffered_bytes = 0

    def close(self) -> None:
        """End the threads."""
        self._pipeline.close()

    @property
    def dealt(self) -> tuple[int, int]:
        """This process's part of a window, and how many parts there are."""
        if self._settings.source.split == "ranks":
            return 0, 1
        return self._slot.rank, self._slot.ranks

    def held(self, epoch: int, start: Start) -> Iterator[BufferedSamples]:
        """Samples that are in memory at a time: a window's, or as many as the bytes allow.

        Raises:
            SampleError: an item cannot be read, or there is none where some are asked for.
        """
        settings, slot = self._settings, self._slot
        at, barren = start, 0
        while not at.number or self._endless:
            reader = settings.source.open(slot, epoch=epoch, number=at.number)
            if at.source is not None:
                reader.load(at.source)
            reader.skip(at.position - reader.position)
            if reader.position < at.position:
                raise StateMismatchError(
                    f"the state stands behind {at.position} items of the source, which has "
                    f"{reader.position}: it is another one"
                )
            number, made = at.number, self.made
            while not reader.ended:
                if self._owner(at.window) == slot.worker:
                    yield from self._window(reader, epoch, at)
                    at = self.next
                else:
                    reader.skip(at.left)
                    reader.skip(self._tail(reader))
                    at = self._behind(reader, at)
            if at.number == number:
                at = Start(number=number + 1, window=at.window, left=settings.window)
            barren = barren + 1 if self.made == made else 0
            if self._endless and (not reader.position or barren > slot.workers + 1):
                raise SampleError(
                    f"the source has no samples for worker {slot.worker} of {slot.workers}, but "
                    "batches_per_epoch asks for some; use fewer workers"
                )

    def measure(self, held: BufferedSamples) -> None:
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
            self.measure(held)
            return
        over = settings.grouping.oversized(held.sizes, first)
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

    def _owner(self, window: int) -> int:
        if self._settings.source.split == "none":
            return window % self._slot.workers
        return self._slot.worker

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
        ranks = self.dealt[1]
        if ranks == 1 and not self._settings.drop_last:
            return 0
        follow = reader.peek(ranks)
        return follow if follow < ranks else 0

    def _window(self, reader: Reader, epoch: int, at: Start) -> Iterator[BufferedSamples]:
        """The samples of one window, all at once or as many as the bytes allow."""
        settings = self._settings
        left = at.left - (reader.position - at.position)
        if not settings.transforms and self._most_bytes is None:
            samples = reader.take(left)
            samples += reader.take(self._tail(reader))
            yield from self._ended(reader, BufferedSamples(at, samples))
            return
        held = BufferedSamples(at, [])
        for position, made in self._pipeline(
            self._items(reader, left), settings.seed, epoch, at.number
        ):
            if isinstance(made, Failed):
                if not settings.skip_failed:
                    raise made.error
                self._leave_out("failed", 1, made.error)
                continue
            needed = 0 if self._most_bytes is None else sum(map(held_bytes, made))
            full = self._most_bytes is not None and self.buffered_bytes + needed > self._most_bytes
            if full and held.samples:
                left = at.left - (position - at.position)  # below 0 in a window's tail
                self.next = replace(at, position=position, left=max(left, 0))
                self.measure(held)
                if held.samples:
                    yield held
                held = BufferedSamples(self.next, [])
                self.buffered_bytes = 0
            held.samples += made
            self.buffered_bytes += needed
            self.largest_buffered_bytes = max(self.largest_buffered_bytes, self.buffered_bytes)
        yield from self._ended(reader, held)
        self.buffered_bytes = 0

    def _ended(self, reader: Reader, held: BufferedSamples) -> Iterator[BufferedSamples]:
        """A window's last samples."""
        held.last = reader.ended
        self.measure(held)
        self.next = self._behind(reader, held.start)
        if held.samples:
            yield held

    def _items(self, reader: Reader, left: int) -> Iterator[Item]:
        for _ in range(left):
            yield from self._item(reader)
        for _ in range(self._tail(reader)):
            yield from self._item(reader)

    @staticmethod
    def _item(reader: Reader) -> Iterator[Item]:
        position = reader.position
        for value in reader.take(1):
            yield Item(position, reader.place(position), value)


def _remove(held: BufferedSamples, places: Iterable[int]) -> None:
    gone = set(places)
    held.samples = [one for place, one in enumerate(held.samples) if place not in gone]
