"""The windows of one process, as much of each as the bytes allow, cut and dealt to the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any, Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from torchbudget.cost.protocol import IntArray
from torchbudget.data.same_on_ranks import check_same_samples
from torchbudget.data.sizes import check_first_axis, size_of, sizes_of_all
from torchbudget.data.stream.cursor import StreamCursor, StreamPart, WorkerSlot
from torchbudget.data.stream.options import StreamOptions
from torchbudget.data.stream.reader import KeptBytes, Reader
from torchbudget.data.stream.source import sample_seed, seed_generators
from torchbudget.data.stream.transforms import Expanded, sample_random
from torchbudget.errors import SampleError, StateMismatchError, UnevenRanksError
from torchbudget.machine.allocators import map_large_blocks, return_free_pages
from torchbudget.plan.check_cost import check_cost
from torchbudget.plan.cursor import BoolArray
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.oversize import oversized
from torchbudget.plan.solver import WindowKey
from torchbudget.plan.step import rounds_by_cost, rounds_by_predicate
from torchbudget.random_state import RandomState
from torchbudget.units import format_bytes

_log: Final = logging.getLogger("torchbudget")
_FEWEST: Final = 8  # samples of one size: fewer may be alike by chance
# Several items are read at once, up to this share of the look-ahead, since it takes 0.1 ms to
# exchange a source's random generators.
_PART_AT_ONCE: Final = 32
# Items that each thread is given at once with a look-ahead, which does not count them, and without.
_FOR_A_THREAD: Final = (2, 64)
_KEPT_BLOCK_BYTES: Final = 2**25  # glibc's M_MMAP_THRESHOLD_MAX: it may keep blocks up to that size

_NEVER: Final = np.iinfo(np.int64).max

_OTHER: Final = (
    "{} other sizes or cuts than when the state was saved: the source, its transforms, size= or "
    "the predicate changed, or the source yields other items each time; use the same ones again, "
    "or call set_epoch to start an epoch without the state"
)

# Its shard and its place there, the same in every process; the seed of its transforms' generators;
# and the item itself.
Item: TypeAlias = tuple[tuple[int, int], int, Any]
# Samples of one batch, the padded size that was planned (`None`: none was), and the samples' places
# in their part.
_MicroBatch: TypeAlias = tuple[list[Any], list[int] | None, IntArray]
# With the position after it: samples cut together, and the number of their finished rounds.
Found: TypeAlias = tuple[StreamCursor, int, _MicroBatch]


class DealtPart(NamedTuple):
    """A part: samples that are cut together and dealt to the ranks.

    Attributes:
        cursor: the boundary before it.
        begun: the place from which its rounds are counted.
        rounds: its micro-batches, one round after the other.
        following: the boundary after it; a pass, if it is the last of one.
        sizes: sizes of its samples.
    """

    cursor: StreamCursor
    begun: StreamCursor
    rounds: list[_MicroBatch]
    following: StreamCursor
    sizes: npt.NDArray[Any]


class WaitingSamples:
    """The samples that were read and are not cut yet: the next part begins with them.

    Args:
        cursor: the boundary before them, or a place inside the part that begins there.

    Attributes:
        cursor: the place before the first sample; inside a part if rounds of it are done.
        begun: the same place without rounds, with the source's state at the beginning of the first
            sample's window: cursors of the next part are made of it.
        samples: the samples, in the order in which they were read.
        places: the position after each sample's item.
        sizes: the sizes of the first samples, as far as they were measured.
        before: how many of the samples come from windows before the present one.
        window: the cursor at the beginning of the window that is read, with the source's state
            there: cursors at the end of a part are made of it.
    """

    def __init__(self, cursor: StreamCursor) -> None:
        self.samples: list[Any] = []
        self.places: list[int] = []
        self.sizes: npt.NDArray[Any] = np.empty(0, np.int64)
        self.begin(cursor, cursor.source)

    @property
    def dealt(self) -> BoolArray:
        """Whether the first samples are to be dealt, if an earlier cut has dealt some of them."""
        part = self.cursor.part
        return np.empty(0, np.bool_) if part is None or part.dealt is None else part.dealt

    @property
    def enough(self) -> bool:
        """True if samples wait, and all of those that an earlier cut has seen."""
        return len(self.samples) >= max(len(self.dealt), 1)

    def begin(self, cursor: StreamCursor, state: dict[str, Any] | None) -> None:
        """Note that the samples from a cursor on come next."""
        begun = cursor._replace(source=state, checked=cursor.start, checksum=None)
        self.before, self.window = len(self.samples), begun._replace(rounds=0, part=None)
        if not self.samples:
            self.cursor, self.begun = cursor, begun

    def drop(self, number: int, following: StreamCursor) -> None:
        """Drop the first samples, which were cut; the others begin the next part."""
        left, self.samples = self.samples[number:], []
        self.begin(following, self.window.source)
        self.samples, self.places, self.sizes = left, self.places[number:], self.sizes[number:]

    def take_back(
        self, begun: StreamCursor, last: list[_MicroBatch], sizes: list[npt.NDArray[Any]]
    ) -> None:
        """Put the last round of a part, and the parts without rounds after it, before the others.

        Args:
            begun: the place where the part begins.
            last: the round.
            sizes: sizes of the part, and of the parts after it.
        """
        number = sum(map(len, sizes))
        samples: list[Any] = [None] * number
        left = np.append(np.zeros(number, np.bool_), np.ones(len(self.samples), np.bool_))
        left[number : number + len(self.dealt)] = self.dealt
        for batch, _, places in last:
            left[places] = True
            for sample, place in zip(batch, places.tolist(), strict=True):
                samples[place] = sample
        self.cursor = self.begun = begun.dealt_anew(None, left)
        self.samples, self.places = samples + self.samples, [0] * number + self.places
        self.sizes = np.concatenate([*sizes, self.sizes])


class StreamWindows:
    """The windows of one process, one after the other, cut and split over the ranks.

    A window is a fixed run of `window` items of the reading order. If fewer items than ranks are
    left after a window, they belong to it. If the bytes of the look-ahead are used up, a window is
    cut in parts.

    Nothing here refers to the loop that reads, so that a loop that is dropped closes its source.

    Args:
        options: what is read, and how it is cut.
        slot: slot of this process.
        skipped: counts the samples that were oversize, and those that failed.

    Attributes:
        first_sizes: a digest of the sizes in the first window, if ranks share it.
        samples: number of samples that were read to be cut.
    """

    def __init__(self, options: StreamOptions, slot: WorkerSlot, skipped: IntArray) -> None:
        self._options, self._slot, self._skipped = options, slot, skipped
        self._ranks, self._length = options.window_ranks, options.window
        self.first_sizes: int | None = None
        self.samples = 0
        self._endless = options.batches_per_epoch is not None
        ahead = self._look_ahead = options.look_ahead_of(slot)
        self._run_bytes = None if ahead is None else ahead // _PART_AT_ONCE + 1
        # Fewer items after a window belong to it. With `drop_last` one item is read ahead, to know
        # whether the window is the last one of the pass.
        self._fewest = self._ranks if self._ranks > 1 or options.drop_last else 0
        self._has_checked_axes = False  # that sizes are of the ragged one
        self._has_checked_cost = False
        self._empty_passes = 0  # that were read since samples were dealt
        if self._look_ahead is not None and get_worker_info() is not None:
            map_large_blocks()

    def micro_batches(self, start: StreamCursor) -> Generator[Found]:
        """Yield this rank's micro-batches, each with the place after it.

        A place is the beginning of the samples that are cut together, and the number of their
        rounds that are done. With several ranks the last round waits for the next samples: at the
        end of the stream it is cut anew, with samples that cannot be split evenly alone.

        Raises:
            StateMismatchError: samples whose first rounds are done are cut in other places.
            UnevenRanksError: the last samples of the stream cannot be split evenly.
        """
        ranks, rank = self._ranks, self._slot.rank % self._ranks
        last: list[_MicroBatch] = []  # the round that waits
        sizes: list[npt.NDArray[Any]] = []  # of its part, and of parts without rounds after it
        begun, waiting = start, WaitingSamples(start)
        parts = self._parts(start, waiting)
        while True:
            try:
                with RandomState.take(devices=False):  # the process keeps its own random numbers
                    part = next(parts, None)
            except StateMismatchError:
                if not self._options.source.stop_seeking():
                    raise
                yield from self.micro_batches(start)
                return
            if part is None:
                break
            rounds, self.samples = part.rounds, self.samples + len(part.sizes)
            sizes = [part.sizes] if rounds else [*sizes, part.sizes]
            if not rounds:
                continue
            self._empty_passes = 0
            if last:
                yield part.cursor, 0, last[rank]
            last, begun = rounds[-ranks:], part.begun
            yield from _rest(part.begun, rounds[rank:-ranks:ranks])
            if ranks == 1:
                yield part.following, 0, last.pop()
            rounds.clear()  # no samples of a part may be in memory while the next ones are read
        following, number = start.next_pass(), len(waiting.samples)
        self.samples += number
        if last and (not number or self._options.drop_last):
            yield following, 0, last[rank]
        elif number and not self._options.drop_last:
            if last:
                waiting.take_back(begun, last, sizes)
            part = self._dealt(waiting, 0, following)
            if part is None:
                raise UnevenRanksError(
                    f"{number} samples are left at the end, and cannot be split evenly over "
                    f"{ranks} ranks without repeating or dropping one: use another number of ranks "
                    "or a larger budget, or drop the rest (drop_last=True)"
                )
            yield from _rest(part.begun, part.rounds[rank::ranks])

    def _dealt(
        self, waiting: WaitingSamples, stop: int, following: StreamCursor
    ) -> DealtPart | None:
        """Cut the samples that wait, up to the last item at which the ranks can share them.

        The samples after it begin the next part. `None`: no samples can be shared yet.

        Args:
            waiting: the samples.
            stop: the end of their window.
            following: the boundary after them.

        Raises:
            StateMismatchError: the samples have other sizes or cuts than their cursor says.
        """
        samples, cursor, dealt = waiting.samples, waiting.cursor, waiting.dealt
        if len(samples) < len(dealt):
            return None
        stays, sizes = self._measured(waiting), waiting.sizes
        if cursor.part is not None and not cursor.rounds:
            _check(cursor, cursor.part.checksum, checksum_of(sizes[: len(dealt)]))
        if self._ranks > 1 and self.first_sizes is None and samples:
            self.first_sizes = checksum_of(sizes)
            check_same_samples(self._options.ranks, self._slot.worker, self.first_sizes)
        # The ranks can share any multiple of their number. The part must end between two items,
        # since a cursor stands there.
        places = np.array(waiting.places, np.int64)
        ends = (places < stop) & (np.diff(places, append=stop) > 0)
        ends &= np.cumsum(stays) % self._ranks == 0
        ends[: waiting.before] = False
        for number in (len(samples), *(np.flatnonzero(ends)[-1:] + 1).tolist()):
            if number < len(samples):
                following = waiting.window._replace(start=waiting.places[number - 1])
            try:
                cuts, rounds = self._cut(waiting, stays[:number], is_last=not following.start)
            except UnevenRanksError:
                continue
            rest, known = dealt[number:], max(number, len(dealt))
            done_after = np.append(np.zeros(number, np.int64), rest * _NEVER)
            for place, (*_, of_batch) in enumerate(rounds):
                done_after[of_batch] = place // self._ranks + 1
            of_sizes = checksum_of(sizes[:known])
            part = StreamPart(of_sizes, done_after, dealt if len(dealt) else None)
            checksum = crc32(cuts, of_sizes)
            if cursor.rounds:
                _check(cursor, cursor.checksum, checksum)
            skipped = int((~stays[:number]).sum() - (~dealt[:number]).sum())
            self._skipped += skipped, 0
            begun = waiting.begun._replace(checksum=checksum, part=part)
            if following.start:  # else another pass begins
                own = checksum_of(sizes[waiting.before : number])
                if not rest.all():
                    following = following.dealt_anew(checksum_of(sizes[number:known]), rest)
                following = following._replace(checksum=own)
            waiting.drop(number, following)
            return DealtPart(cursor, begun, rounds, following, sizes[:number])
        return None

    def _cut(
        self, waiting: WaitingSamples, stays: BoolArray, *, is_last: bool
    ) -> tuple[bytes, list[_MicroBatch]]:
        """Return the cuts, and the micro-batches of one round after the other.

        Args:
            waiting: the samples.
            stays: which of the first of them are cut.
            is_last: they are the last ones of a pass.

        Raises:
            UnevenRanksError: they cannot be split evenly.
        """
        options, cursor, places = self._options, waiting.cursor, np.flatnonzero(stays)
        samples = [waiting.samples[place] for place in places.tolist()]
        sizes = waiting.sizes[places]
        key = WindowKey(
            seed=options.source.seed,
            path=(cursor.first_epoch, cursor.number),
            places=np.array([cursor.start]),
            numbers=np.array([cursor.first_epoch + cursor.window(self._length)]),
            shuffle=options.source.shuffle,
        )
        ranks, rules = Dealing(number=self._ranks), options.rules
        drop = options.drop_last and is_last
        if rules is None:
            add: Any = options.cost
            taken = sizes if options.sized else None
            rounds = rounds_by_predicate(add, samples, taken, ranks, key, drop_last=drop)
        else:
            groups = options.groups_of(samples)
            rounds = rounds_by_cost(rules, sizes, ranks, key, drop_last=drop, groups=groups)
        # An array of objects picks several times as fast as a list.
        arranged = np.fromiter(samples, dtype=object, count=len(samples))[rounds.places]
        padded: Iterable[list[int] | None] = rounds.padded_sizes or repeat(None)
        parts = [*map(slice, rounds.starts, rounds.stops)]
        batches = map(np.ndarray.tolist, map(arranged.__getitem__, parts))
        of_batches = map(places[rounds.places].__getitem__, parts)
        cuts = np.array(rounds.stops).tobytes() + rounds.places.tobytes()
        return cuts, [*zip(batches, padded, of_batches, strict=False)]

    def _parts(self, cursor: StreamCursor, waiting: WaitingSamples) -> Generator[DealtPart]:
        """Yield a window, or as many samples as the bytes allow, one after the other.

        Args:
            cursor: the cursor to begin at.
            waiting: gets the samples that are read; in the end those that cannot be shared.

        Raises:
            SampleError: an item cannot be read, or the source has none.
            StateMismatchError: the source ends before `cursor`, or has other sizes before it.
        """
        options, slot, length = self._options, self._slot, self._length
        split = options.source.split
        at_once = options.threads * _FOR_A_THREAD[self._look_ahead is None]
        with ThreadPoolExecutor(options.threads or 1, "torchbudget") as threads:
            pipeline = partial(transformed, options=options, threads=threads, at_once=at_once)
            while self._endless or not cursor.number:
                begun, given = cursor, cursor.part is not None
                with closing(self._opened(cursor, pipeline)) as reader:
                    while not (reader.ended or reader.was_moved()):
                        stop = reader.position // length * length + length
                        window = cursor.window(length)
                        if split == "none" and window % slot.workers != slot.worker:
                            reader.skip_to(stop)
                            reader.tail(self._fewest)
                            cursor = self._after(reader, cursor)
                            continue
                        waiting.begin(cursor, reader.state)
                        for part in self._window(reader, cursor, stop, pipeline, waiting):
                            given |= len(part.sizes) > 0
                            yield part
                            if reader.was_moved():  # the samples that wait are read again
                                waiting.drop(len(waiting.samples), part.following)
                                break
                        cursor = waiting.cursor
                        if waiting.samples:
                            given, cursor = True, self._after(reader, waiting.window)
                    if reader.was_moved():  # it is opened again
                        continue
                if not begun.start:
                    self._check_pass(reader.position, given=given)
                cursor = begun.next_pass()
        if len(waiting.samples) < len(waiting.dealt):
            raise StateMismatchError(_OTHER.format("the source's last window has"))

    def _opened(self, cursor: StreamCursor, pipeline: Callable[..., Any]) -> Reader:
        """Open the source at a cursor, by its state if that is right.

        Raises:
            StateMismatchError: the samples before the cursor have other sizes.
        """
        while True:
            reader = self._options.source.open(self._slot, cursor)
            try:
                reader.go_to(cursor)
                self._check_before(reader, cursor, pipeline)
            except StateMismatchError:
                reader.close()
                if not self._options.source.stop_seeking():
                    raise
            else:
                return reader

    def _check_before(
        self, reader: Reader, cursor: StreamCursor, pipeline: Callable[..., Any]
    ) -> None:
        """Compare the samples before a boundary with their checksum, and go to the boundary."""
        if not cursor.rounds and cursor.checksum is not None:
            checksum, length = 0, self._length
            # Windows of other workers may lie between them and the boundary.
            stop = min(cursor.start, (cursor.checked // length + 1) * length)
            runs = iter(lambda: reader.run(stop - reader.position, self._run_bytes), [])
            for samples in map(self._accepted, pipeline(self._items(reader, cursor, runs))):
                checksum = checksum_of(self._sizes(samples, cursor.checked), checksum)
            if checksum != cursor.checksum:
                window = f"the window from item {cursor.checked} to {stop} has"
                raise StateMismatchError(_OTHER.format(window))
        reader.skip_to(cursor.start)
        reader.note_state()

    def _check_pass(self, items: int, *, given: bool) -> None:
        """Note that a pass over `items` items has ended, and whether any gave samples.

        Raises:
            SampleError: the items of this process gave no samples.
        """
        options, slot = self._options, self._slot
        alone = slot.part(options.source.split)[1] == 1
        nothing = not items or (slot.workers == 1 and not given)
        # Windows move on by one worker each pass, and samples for all ranks may need more passes.
        self._empty_passes += 1
        most_empty = slot.workers * self._ranks
        if (nothing and (self._endless or alone)) or self._empty_passes > most_empty:
            raise SampleError(
                f"the source has no samples for worker {slot.worker} of {slot.workers}, of {items} "
                "items: use fewer workers, or check that files exist and that transforms, skipping "
                "or drop_last leave samples; an iterator that is used up after one epoch must be "
                "opened in __iter__, or in the function of a shard"
            )

    def _after(self, reader: Reader, cursor: StreamCursor) -> StreamCursor:
        """Return the boundary at a reader's position."""
        if reader.ended:
            return cursor.next_pass()
        return cursor._replace(start=reader.position, rounds=0, part=None)

    def _window(
        self,
        reader: Reader,
        cursor: StreamCursor,
        stop: int,
        pipeline: Callable[..., Any],
        waiting: WaitingSamples,
    ) -> Iterator[DealtPart]:
        """Yield the parts of one window: one, or several if the bytes are limited.

        Raises:
            UnevenRanksError: samples that fill the look-ahead cannot be split evenly.
        """
        look_ahead = self._look_ahead
        if look_ahead is None and not (self._options.transforms or self._options.skips_failed):
            first = reader.position + 1
            waiting.samples += reader.take(stop - reader.position)
            waiting.samples += reader.tail(self._fewest)
            waiting.places += range(first, reader.position + 1)
        else:
            runs = iter(lambda: reader.run(stop - reader.position, self._run_bytes), [])
            tail = map(reader.tail, [self._fewest])  # not before the whole window is made
            made = chain.from_iterable(
                map(self._accepted, pipeline(self._items(reader, cursor, some)))
                for some in (runs, tail)
            )
            position, kept = reader.position - 1, KeptBytes()
            held = 0 if look_ahead is None else sum(map(kept.add, waiting.samples))
            for samples in made:  # `enumerate` would keep a reference to the samples
                position += 1
                if look_ahead is not None:
                    found = [kept.without_rest(sample) for sample in samples]
                    samples, needed = [one for one, _ in found], sum(size for _, size in found)
                    while position < stop and waiting.enough and held + needed > look_ahead:
                        following = waiting.window._replace(start=position)
                        part = self._dealt(waiting, stop, following)
                        if part is None:
                            raise UnevenRanksError(
                                f"{len(waiting.samples)} samples fill the look-ahead of "
                                f"{format_bytes(look_ahead)}, and cannot be split evenly over "
                                f"{self._ranks} ranks: raise the look-ahead, or use fewer ranks"
                            )
                        yield part
                        kept = KeptBytes()
                        held = sum(map(kept.add, waiting.samples))
                        needed = sum(map(kept.add, samples))
                    held += needed
                    self._return_memory(reader)
                waiting.samples += samples
                waiting.places += [position + 1] * len(samples)
        following = self._after(reader, waiting.window)
        part = self._dealt(waiting, stop, following)
        if part is not None:
            yield part
        if waiting.samples and self._endless and self._options.drop_last and not following.start:
            # The ranks cannot share them. In the next pass, whose beginning is a place to resume
            # from, nobody would know of them.
            waiting.drop(len(waiting.samples), following)

    def _return_memory(self, reader: Reader) -> None:
        """Give free memory back to the system, after reading as many bytes as it may keep."""
        if reader.read_bytes >= max(self._look_ahead or 0, _KEPT_BLOCK_BYTES):
            reader.read_bytes = 0
            if get_worker_info() is None:
                return_free_pages()

    def _items(
        self, reader: Reader, cursor: StreamCursor, runs: Iterable[list[Any]]
    ) -> Iterator[Item]:
        key = self._options.source.seed, cursor.first_epoch, cursor.number
        for values in runs:
            values.reverse()
            while values:  # an item that was made into samples is not kept here
                name = reader.place(reader.position - len(values))
                yield name, sample_seed(*name, *key), values.pop()

    def _sizes(self, samples: list[Any], first: int) -> npt.NDArray[Any]:
        """The sizes of samples, shape `(n,)` or `(n, d)`; `(n, 0)` if sizes are not taken."""
        if not (self._options.sized and samples):
            return np.empty((len(samples), 0), np.int64)
        sizes = sizes_of_all(samples, self._options.size, first)
        return sizes[:, 0] if sizes.shape[1:] == (1,) else sizes

    def _measured(self, waiting: WaitingSamples) -> BoolArray:
        """Measure samples that wait; return which of them micro-batches take."""
        options, samples, first = self._options, waiting.samples, waiting.cursor.start
        if (known := len(waiting.sizes)) < len(samples):
            new = self._sizes(samples[known:], first + known)
            waiting.sizes = np.concatenate([waiting.sizes, new]) if known else new
        sizes, stays = waiting.sizes, np.ones(len(samples), np.bool_)
        stays[: len(waiting.dealt)] = waiting.dealt
        if options.sized and not self._has_checked_axes and len(sizes) >= _FEWEST:
            check_first_axis(lambda few: [samples[i] for i in few], options.size, sizes, "size")
            self._has_checked_axes = True
        dealt = np.flatnonzero(stays)
        if options.rules is not None and len(dealt):
            rules, largest = options.rules, sizes[dealt].max(axis=0)
            if not self._has_checked_cost:
                check_cost(rules, sizes, largest)
                self._has_checked_cost = True
            # A transform may make several samples of one item, or none, so samples have no index.
            called = lambda at: f"sample {dealt[at]} of the items from {first} on"  # noqa: E731
            over = oversized(sizes[dealt], largest, rules, options.oversize, called)
            stays[dealt[over]] = False
        return stays

    def _accepted(self, samples: list[Any] | SampleError) -> list[Any]:
        """Return the samples of an item, none if it failed; raise if none may be skipped."""
        if not isinstance(samples, SampleError):
            return samples
        if not self._options.skips_failed:
            raise samples
        if not self._skipped[1]:
            _log.warning("%s; it is skipped, as later ones are without a warning", samples)
        self._skipped += 0, 1
        return []


