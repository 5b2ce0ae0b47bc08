"""`BudgetedIterableDataset`: micro-batches that fit the budget, of data without an index.

`StreamRun` is a loop over its `DataLoader` whose position is known; ranks end loops together by
`stop_together`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from itertools import islice
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from torchbudget.budget import MemoryBudget
from torchbudget.checks import called_as, check_flags, is_int, natural, optional
from torchbudget.cost.protocol import CostModel
from torchbudget.data.collate.collates import PadCollate
from torchbudget.data.frameworks import Caller
from torchbudget.data.run import Run
from torchbudget.data.same_on_ranks import check_same_on_ranks, check_same_samples
from torchbudget.data.size_check import SizeCheck
from torchbudget.data.sizes import SizeKey, check_key
from torchbudget.data.stream.cursor import Split, StreamState
from torchbudget.data.stream.options import StreamOptions
from torchbudget.data.stream.position import StreamPosition
from torchbudget.data.stream.sending import Sending, Sent, raising
from torchbudget.data.stream.source import source_of
from torchbudget.data.stream.transforms import Transform
from torchbudget.distributed import AskedRanks, Ranks
from torchbudget.errors import BudgetError, OptionError, StateError
from torchbudget.plan.fingerprint import Plain, rules_identity
from torchbudget.plan.oversize import Oversize, check_oversize
from torchbudget.plan.plan import ALL_DROPPED
from torchbudget.plan.report import PlanReport, ReadBatches
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.step import ShouldAdd
from torchbudget.protocols import ResumableSource
from torchbudget.units import Amount, parse_bytes

# Largest size in the fingerprint of a cost, on 1 to 4 axes: the real sizes are not known yet.
_LARGEST: Final[Sequence[Any]] = (2**16, *([2**16] * axes for axes in (2, 3, 4)))
_UNKNOWN: Final = np.array(np.nan)


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
        drop_last: drop the last micro-batch that could still have taken a sample, in each part, and
            the samples at the end of the source that the ranks cannot share. If no batch of an
            epoch is left, it is an error, and in one of several workers a warning.
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
        self.budget = None if budget is None else MemoryBudget.of(budget)
        if on_error not in ("raise", "skip"):
            raise OptionError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        if is_int(max_shapes):
            raise OptionError(
                "a stream's sizes are unknown before it is read: max_shapes must be pairs (n, L), "
                "as best_shapes returns for the sizes of some samples"
            )
        of_a_cost = {
            "limits": limits,
            "max_batch_size": max_batch_size,
            "batch_size_multiple": batch_size_multiple,
            "size_multiple": size_multiple,
            "max_shapes": max_shapes,
        }
        rules = _rules_of(cost, self.budget, oversize, of_a_cost)
        self.cost, self.size_multiple, self.shapes = cost, 1, ()
        stated: Plain = {"cost": "a predicate"}  # its cuts are compared
        if rules is not None:
            self.size_multiple, self.shapes = rules.size_multiple, rules.shapes
            stated = rules_identity(rules, *_LARGEST)
        read = source_of(source, split, shuffle=shuffle, seed=natural("seed", seed))
        check_key(size)
        self._ranks = AskedRanks(num_replicas, rank)
        self._options = StreamOptions(
            source=read,
            cost=cost,
            budget=self.budget,
            rules=rules,
            stated=stated,
            size=size,
            group=group,
            transforms=(*read.first_transforms, *transforms),
            threads=natural("threads", threads),
            given_window=optional("window", window),
            given_look_ahead=None if look_ahead is None else parse_bytes(look_ahead),
            oversize=oversize,
            drop_last=drop_last,
            skips_failed=on_error == "skip",
            batches_per_epoch=optional("batches_per_epoch", batches_per_epoch),
            uneven=uneven,
            collate_fn=collate_fn or PadCollate(size_multiple=self),
            ranks=self._ranks,
        )
        self._position = StreamPosition(self._options)
        self._read = ReadBatches()  # of the last tracked loop

    # ------------------------------------------------------------------ what it reads

    def __len__(self) -> int:
        """Return the number of batches of an epoch on this rank.

        Raises:
            TypeError: the number is unknown, without `batches_per_epoch`.
            StateError: a framework that resumes from a checkpoint without a position reads it.
        """
        Caller.find().check_length(epochs_differ=False)
        number = self._options.batches_per_epoch
        if number is None:
            raise TypeError("a stream has a length only with batches_per_epoch=")
        return number

    @property
    def skipped_samples(self) -> SkippedSamples:
        """Numbers of samples that were skipped."""
        return SkippedSamples(*self._position.progress.skipped.sum(axis=0).tolist())

    def report(self) -> PlanReport:
        """Report the fill and padding of the batches of the last tracked loop on this rank.

        Raises:
            StateError: no tracked loop has read a batch, or a predicate cuts the batches.
        """
        rules = self._options.rules
        if rules is None or not self._read.shapes:
            raise StateError(
                "a report needs a stream with a cost, and batches that a tracked loop has read: "
                "loop over stream.tracked(loader) first"
            )
        return self._read.report(rules, self.num_replicas, self.skipped_samples.oversize)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return self._position.progress.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()`, in every worker, read this epoch.

        If that is the next epoch anyway, a loaded position is kept, and with `batches_per_epoch`
        the source continues where the last epoch ended. Any other epoch starts a new pass.

        Raises:
            ShardedTwiceError: a framework that splits these batches again calls it.
        """
        # Its workers would raise in the one process that reads, and other processes wait forever.
        Caller.find().check_loader(self.num_replicas)
        self._position.set_epoch(natural("epoch", epoch))

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
            return self._position.begin_loop()
        except Exception as error:
            if get_worker_info() is None:
                raise
            # A persistent worker dies of an error in `iter`, but passes on an error in `next`.
            return raising(error)

    def check_ranks(self, workers: int | None = None) -> None:
        """Compare ranks: see `tracked`, which does it itself.

        Args:
            workers: number of processes that read on this rank; `None`: they are not compared.
        """
        options = self._options
        options.check_ranks_fit()
        slot = options.slot(workers=workers or 1)
        if get_worker_info() is not None:  # which cannot compare
            return
        if options.source.split != "ranks":
            at = self._position.begins().cursors[0]
            facts: Plain = {"epoch": at.epoch, "start": at.start, "rounds": at.rounds}
            facts |= options.dealing(slot)
            check_same_on_ranks(options.ranks, lambda: facts, each_time=workers is not None)
        elif workers is not None and not (options.uneven or options.source.splits_itself):
            # All workers of all ranks share the source's parts. Ranks with unequal numbers of
            # batches begin their loops at different times, and cannot compare.
            check_same_on_ranks(options.ranks, lambda: {"workers": workers}, each_time=True)

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
            raise OptionError(
                f"a {kind} saves its position itself: call its own state_dict(); in place of a "
                "loader that Accelerate has prepared, use integrations.accelerate.prepare"
            )
        Caller.find().check_loader(self.num_replicas)
        self.check_ranks(max(loader.num_workers, 1))
        self._read = ReadBatches()
        return StreamRun(self._position, loader, self._read)

    @property
    def _runs(self) -> WeakSet[Any]:
        """Its open runs, as a sampler has them."""
        return self._position.runs

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
        return self._position.state().to_plain(seeks=self._options.source.may_seek)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make every `iter()` begin at a saved position, until its epoch ends.

        Any state loads under another budget, cost or look-ahead. A state between two windows that
        was saved without workers loads, with `split="none"`, with any number of workers and ranks.
        So does any state at the beginning of an epoch.

        Raises:
            StateError: the state is malformed; or, at the next loop, persistent workers were
                started before it was loaded.
            StateMismatchError: the state belongs to another stream; or, at the next loop, this
                process cannot continue from it, or reads other samples at its position.
        """
        self._position.load(StreamState.of_plain(state_dict))

    def close(self) -> None:
        """End all iterations of this process and their threads, and close their sources."""
        self._position.close_loops()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker does not see the process that starts it.
        Caller.find().check_loader(self.num_replicas)
        return {**vars(self), "_position": copy.copy(self._position)}


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
        rules.refuse_alternatives()
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


# ---------------------------------------------------------------------- loops over its loader


class StreamRun(Run[StreamState]):
    """One loop over a loader of a stream, which `BudgetedIterableDataset.tracked` returns.

    Workers that persist are used again if they stand at the place where the loop begins. Else
    the loader gets new ones.

    Args:
        position: position of the stream.
        loader: a loader of the stream, with `batch_size=None`.
        read: counts the batches that come.

    Attributes:
        number: number of the run that has started its workers.
    """

    def __init__(
        self, position: StreamPosition, loader: DataLoader[Any], read: ReadBatches
    ) -> None:
        self._position, self._options, self._loader = position, position.options, loader
        self._read = read
        rules = self._options.rules
        self._check = None if rules is None else SizeCheck(rules, None)
        start, live = position.where(), getattr(loader, "_iterator", None)
        sending: Any = getattr(live, "_collate_fn", None)
        # Otherwise persistent workers are at other positions, or send none.
        if not isinstance(sending, Sending) or start is None or start is not sending.ended:
            loader._iterator = None
            first = 0 if start is None else start.turn
            sending = Sending(loader.collate_fn, position.progress.runs + 1, first)
        begins = position.begin_run(sending.number, max(loader.num_workers, 1))
        self._sending, self._start = sending, replace(begins, turn=sending.first)
        self.number: int = sending.number
        collate_fn, loader.collate_fn = loader.collate_fn, sending
        position.sending = sending
        try:
            super().__init__(position.runs, loader)
        except BaseException:
            self._note_end(broken_off=False)
            raise
        finally:
            loader.collate_fn, position.sending = collate_fn, None

    def _began(self) -> StreamState:
        return self._start

    def _take(self, came: Any) -> tuple[StreamState, Any]:
        if not isinstance(came, Sent):
            raise StateError(
                "a batch has no position: the stream's __iter__ must call super().__iter__() at "
                "once, not with the first batch, and yield its batches one by one"
            )
        options = self._options
        if self.last is self._first and options.window_ranks > 1:
            check_same_samples(options.ranks, came.worker, came.sizes)
        padded_size, number = came.planned
        batch, came.batch = came.batch, None  # nothing keeps it here while the next one is read
        if self._check is not None and padded_size is not None:
            self._check.compare(batch, padded_size, np.arange(number))
            self._read.shapes[(number, *padded_size)] += 1
            self._read.real += float(getattr(batch, "lengths", _UNKNOWN).sum())
        place = self.last.moved(came.worker, came.cursor)
        return place.following(options.batches_per_epoch), batch

    def _end(self) -> StreamState:
        place, options = self.last, self._options
        is_empty = place is self._start and place.is_beginning
        if is_empty and options.drop_last and options.window_ranks == options.num_replicas:
            raise OptionError(ALL_DROPPED.format("samples of the epoch"))
        if place.epoch == self._start.epoch:
            place = place.following(options.batches_per_epoch, ended=True)
        self._sending.ended = place
        return place

    def _move_to(self, place: StreamState) -> None:
        if self._position.runs is self._runs:
            self._position.stands_at(place)

    def _state(self, place: StreamState) -> dict[str, Any]:
        return place.to_plain(seeks=self._options.source.may_seek)

    def close(self) -> None:
        """End the run at its position; persistent workers end if it was left early."""
        live = self._batches
        if live is None:
            return
        broken_off = self._sending.ended is not self.last
        is_last = getattr(live, "_sampler_iter", None) is self._restarts
        if broken_off and is_last and self._loader._iterator is live:
            self._loader._iterator = None
        del live
        super().close()
        self._note_end(broken_off=broken_off)

    def _note_end(self, *, broken_off: bool) -> None:
        if self._position.runs is self._runs:
            self._position.run_closed(broken_off=broken_off)

    def __del__(self) -> None:
        self._batches = getattr(self, "_batches", None)
        self.close()


def stop_together(loader: Any, *, group: Any = None) -> Iterator[Any]:
    """Yield the batches of a loader until any rank has none left; then all ranks stop.

    It runs a small collective for each batch, on the host over gloo, and does not wait for the
    device. The remaining batches of other ranks are not read.

    Args:
        loader: the loader of this rank, or a tracked loop over it.
        group: process group. Default: all, if `torch.distributed` is initialized.
    """
    batches, ranks = iter(loader), Ranks(group)
    while True:
        given = [*islice(batches, 1)]
        if any(ranks.sum_on_host([not given])):
            return
        yield given.pop()  # nothing keeps it here while the next one is made
