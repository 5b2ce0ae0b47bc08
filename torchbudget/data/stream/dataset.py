"""`BudgetedIterableDataset`: micro-batches that fit the budget, of data without an index."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from inspect import signature
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchbudget.budget import MemoryBudget
from torchbudget.checks import called_as, check_flags, is_int, natural, optional
from torchbudget.cost.protocol import CostModel
from torchbudget.data.collate.collates import PadCollate
from torchbudget.data.frameworks import Caller
from torchbudget.data.run import warn_of_discarded_state
from torchbudget.data.same_on_ranks import check_same_on_ranks
from torchbudget.data.sizes.key import SizeKey, check_key
from torchbudget.data.stream.cursor import (
    Progress,
    Split,
    Standing,
    StreamCursor,
    StreamState,
    WorkerSlot,
)
from torchbudget.data.stream.epoch_reader import EpochReader, raising
from torchbudget.data.stream.run import Sending, StreamRun
from torchbudget.data.stream.source import source_of
from torchbudget.data.stream.transforms import Transform
from torchbudget.distributed import AskedRanks
from torchbudget.errors import BudgetError, OptionError, StateError
from torchbudget.plan.fingerprint import Plain, rules_identity
from torchbudget.plan.grouping import ShouldAdd
from torchbudget.plan.oversize import Oversize, check_oversize
from torchbudget.plan.report import PlanReport, ReadBatches
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import default_window
from torchbudget.protocols import ResumableSource
from torchbudget.units import Amount, parse_bytes

# Largest size in the fingerprint of a cost, on 1 to 4 axes: the real sizes are not known yet.
_LARGEST: Final[Sequence[Any]] = (2**16, *([2**16] * axes for axes in (2, 3, 4)))
_SHARE: Final = 4  # a quarter of the host's bytes is for the look-ahead, or else of the device's
# The least default. Audio of 350 KB a sample, under a budget of 64 MiB: 285 MiB before the first
# batch and 1.8 % padding, instead of 1,605 MiB and 0.5 % without a limit; with 64 MiB 5.1 %.
_LEAST_AHEAD: Final = 2**28


class SkippedSamples(NamedTuple):
    """Samples that are in no micro-batch, over all workers of this rank, since `set_epoch`.

    Attributes:
        oversize: number of samples that alone exceed the budget, with `oversize="skip"`.
        failed: number of samples whose transform or size raised an error, with `on_error="skip"`.
    """

    oversize: int
    failed: int


class BudgetedIterableDataset(IterableDataset[Any], ResumableSource):
    """Yields batches of a stream of ragged samples that fit a budget and fill it.

    It reads windows of consecutive samples, sorts each by size, and cuts it into micro-batches,
    each of which is the longest run of samples whose predicted cost is within the budget. It yields
    whole batches: pass it to a `DataLoader` with `batch_size=None` and any number of workers.

    Every sample is used exactly once in an epoch, over all ranks and workers, and every rank has
    the same number of batches. `split` says how ranks and workers share the source:

    - `"none"`: all workers of all ranks read the whole source. Workers take turns with the windows,
      and ranks share the micro-batches of each window. A worker transforms only the samples of its
      own windows. This is the default for an iterable, and for a map-style data set, which is
      shuffled as a whole, and of which each worker reads only its own samples.
    - `"workers"`: each worker reads its own part, the same on every rank, and ranks share the
      micro-batches of its windows. This is the default for a list of shards, and for a source that
      splits itself by worker (a streaming `datasets` dataset).
    - `"ranks"`: each worker of each rank reads its own part. The number of batches per rank is
      unknown in advance: on several ranks, pass `batches_per_epoch`, or `uneven=True` if the loop
      ends all ranks together, by `stop_together` or by `GradAccumulator.flush`. This is the default
      for a function, a webdataset pipeline, and a `datasets` dataset split by node.

    Args:
        source: an iterable that can be iterated again (an `IterableDataset`, a file reader); a
            map-style data set whose sizes are unknown until its samples are read; a function
            `(shard, num_shards)` that returns an iterator; or a list of shards, each an iterable or
            a function without arguments that returns one.
        cost: bytes of a micro-batch, such as a `PaddedCost`; or a predicate `should_add(batch,
            sample)`, which says whether a list of at least one sample takes the next sample, too.
        budget: a `MemoryBudget`, or the device's bytes; with a predicate `None`, or a
            `MemoryBudget` with the host's bytes only.
        size: the ragged field, several, or a function of the sample, as in `sizes_of`. With a
            predicate it may be left out; windows are then not sorted.
        transforms: applied to each sample before its size is taken: see `torchbudget.transforms`.
        threads: threads of each worker that apply the transforms; 0: the worker itself does.
        window: number of samples that are read, sorted and cut together, over all ranks that share
            a window. A larger window pads less. Default: 4,096 for each of these ranks.
        look_ahead: most bytes of samples that wait for their micro-batch in a worker; a window with
            more bytes is cut into parts. Not counted: the sample that did not fit any more, two
            samples per thread, items that are read together (a 32nd of `look_ahead`), one
            prefetched batch per rank and, on several ranks, the last micro-batch. Default: a
            quarter of the budget's `host` bytes, divided among the workers. Without `host` bytes: a
            quarter of the device's bytes, at least 256 MiB, for each rank that shares a window; no
            limit if `window` is given.
        shuffle: shuffle shards, and the micro-batches of a window. Otherwise these come longest
            first.
        seed: seed of all randomness, which is a function of (seed, epoch, shard, position in the
            shard).
        drop_last: drop the last micro-batch that could still have taken a sample, in each part. If
            no batch of an epoch is left, it is an error, and in one of several workers a warning.
        batches_per_epoch: number of batches of an epoch on each rank; a source that ends earlier
            starts over.
        uneven: ranks may have unequal numbers of batches.
        collate_fn: makes a batch of a list of samples. Default: a `PadCollate` with the same
            `size_multiple`. Batches of `PadCollate` and `PackCollate` report the lengths of the
            field that `size` names. If another library's collate rounds padded sizes up, pass the
            same `size_multiple`.
        max_batch_size: as in `MemoryBudgetBatchSampler`.
        batch_size_multiple: as in `MemoryBudgetBatchSampler`.
        size_multiple: as in `MemoryBudgetBatchSampler`.
        limits: as in `MemoryBudgetBatchSampler`.
        max_shapes: pairs (n, L), as `best_shapes` returns for the sizes of some samples.
        group: a function that returns the label of a transformed sample. No micro-batch has samples
            of two groups; ranks may have different groups at the same time.
        oversize: if a sample alone exceeds the budget, raise an error (`"raise"`), leave it out
            (`"skip"`; counted in `skipped_samples` and logged), or give it a micro-batch of its own
            (`"alone"`).
        on_error: if a transform or `size` raises an error for an item, raise an error that names
            the item (`"raise"`), or leave it out (`"skip"`; counted and logged once). An error of
            the source ends the epoch in any case.
        split: how ranks and workers share the source; see above.
        num_replicas: number of ranks. Default: the world size of `torch.distributed`, read when it
            is needed; 1 if it is not initialized. A worker uses the number of its parent process.
        rank: rank of this process.

    Raises:
        OptionError: an option is invalid, or two options cannot be combined.
        BudgetError: the budget does not limit the device; or it must limit the host and does not.

    While it is iterated:

    Raises:
        SampleError: a sample cannot be read or transformed.
        SizesError: a sample has no size, or the samples are ragged in another axis than the sizes,
            as in `sizes_of`.
        CostError: the cost is not vectorised, or its capacity contradicts its bytes; at the first
            window.
        OversizeError: a sample alone exceeds the budget, with `oversize="raise"`.
        OptionError: `drop_last` leaves nothing of the epoch.
        UnevenRanksError: the remaining samples cannot be shared so that all ranks have equally many
            batches.

    After the last batch of an epoch the stream advances to the next epoch; `set_epoch` chooses one.
    Both work with persistent workers, too.

    Attributes:
        cost: the cost that batches are planned by.
        size_multiple: padded sizes are multiples of it; `PadCollate(size_multiple=stream)` reads
            it.
        shapes: pairs (n, L) of rows and padded length; empty without `max_shapes`.

    >>> texts = [["a", "bcd", "ef"], ["ghijk"]]  # two shards
    >>> stream = BudgetedIterableDataset(
    ...     texts, PaddedCost(unit_bytes=1), 6, size=len, collate_fn=list, shuffle=False)
    >>> list(stream)
    [['ghijk'], ['bcd', 'ef'], ['a']]
    """

    @called_as("BudgetedIterableDataset(source, cost, budget, size=…), with a PaddedCost, say")
    def __init__(
        self,
        source: Any,
        cost: CostModel | ShouldAdd,
        budget: MemoryBudget | int | str | None,
        *,
        size: SizeKey = None,
        transforms: Sequence[Transform] = (),
        threads: int = 0,
        window: int | None = None,
        look_ahead: int | str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        batches_per_epoch: int | None = None,
        uneven: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        max_batch_size: int | None = None,
        batch_size_multiple: int = 1,
        size_multiple: int = 1,
        limits: Sequence[tuple[CostModel, Amount]] = (),
        group: Callable[[Any], Hashable] | None = None,
        max_shapes: Sequence[tuple[int, int]] | None = None,
        oversize: Oversize = "raise",
        on_error: str = "raise",
        split: Split | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        check_flags(shuffle=shuffle, drop_last=drop_last, uneven=uneven)
        self._ranks = AskedRanks(num_replicas, rank)
        self.budget = None if budget is None else MemoryBudget.of(budget)
        if on_error not in ("raise", "skip"):
            raise OptionError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        if is_int(max_shapes):
            raise OptionError(
                "a stream's sizes are unknown before it is read: max_shapes must be pairs (n, L), "
                "as best_shapes returns for the sizes of some samples"
            )
        options = {
            "limits": limits,
            "max_batch_size": max_batch_size,
            "batch_size_multiple": batch_size_multiple,
            "size_multiple": size_multiple,
            "max_shapes": max_shapes,
        }
        self._rules = rules = _rules_of(cost, self.budget, oversize, options)
        self.cost, self.size_multiple, self.shapes = cost, 1, ()
        self._stated: Plain = {"cost": "a predicate"}  # its cuts are compared
        if rules is not None:
            self.size_multiple, self.shapes = rules.size_multiple, rules.shapes
            self._stated = rules_identity(rules, *_LARGEST)
        self._group = group
        if group is not None and (rules is None or not callable(group)):
            raise OptionError(
                "group must be a function of a sample that returns its label, and goes together "
                f"with a cost, not with a predicate; got {group!r}"
            )
        self._source = source_of(source, split, shuffle=shuffle, seed=natural("seed", seed))
        check_key(size)
        self._transforms = (*self._source.first_transforms, *transforms)
        self._threads = natural("threads", threads)
        self._oversize, self._size = oversize, size
        self._look_ahead = None if look_ahead is None else parse_bytes(look_ahead)
        self._given_window = optional("window", window)
        self._uneven, self._drop_last, self._skip_failed = uneven, drop_last, on_error == "skip"
        self._batches_per_epoch = optional("batches_per_epoch", batches_per_epoch)
        self._collate_fn = collate_fn or PadCollate(size_multiple=self)
        self._check_ranks_fit()
        self._progress = Progress()
        self._read = ReadBatches()  # of the last tracked loop
        self._sending: Sending | None = None  # in the processes that a tracked loop has started
        self._readers: WeakSet[EpochReader] = WeakSet()
        self._begin_at(None)

    def _begin_at(self, start: StreamState | None, kept: EpochReader | None = None) -> None:
        """Make the next loop of this process begin at a state; `None`: at its epoch's beginning."""
        self._start = start
        self._kept = kept  # at the end of the last epoch, with samples in memory
        # The epoch that the next loop reads, if no loop has begun here since a state was loaded.
        self._loaded: int | None = None
        self._present: list[Standing | None] = [None]  # of the untracked loop that drew last
        self._runs: WeakSet[StreamRun] = WeakSet()  # those that are open
        self._beginning: StreamRun | None = None  # the run whose `iter(loader)` is under way
        self._changes, self._process = self._progress.changes, os.getpid()

    def _notice(self) -> None:
        """Drop state of another process, and state from before another process chose an epoch."""
        if self._changes != self._progress.changes:
            self._begin_at(None)
        elif self._process != os.getpid():
            self._begin_at(self._start)

    # ------------------------------------------------------------------ options

    @property
    def _window_ranks(self) -> int:
        """Number of ranks that share each window."""
        return 1 if self._source.split == "ranks" else self.num_replicas

    @property
    def _window(self) -> int:
        """Items that are read, sorted and cut together."""
        return self._given_window or default_window(self._window_ranks)

    @property
    def _sized(self) -> bool:
        """True if sizes are taken."""
        return self._rules is not None or self._size is not None

    def _look_ahead_of(self, slot: WorkerSlot) -> int | None:
        """Bytes of the look-ahead of one process; `None`: no limit."""
        host: int | None = getattr(self.budget, "host", None)
        device: int = getattr(self.budget, "device", None) or 0
        if self._look_ahead is not None or (host is None and self._given_window is not None):
            return self._look_ahead
        if host is not None:
            return max(host // _SHARE // slot.workers, 1)
        return self._window_ranks * max(device // _SHARE, _LEAST_AHEAD)

    def _groups_of(self, samples: list[Any]) -> npt.NDArray[np.int64] | None:
        """The number of each sample's group, shape `(S,)`, in the order of their appearance."""
        if self._group is None:
            return None
        numbers: dict[Hashable, int] = {}
        return np.array([numbers.setdefault(self._group(one), len(numbers)) for one in samples])

    def _dealing(self, slot: WorkerSlot) -> Plain:
        """The options that must be the same for samples to be read and planned the same way."""
        source = self._source
        dealing: Plain = self._stated | asdict(slot)
        dealing |= {
            "oversize": self._oversize,
            "size": None if callable(self._size) else repr(self._size),
            "drop_last": self._drop_last,
            "skip_failed": self._skip_failed,
        }
        if source.split != "ranks":
            dealing["rank"] = None  # all ranks stand in one place
        read: Plain = {"split": source.split, "shuffle": source.shuffle, "seed": source.seed}
        number, waiting = self._batches_per_epoch, self._look_ahead_of(slot)
        window: Plain = {"window": self._window, "sized": self._sized, "look_ahead": waiting}
        return dealing | read | window | {"batches_per_epoch": number}

    def _check_ranks_fit(self) -> None:
        """Raise an `OptionError` if the options do not go with the number of ranks."""
        ranks, known = self._window_ranks, self._uneven or self._batches_per_epoch is not None
        if ranks < self.num_replicas and not known:
            raise OptionError(
                f"each of {self.num_replicas} ranks reads its own part, so their numbers of "
                "batches differ, and the longest would wait forever: pass batches_per_epoch=…; or "
                "uneven=True, and end the loop with stop_together(loader)"
            )
        if self._window < ranks:
            raise OptionError(f"window must be at least the {ranks} ranks, got {self._window}")
        if self._skip_failed and ranks > 1:
            raise OptionError(
                f"on_error='skip' cannot be used with {ranks} ranks that plan from one source: a "
                "sample that fails on one of them alone would be lost or repeated. Drop such "
                "samples in a transform (transforms.keep_if), the same on all ranks; or pass a "
                "function (shard, num_shards) as the source, which gives each rank its own part"
            )

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank.

        Raises:
            TypeError: the number is unknown, without `batches_per_epoch`.
            StateError: a framework that resumes from a checkpoint without a position reads it.
        """
        Caller.find().check_length(epochs_differ=False)
        if self._batches_per_epoch is None:
            raise TypeError("a stream has a length only with batches_per_epoch=")
        return self._batches_per_epoch

    @property
    def skipped_samples(self) -> SkippedSamples:
        """Numbers of samples that were skipped."""
        return SkippedSamples(*self._progress.skipped.sum(axis=0).tolist())

    def report(self) -> PlanReport:
        """Report the fill and padding of the batches of the last tracked loop on this rank.

        Raises:
            StateError: no tracked loop has read a batch, or a predicate cuts the batches.
        """
        rules = self._rules
        if rules is None or not self._read.shapes:
            raise StateError(
                "a report needs a stream with a cost, and batches that a tracked loop has read: "
                "loop over stream.tracked(loader) first"
            )
        return self._read.report(rules, self.num_replicas, self.skipped_samples.oversize)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return self._progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()`, in every worker, read this epoch.

        If that is the next epoch anyway, a loaded position is kept, and with `batches_per_epoch`
        the source continues where the last epoch ended. Any other epoch starts a new pass.

        Raises:
            ShardedTwiceError: a framework that splits these batches again calls it.
        """
        # Its workers would raise in the one process that reads, and other processes wait forever.
        Caller.find().check_loader(self.num_replicas)
        self._notice()
        state, progress, loaded = self._where(), self._progress, self._loaded
        epoch = natural("epoch", epoch)
        if epoch == progress.epoch:
            self._begin_at(self._start, self._kept)
            self._loaded = None if loaded is None else epoch
            progress.ahead = progress.run = 0
        else:
            if state is not None and loaded is not None and not progress.ahead:
                warn_of_discarded_state(state.epoch, epoch, within=not state.is_beginning)
            progress.change(epoch, loaded=False)
            self._begin_at(None)
        progress.chosen = 1
        progress.skipped[:] = 0

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        """Read the epoch from its beginning, or from the position of a loaded state or a run.

        Raises:
            OptionError: the loader would collate the batches again.
            ShardedTwiceError: a framework splits the batches of this rank among its processes
                again.
            RankError: as in `tracked`.
        """
        try:
            Caller.find().check_loader(self.num_replicas)
            self.check_ranks()
            return self._begin_loop()
        except Exception as error:
            if get_worker_info() is None:
                raise
            # A persistent worker dies of an error in `iter`, but passes on an error in `next`.
            return raising(error)

    def _begin_loop(self) -> EpochReader:
        """Begin to read.

        Raises:
            StateError: another process loaded a state, which this one does not have; or `set_epoch`
                chose another epoch than that within which a loaded state stands.
        """
        progress, info, sending = self._progress, get_worker_info(), self._sending
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        first = sending is not None and not sending.has_begun
        tracked = sending is not None and sending.is_tracked(progress.run)
        inside = not tracked and progress.run > 0  # of an open run: the loop changes nothing
        if progress.loaded and self._start is None and not first:
            raise StateError(
                "these workers started before a state was loaded or a tracked loop was left: load "
                "before the first loop over the DataLoader, or begin a tracked loop"
            )
        counts = not (tracked or inside)
        if counts:
            progress.advance()
        loaded = None if inside else self._loaded
        # A run may be over before a slow worker begins.
        state = self._start if first or loaded is not None else self._where()
        state = None if inside else state
        # A loader takes from its first worker first, so that one reads as the worker in turn.
        turn = 0 if state is None else state.turn
        slot = self._slot((number + turn) % workers, workers)
        reader = self._reader_of(slot, state)
        later = state is not None and loaded not in (None, state.epoch)
        ended = state is not None and (info is not None or later) and reader.find_end()
        if loaded is not None:
            self._loaded = None
            if later and not ended:
                raise StateError(
                    f"set_epoch({loaded}) was called, and then a state within epoch "
                    f"{reader.standing.epoch} was loaded: call set_epoch({reader.standing.epoch}), "
                    "or do not load the state"
                )
            if later or info is not None:
                progress.begun = loaded
            if later:
                # `StatefulDataLoader` loads a state into workers, and at an epoch's end begins
                # twice: batches that workers of the first loop prefetch do not count.
                self._start = reader.standing.state
                progress.end(reader.standing, progress.runs)
                reader = self._reader_of(slot, self._where())
                ended, counts = False, info is None
        if counts:
            progress.ahead, progress.chosen = int(info is not None), 0
            reader.present = self._present
        reader.counts = progress.runs if counts else None
        reader.notes_end = counts or tracked
        if sending is not None:
            sending.send(reader if tracked else None)
        self._readers.add(reader)
        if ended:
            reader.end()
        return reader

    def _cursor_of(self, slot: WorkerSlot, state: StreamState | None) -> StreamCursor:
        """Return the cursor at which a process begins: of a state, or of the epoch's beginning.

        Raises:
            StateMismatchError: it cannot go on from the state.
        """
        return (state or self._epoch_begins(slot)).cursor_of(slot, self._dealing(slot))

    def _reader_of(self, slot: WorkerSlot, state: StreamState | None) -> EpochReader:
        """Return the reader of one process, which begins as `_cursor_of` says."""
        kept, info = self._kept, get_worker_info()
        self._kept = None
        cursor = self._cursor_of(slot, state)
        turn = 0 if info is None else (slot.worker - info.id) % slot.workers
        if kept is not None:
            # Without the source's own state, which need not be compared.
            if kept.standing.cursor.following(cursor.to_come)[:6] == cursor[:6]:
                kept.go_on(slot, cursor, turn)
                return kept
            kept.close()
        return EpochReader(self, slot, cursor, turn)

    def _ended(self, reader: EpochReader) -> None:
        """Note the position at which a reader ended an epoch: the next epoch may continue there."""
        if reader.counts is not None:
            self._progress.end(reader.standing, reader.counts)
        if self._batches_per_epoch is not None:
            self._start, self._kept = reader.standing.state, reader

    def check_ranks(self, workers: int | None = None) -> None:
        """Compare ranks: see `tracked`, which does it itself.

        Args:
            workers: number of processes that read on this rank; `None`: they are not compared.
        """
        self._notice()
        self._check_ranks_fit()
        slot = self._slot(workers=workers or 1)
        if self._source.split != "ranks":  # otherwise each reads its own samples
            cursor = (self._where() or self._epoch_begins(slot)).cursors[0]
            at = {"epoch": cursor.epoch, "start": cursor.start, "rounds": cursor.rounds}
            what = "facts" if workers is None else f"facts of {workers} workers"
            check_same_on_ranks(self._ranks, lambda: self._dealing(slot) | at, what)

    def _where(self) -> StreamState | None:
        """The state at which the next loop begins; `None`: at the beginning of its epoch."""
        if self._start is None:
            return None
        state = self._start.following(self._batches_per_epoch)
        return state if state.epoch == self._progress.epoch else None

    def _epoch_begins(self, slot: WorkerSlot) -> StreamState:
        """The epoch's beginning; with `batches_per_epoch`, where the last one ended."""
        epoch, batches = self._progress.epoch, self._batches_per_epoch
        ended = self._progress.ended(slot, epoch - 1)
        cursor, workers = StreamCursor(epoch, first_epoch=epoch, to_come=batches), 1
        if batches is not None and ended is not None:
            cursor, workers = ended
        of = replace(slot, worker=slot.worker % workers, workers=workers)
        state = StreamState(cursors=[cursor], dealing=self._dealing(of))
        return state.following(batches)

    def _slot(self, worker: int = 0, workers: int = 1) -> WorkerSlot:
        """One of the processes that share the source on this rank."""
        ranks, rank = self._ranks.now()
        return WorkerSlot(worker=worker, workers=workers, rank=rank, ranks=ranks)

    # ------------------------------------------------------------------ runs

    def tracked(self, loader: DataLoader[Any]) -> StreamRun:
        """Begin a loop over a loader of this stream that knows which batches it has received.

        After each batch, `state_dict()` is the position after that batch, with any number of
        workers, persistent or not, in or out of order. Workers send their positions along with the
        batches; the loader's `collate_fn` does not see the positions. After a `break` the workers
        end, and the next tracked loop continues.

        Args:
            loader: a `DataLoader` of this stream, with `batch_size=None`.

        Raises:
            OptionError: the loader is not one of this stream.
            RankError: ranks that share a source have different costs, budgets, options or numbers
                of workers, or read different samples in their first window; or a rank does not
                begin within the timeout of its process group. Workers of untracked loops cannot
                notice this.
        """
        kind = type(loader).__name__
        is_mine = isinstance(loader, DataLoader) and loader.dataset is self
        if not is_mine or loader.batch_size is not None:
            raise OptionError(
                f"tracked needs a DataLoader of this stream, with batch_size=None, got a {kind}; "
                "of a wrapper, such as Fabric's, pass the DataLoader that it was made of"
            )
        if hasattr(loader, "state_dict"):
            raise OptionError(f"a {kind} saves its position itself: call its own state_dict()")
        Caller.find().check_loader(self.num_replicas)
        self.check_ranks(max(loader.num_workers, 1))
        return StreamRun(self, loader)

    def _begin_run(self, number: int, workers: int) -> StreamState:
        """Begin a run of workers with a number, and return where they begin."""
        progress, start = self._progress, self._where()
        progress.advance()
        slots = [self._slot(worker, workers) for worker in range(workers)]
        cursors = [self._cursor_of(slot, start) for slot in slots]
        turn, dealing = 0 if start is None else start.turn, self._dealing(slots[0])
        self._start = StreamState(cursors=cursors, dealing=dealing, turn=turn)
        self._loaded, self._present = None, [None]
        progress.runs, progress.run = progress.runs + 1, number
        progress.ahead = progress.chosen = 0
        return self._start

    def _stands_at(self, run: StreamRun, place: StreamState) -> None:
        """Note a received batch of a run: the stream's position is now after it."""
        self._start, self._present[0], self._progress.begun = place, None, place.epoch

    def _run_closed(self, run: StreamRun, *, broken_off: bool) -> None:
        """Note the end of a run: workers of other loaders do not know where it was left."""
        if self._process == os.getpid() and self._runs is run._runs:
            self._progress.run = max((one.number for one in self._runs), default=0)
            state = self._where()
            if broken_off and state is not None and not self._runs:
                self._progress.change(state.epoch, loaded=True)
                self._changes = self._progress.changes

    # ------------------------------------------------------------------ position

    def state_dict(self) -> dict[str, Any]:
        """Return the position, in plain JSON types, except for the state of the source.

        In a loop over `tracked(loader)` it is the position after the last batch that the loop
        received. Without workers, and in each worker of torchdata's `StatefulDataLoader`, it is the
        position after the last batch that was drawn. A source with a state of its own continues
        from it (`"goes_on_by": "seeking"`); any other source starts over and skips (`"skipping"`).

        Another number of workers can continue from the beginning of an epoch and, if `split` is
        "none" and the loop has no workers, from a position between two windows. Another cost or
        budget can continue from any position: within a window the state has one bit, as text, for
        each of the samples that are cut together.

        Raises:
            StateError: workers prefetch batches, and the loop is not tracked.
        """
        self._notice()
        in_worker, at = get_worker_info() is not None, self._present[0]
        if self._progress.ahead and not in_worker:
            raise StateError(
                "workers of the DataLoader prefetch batches, so the position of its loop is "
                "unknown: loop over stream.tracked(loader), use a StatefulDataLoader, or call "
                "set_epoch first"
            )
        if at is None:
            state = self._where() or self._epoch_begins(self._slot())
        else:
            state = at.state
            if at.ended and not in_worker:
                state = state.following(self._batches_per_epoch)
        return state.to_plain(seeks=self._source.may_seek)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make every `iter()` begin at a saved position, until its epoch ends.

        Any state loads under another budget or cost. A state between two windows that was saved
        without workers loads under another look-ahead, too, and, with `split="none"`, with any
        number of workers and ranks. So does any state at the beginning of an epoch.

        Raises:
            StateError: the state is malformed; or, at the next loop, persistent workers were
                started before it was loaded.
            StateMismatchError: the state belongs to another stream; or, at the next loop, this
                process cannot continue from it, or reads other samples at its position.
        """
        self._notice()
        state = StreamState.of_plain(state_dict)
        state.check_order(self._dealing(self._slot()))
        chosen = self._progress.begun if self._progress.chosen else state.epoch
        if get_worker_info() is None:
            if not (self._progress.chosen and chosen == state.epoch):  # it need not be ended
                state = state.following(self._batches_per_epoch)
            self._progress.change(state.epoch, loaded=True)
        # In a worker: of a StatefulDataLoader, each of whose workers has a state of its own.
        self._begin_at(state)
        self._loaded = max(chosen, state.epoch)

    def close(self) -> None:
        """End all iterations of this process and their threads, and close their sources."""
        for reader in list(self._readers):
            reader.close()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not see the process that starts it.
        Caller.find().check_loader(self.num_replicas)
        # A copy begins where `iter()` would; an iteration stays with the process that iterates.
        kept: Any = {"_present": [None], "_progress": copy.copy(self._progress)}
        kept |= dict.fromkeys(["_kept", "_loaded", "_runs", "_readers", "_beginning"])
        return {**vars(self), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _runs=WeakSet(), _readers=WeakSet(), _process=os.getpid())


def _rules_of(
    cost: CostModel | ShouldAdd,
    budget: MemoryBudget | None,
    oversize: Oversize,
    options: dict[str, Any],
) -> BatchRules | None:
    """The rules of a micro-batch; `None` with a predicate.

    Args:
        cost: a cost, or a predicate.
        budget: budget of the device.
        oversize: what becomes of a sample that alone is over the budget.
        options: options of `BatchRules`.

    Raises:
        OptionError: an option is invalid, or does not go with a predicate.
        BudgetError: there is a cost, and the budget does not limit the device.
    """
    if isinstance(cost, type) or not (isinstance(cost, CostModel) or callable(cost)):
        raise OptionError(f"expected a cost model such as PaddedCost, or a predicate, got {cost!r}")
    if isinstance(cost, CostModel):
        if budget is None:
            raise BudgetError("with a cost, the budget must limit the device, got None")
        rules = BatchRules.of(cost, budget, **options)
        check_oversize(oversize, rules)
        return rules
    none = {name: signature(BudgetedIterableDataset).parameters[name].default for name in options}
    if options != none or oversize != "raise" or getattr(budget, "device", None) is not None:
        raise OptionError(
            "a predicate alone decides what a batch contains: pass None as the budget, or "
            "MemoryBudget(host=…) for the look-ahead, and leave out oversize and options of a "
            f"cost, got {options}, {budget!r}, oversize={oversize!r}"
        )
    return None
