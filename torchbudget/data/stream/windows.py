"""The windows of one process, as much of each as the bytes allow, cut and dealt to the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice, repeat
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from torchbudget.data.same_on_ranks import check_same_samples
from torchbudget.data.sizes.key import size_of, sizes_of_all
from torchbudget.data.sizes.sizes_of import check_first_axis
from torchbudget.data.stream.cursor import StreamCursor, WorkerSlot
from torchbudget.data.stream.generators import GeneratorStates, sample_seed, seed_generators
from torchbudget.data.stream.reader import Reader
from torchbudget.data.stream.sample_bytes import KeptBytes
from torchbudget.data.stream.transforms import Expanded, sample_random
from torchbudget.errors import SampleError, StateMismatchError, UnevenRanksError
from torchbudget.machine.allocators import map_large_blocks, return_free_pages
from torchbudget.plan.check_cost import check_cost
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.grouping import rounds_by_cost, rounds_by_predicate
from torchbudget.plan.oversize import oversized
from torchbudget.plan.solver import WindowKey
from torchbudget.units import format_bytes

if TYPE_CHECKING:
    from torchbudget.data.stream.dataset import BudgetedIterableDataset

_log: Final = logging.getLogger("torchbudget")
_FEWEST: Final = 8  # samples of one size: fewer may be alike by chance
# Several items are read at once, up to this share of the look-ahead, since it takes 0.1 ms to
# exchange a source's random generators.
_PART_AT_ONCE: Final = 32
# Items that each thread is given at once with a look-ahead, which does not count them, and without.
_FOR_A_THREAD: Final = (2, 64)
_KEPT_BLOCK_BYTES: Final = 2**25  # glibc's M_MMAP_THRESHOLD_MAX: it may keep blocks up to that size

_OTHER: Final = (
    "{} other sizes or cuts than when the state was saved: the source, its transforms, size= or "
    "the predicate changed, or the source yields other items each time; use the same ones again, "
    "or call set_epoch to start an epoch without the state"
)

# Its shard and its place there, the same in every process; the seed of its transforms' generators;
# and the item itself.
Item: TypeAlias = tuple[tuple[int, int], int, Any]
# Samples of one batch, and the padded size that was planned; `None`: none was.
_MicroBatch: TypeAlias = tuple[list[Any], list[int] | None]
# With the position after it: samples cut together, and the number of their finished rounds.
Found: TypeAlias = tuple[StreamCursor, int, _MicroBatch]


@dataclass(frozen=True, slots=True, eq=False)
class BufferedSamples:
    """Samples that are in memory together.

    Attributes:
        cursor: the boundary before them.
        samples: the samples, in the order in which they were read.
        following: the boundary after them; a pass, if they are the last of one.
        source: the source's state at the beginning of their window.
        checksum: a checksum of their sizes, or of their number.
        sizes: sizes of the samples, if sizes are taken; `None`: they were not, yet.
    """

    cursor: StreamCursor
    samples: list[Any]
    following: StreamCursor
    source: dict[str, Any] | None = None
    checksum: int = 0
    sizes: npt.NDArray[Any] | None = None


class Windows:
    """The windows of one process, one after the other, cut and split over the ranks.

    A window is a fixed run of `window` items of the reading order. If fewer items than ranks follow
    it, they belong to it. It is cut in parts when the bytes of the look-ahead are used up.

    Nothing here refers to an iteration: one that is dropped closes its source.

    Args:
        stream: stream whose samples are read.
        slot: slot of this process.

    Attributes:
        first_sizes: a digest of the sizes in the first window, if ranks share it.
        samples: number of samples that were read to be cut.
    """

    def __init__(self, stream: BudgetedIterableDataset, slot: WorkerSlot) -> None:
        self._stream, self._slot = stream, slot
        self._ranks, self._length = stream._window_ranks, stream._window
        self.first_sizes: int | None = None
        self.samples = 0
        self._endless = stream._batches_per_epoch is not None
        ahead = self._look_ahead = stream._look_ahead_of(slot)
        self._run_bytes = None if ahead is None else ahead // _PART_AT_ONCE + 1
        # Items that a window needs; 1 finds the end of a pass, whose last batch drops.
        self._fewest = self._ranks if self._ranks > 1 or stream._drop_last else 0
        self._warned = False
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
        """
        ranks, rank = self._ranks, self._slot.rank % self._ranks
        uneven: BufferedSamples | None = None  # cannot be split evenly alone
        last: list[_MicroBatch] = []  # the round that waits
        expected = start.checksum if start.rounds else None
        begun, before = start, 0
        parts = self._parts(start)
        while (buffered := _next_of(parts)) is not None:
            self.samples += len(buffered.samples)
            if uneven is not None:
                buffered = self._joined(uneven, buffered)
            try:
                cuts, rounds = self._cut(buffered)
            except UnevenRanksError:
                uneven = buffered
                continue
            uneven, at = None, buffered.cursor
            checksum = crc32(cuts, buffered.checksum)
            if expected not in (None, checksum):
                if not self._stream._source.stop_seeking():
                    raise StateMismatchError(_OTHER.format(f"the window at item {at.start} has"))
                parts.close()
                yield from self.micro_batches(start)
                return
            expected = None
            # No samples of this part may be in memory while the next ones are read.
            buffered.samples.clear()
            if not rounds:
                continue
            self._empty_passes = 0
            if last:
                yield at, 0, last[rank]
            before, last = len(rounds) // ranks - 1, rounds[-ranks:]
            begun = at._replace(source=buffered.source, checked=at.start, checksum=checksum)
            yield from _rest(begun, 0, rounds[rank:-ranks:ranks])
            if ranks == 1:
                yield buffered.following, 0, last.pop()
            rounds.clear()
        if uneven is not None and not self._stream._drop_last:
            if not last:
                begun = uneven.cursor
            samples = [sample for batch, _ in last for sample in batch] + uneven.samples
            _, rounds = self._cut(BufferedSamples(begun, samples, start))
            yield from _rest(begun, before, rounds[rank::ranks])
        elif last:
            yield start.next_pass(), 0, last[rank]

    def _joined(self, uneven: BufferedSamples, buffered: BufferedSamples) -> BufferedSamples:
        """Return samples that cannot be split evenly alone, with those after them.

        Raises:
            UnevenRanksError: they are more than the look-ahead.
        """
        kept, samples = KeptBytes(), uneven.samples + buffered.samples
        if self._look_ahead is not None and sum(map(kept.add, samples)) > self._look_ahead:
            raise UnevenRanksError(
                f"{len(uneven.samples)} samples fill the look-ahead of "
                f"{format_bytes(self._look_ahead)}, and cannot be split evenly over {self._ranks} "
                "ranks: raise the look-ahead, or use fewer ranks"
            )
        return replace(uneven, samples=samples, following=buffered.following, sizes=None)

    def _cut(self, buffered: BufferedSamples) -> tuple[bytes, list[_MicroBatch]]:
        """Return the cuts, and the micro-batches of one round after the other.

        Raises:
            UnevenRanksError: they cannot be split evenly.
        """
        stream, samples, cursor = self._stream, buffered.samples, buffered.cursor
        sizes = buffered.sizes
        if sizes is None:
            sizes = self._sizes(samples, cursor.start)
        if self._ranks > 1 and self.first_sizes is None:
            self.first_sizes = buffered.checksum
            check_same_samples(stream._ranks, self._slot.worker, self.first_sizes)
        key = WindowKey(
            seed=stream._source.seed,
            path=(cursor.first_epoch, cursor.number),
            places=np.array([cursor.start]),
            numbers=np.array([cursor.first_epoch + cursor.window(self._length)]),
            shuffle=stream._source.shuffle,
        )
        ranks, rules = Ranks(number=self._ranks), stream._rules
        last = stream._drop_last and not buffered.following.start
        if rules is None or sizes is None:  # a cost has sizes
            add: Any = stream.cost
            rounds = rounds_by_predicate(add, samples, sizes, ranks, key, drop_last=last)
        else:
            groups = stream._groups_of(samples)
            rounds = rounds_by_cost(rules, sizes, ranks, key, drop_last=last, groups=groups)
        # An array of objects picks several times as fast as a list.
        arranged = np.fromiter(samples, dtype=object, count=len(samples))[rounds.places]
        padded: Iterable[list[int] | None] = rounds.padded_sizes or repeat(None)
        cuts = map(slice, rounds.starts, rounds.stops)
        batches = map(np.ndarray.tolist, map(arranged.__getitem__, cuts))
        return np.array(rounds.stops).tobytes(), list(zip(batches, padded, strict=False))

    def _parts(self, cursor: StreamCursor) -> Generator[BufferedSamples]:
        """Yield the samples that are in memory together: a window, or as many as the bytes allow.

        Raises:
            SampleError: an item cannot be read, or the source has none.
            StateMismatchError: the source ends before `cursor`, or has other sizes before it.
        """
        stream, slot, length = self._stream, self._slot, self._length
        split = stream._source.split
        at_once = stream._threads * _FOR_A_THREAD[self._look_ahead is None]
        with ThreadPoolExecutor(stream._threads or 1, "torchbudget") as threads:
            pipeline = partial(transformed, stream=stream, threads=threads, at_once=at_once)
            while self._endless or not cursor.number:
                begun, given = cursor, False
                with closing(self._opened(cursor, pipeline)) as reader:
                    while not (reader.ended or reader.was_moved()):
                        stop = reader.position // length * length + length
                        window = cursor.window(length)
                        if split == "none" and window % slot.workers != slot.worker:
                            reader.skip_to(stop)
                            reader.tail(self._fewest)
                            cursor = self._after(reader, cursor)
                            continue
                        for buffered in self._window(reader, cursor, stop, pipeline):
                            cursor = buffered.following
                            if buffered.samples:
                                given = True
                                yield buffered
                            if reader.was_moved():
                                break
                    if reader.was_moved():  # it is opened again
                        continue
                if not begun.start:
                    self._check_pass(reader.position, given=given)
                cursor = begun.next_pass()

    def _opened(self, cursor: StreamCursor, pipeline: Callable[..., Any]) -> Reader:
        """Open the source at a cursor, by its state if that is right.

        Raises:
            StateMismatchError: the samples before the cursor have other sizes.
        """
        while True:
            reader = self._stream._source.open(self._slot, cursor)
            try:
                reader.go_to(cursor)
                self._check_before(reader, cursor, pipeline)
            except StateMismatchError:
                reader.close()
                if not self._stream._source.stop_seeking():
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
                if samples:
                    sizes = self._sizes(samples, cursor.checked)
                    checksum = self._checksum(samples, sizes, checksum)
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
        stream, slot = self._stream, self._slot
        alone = slot.part(stream._source.split)[1] == 1
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
        return cursor._replace(start=reader.position, rounds=0)

    def _window(
        self, reader: Reader, cursor: StreamCursor, stop: int, pipeline: Callable[..., Any]
    ) -> Iterator[BufferedSamples]:
        """Yield the samples of one window, all at once or as many as the bytes allow."""
        begun, waiting, look_ahead, state = cursor, list[Any](), self._look_ahead, reader.state
        if look_ahead is None and not (self._stream._transforms or self._stream._skip_failed):
            waiting = reader.take(stop - reader.position)
            waiting += reader.tail(self._fewest)
        else:
            runs = iter(lambda: reader.run(stop - reader.position, self._run_bytes), [])
            tail = map(reader.tail, [self._fewest])  # not before the whole window is made
            made = chain.from_iterable(
                map(self._accepted, pipeline(self._items(reader, cursor, some)))
                for some in (runs, tail)
            )
            position, buffered_bytes, kept = reader.position - 1, 0, KeptBytes()
            for samples in made:  # not enumerated, which would keep what copies were made of
                position += 1
                if look_ahead is not None:
                    found = [kept.without_rest(sample) for sample in samples]
                    samples, needed = [one for one, _ in found], sum(size for _, size in found)
                    if buffered_bytes + needed > look_ahead and waiting and position < stop:
                        part = BufferedSamples(
                            begun, waiting, cursor._replace(start=position, rounds=0), state
                        )
                        yield (part := self._measured(part))
                        begun, waiting, buffered_bytes, kept = part.following, [], 0, KeptBytes()
                        needed = sum(map(kept.add, samples))
                    buffered_bytes += needed
                    self._return_memory(reader)
                waiting += samples
        yield self._measured(BufferedSamples(begun, waiting, self._after(reader, cursor), state))

    def _return_memory(self, reader: Reader) -> None:
        """Give free memory back to the system, after reading as many bytes as it may keep."""
        if reader.read_bytes >= max(self._look_ahead or 0, _KEPT_BLOCK_BYTES):
            reader.read_bytes = 0
            if get_worker_info() is None:
                return_free_pages()

    def _items(
        self, reader: Reader, cursor: StreamCursor, runs: Iterable[list[Any]]
    ) -> Iterator[Item]:
        key = self._stream._source.seed, cursor.first_epoch, cursor.number
        for values in runs:
            values.reverse()
            while values:  # an item that was made into samples is not kept here
                name = reader.place(reader.position - len(values))
                yield name, sample_seed(*name, *key), values.pop()

    def _sizes(self, samples: list[Any], first: int) -> npt.NDArray[Any] | None:
        """The sizes of samples; `None` if sizes are not taken."""
        if not self._stream._sized:
            return None
        sizes = sizes_of_all(samples, self._stream._size, first)
        return sizes[:, 0] if sizes.shape[1:] == (1,) else sizes

    def _checksum(self, samples: list[Any], sizes: npt.NDArray[Any] | None, before: int = 0) -> int:
        """A checksum of sizes, or of the number of samples, after that of the samples before."""
        return crc32(bytes(len(samples)) if sizes is None else sizes.tobytes(), before)

    def _measured(self, part: BufferedSamples) -> BufferedSamples:
        """Samples with sizes and checksum, without those that are too large."""
        stream, samples, first = self._stream, part.samples, part.cursor.start
        sizes = self._sizes(samples, first) if samples else None
        checksum, following = self._checksum(samples, sizes), part.following
        if following.start:  # else another pass begins
            following = following._replace(source=part.source, checked=first, checksum=checksum)
        if sizes is not None and not self._has_checked_axes and len(sizes) >= _FEWEST:
            check_first_axis(lambda few: [samples[i] for i in few], stream._size, sizes, "size")
            self._has_checked_axes = True
        if sizes is not None and stream._rules is not None:
            rules, largest = stream._rules, sizes.max(axis=0)
            if not self._has_checked_cost:
                check_cost(rules, sizes, largest)
                self._has_checked_cost = True
            # A transform may make several samples of one item, or none, so samples have no index.
            called = f"sample {{}} of the items from {first} on".format
            over = oversized(sizes, largest, rules, stream._oversize, called)
            if over.size:
                self._stream._progress.skipped[self._slot.worker] += over.size, 0
                stays = np.delete(np.arange(len(sizes)), over)
                samples, sizes = [samples[place] for place in stays.tolist()], sizes[stays]
        return replace(part, samples=samples, sizes=sizes, checksum=checksum, following=following)

    def _accepted(self, samples: list[Any] | SampleError) -> list[Any]:
        """Return the samples of an item, none if it failed; raise if none may be skipped."""
        if not isinstance(samples, SampleError):
            return samples
        if not self._stream._skip_failed:
            raise samples
        if not self._warned:
            _log.warning("%s; it is skipped, as later ones are without a warning", samples)
            self._warned = True
        self._stream._progress.skipped[self._slot.worker] += 0, 1
        return []