def _check(cursor: StreamCursor, expected: int | None, found: int) -> None:
    if expected not in (None, found):
        raise StateMismatchError(_OTHER.format(f"the window at item {cursor.start} has"))


def checksum_of(sizes: npt.NDArray[Any], before: int = 0) -> int:
    """A checksum of sizes (of their number if they are not taken), after that of those before."""
    return crc32(sizes.tobytes() or bytes(len(sizes)), before)


def _rest(begun: StreamCursor, batches: list[_MicroBatch]) -> Iterator[Found]:
    """One rank's micro-batches of the rounds after a place."""
    return zip(repeat(begun), count(begun.rounds + 1), batches[begun.rounds :])


def transformed(
    items: Iterator[Item], options: StreamOptions, threads: Executor, *, at_once: int
) -> Iterator[list[Any] | SampleError]:
    """Yield the samples of each item, or the error of its transforms, in order.

    Python's, NumPy's and torch's global generators are seeded for each item. Threads share them, so
    that there the time decides which item gets which of their numbers.

    With threads, items are read, then transformed: a source is never read while a transform runs.

    Args:
        items: items that were read.
        options: those of the stream.
        threads: threads that apply the transforms, each to another item, if the stream says so.
        at_once: items that threads are given together.
    """
    if not options.threads:
        for item in items:
            if options.transforms:
                seed_generators(item[1])
            made = [_transformed(options, item)]
            del item
            yield made.pop()
        return
    while some := list(islice(items, at_once)):
        seed_generators(some[0][1])
        yield from list(threads.map(partial(_transformed, options), some))


def _transformed(options: StreamOptions, item: Item) -> list[Any] | SampleError:
    name, seed, value = item
    token = sample_random.set(seed)
    samples = [value]
    try:
        for transform in options.transforms:
            if isinstance(transform, Expanded):
                samples = [one for sample in samples for one in transform(sample)]
            else:
                samples = [transform(sample) for sample in samples]
        if options.skips_failed and options.sized:
            for sample in samples:
                size_of(sample, options.size, name[1])
    except Exception as error:  # noqa: BLE001  (a user's transform may raise anything)
        described = options.source.describe(name, value)
        failure = SampleError(f"{described} cannot be transformed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    finally:
        sample_random.reset(token)
    return samples