def _next_of(parts: Iterator[BufferedSamples]) -> BufferedSamples | None:
    """Return the next part; the process keeps its own random numbers while it is read."""
    own = GeneratorStates.now()
    try:
        return next(parts, None)
    finally:
        own.restore()


def _rest(begun: StreamCursor, before: int, batches: list[_MicroBatch]) -> Iterator[Found]:
    """One rank's micro-batches of samples that begin at a cursor, of which some rounds are done.

    Args:
        begun: the cursor.
        before: rounds of the samples before these.
        batches: micro-batches of the rounds after them.
    """
    done = max(begun.rounds, before)
    return zip(repeat(begun), count(done + 1), batches[done - before :])


def transformed(
    items: Iterator[Item], stream: BudgetedIterableDataset, threads: Executor, *, at_once: int
) -> Iterator[list[Any] | SampleError]:
    """Yield the samples of each item, or the error of its transforms, in order.

    Python's, NumPy's and torch's global generators are seeded for each item. Threads share them, so
    that there the time decides which item gets which of their numbers.

    With threads, items are read, then transformed: a source is never read while a transform runs.

    Args:
        items: items that were read.
        stream: stream whose transforms are applied.
        threads: threads that apply the transforms, each to another item, if the stream says so.
        at_once: items that threads are given together.
    """
    if not stream._threads:
        for item in items:
            if stream._transforms:
                seed_generators(item[1])
            made = [_transformed(stream, item)]
            del item
            yield made.pop()
        return
    while some := list(islice(items, at_once)):
        seed_generators(some[0][1])
        yield from list(threads.map(partial(_transformed, stream), some))


def _transformed(stream: BudgetedIterableDataset, item: Item) -> list[Any] | SampleError:
    name, seed, value = item
    token = sample_random.set(seed)
    samples = [value]
    try:
        for transform in stream._transforms:
            if isinstance(transform, Expanded):
                samples = [one for sample in samples for one in transform(sample)]
            else:
                samples = [transform(sample) for sample in samples]
        if stream._skip_failed and stream._sized:
            for sample in samples:
                size_of(sample, stream._size, name[1])
    except Exception as error:  # noqa: BLE001  (a user's transform may raise anything)
        described = stream._source.describe(name, value)
        failure = SampleError(f"{described} cannot be transformed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    finally:
        sample_random.reset(token)
    return samples
