"""`BudgetedIterableDataset`: micro-batches that fit the budget, of data that has no index."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, check_flags, natural, optional
from torchbudget.cost.models.protocol import CostModel
from torchbudget.data.collate.pad_collate import PadCollate
from torchbudget.data.sizes.key import SizeKey, check_key
from torchbudget.data.stream.epoch_reader import EpochReader
from torchbudget.data.stream.positions import END, Positions
from torchbudget.data.stream.source import Source, Split, WorkerSlot, is_indexed
from torchbudget.data.stream.transforms import Transform
from torchbudget.data.stream.windows import Settings
from torchbudget.distributed import ranks_of
from torchbudget.errors import BudgetError, OptionError, StateError, StateMismatchError
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.fingerprint import cost_fingerprint, fingerprint
from torchbudget.plan.grouping import ByCost, ByPredicate, Grouping
from torchbudget.plan.oversize import Oversize, check_oversize
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import default_window
from torchbudget.units import parse_bytes

_LARGEST: Final = 2**16  # size that a cost is asked for at most, to tell it from others
_AXES: Final = 4
_HOST_SHARE: Final = 4  # a quarter of the host's bytes is for what waits for its micro-batch
_WORKERS: Final = 512  # that count for themselves
_KINDS: Final = ("oversize", "failed")

ShouldAdd = Callable[[list[Any], Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSamples:
    """Samples that no micro-batch has, over all workers of this rank, since `set_epoch`.

    Attributes:
        oversize: alone over the budget, with `oversize="skip"`.
        failed: could not be made, with `on_error="skip"`.
    """

    oversize: int
    failed: int


class BudgetedIterableDataset(IterableDataset[Any]):
    """Batches of a stream of ragged samples that fit a budget of bytes and fill it.

    Windows of consecutive samples are read, sorted by size and cut into micro-batches, each the
    longest run whose predicted cost is within the budget. Batches come ready made: pass it to a
    `DataLoader` with `batch_size=None`, and any number of workers.

    Every sample comes exactly once an epoch, over all ranks and workers, and every rank has the
    same number of batches, in one of three ways that `split` names:

    - `"none"`: all workers of all ranks read the whole source, one window in turn is each
      worker's, and its micro-batches are dealt to the ranks. Transforms run on own windows only.
      The default for an iterable, and for a map-style data set, of which nothing is read twice:
      it is shuffled as a whole, and workers skip what is not theirs.
    - `"workers"`: each worker reads its own part, the same on every rank, and the micro-batches of
      its windows are dealt to the ranks. The default for a list of shards, and for what splits
      itself by worker (a streaming `datasets` dataset).
    - `"ranks"`: each worker of each rank reads a part of its own. Nobody knows how many batches
      that makes: with several ranks, `batches_per_epoch` must say it, or `uneven=True` that the
      loop ends all ranks together: by `stop_together`, or by `GradAccumulator.flush`. The default
      for a function, a webdataset pipeline, a Ray Data iterator, a `datasets` one split by node.

    Args:
        source: an iterable that can be iterated again (an `IterableDataset`, a file reader); a
            map-style data set, whose sizes nobody knows before its samples are read; a function
            `(shard, num_shards)` that gives an iterator; or a list of shards, each an iterable or a
            function without arguments that gives one.
        cost: bytes of a micro-batch, such as `PaddedCost`; or a predicate
            `should_add(batch, sample)`, of a list of at least one sample and the next one.
        budget: a `MemoryBudget`, or the device's bytes; with a predicate it may be `None`.
        size: what makes a sample ragged: a field, several, or a function of the sample, as in
            `sizes_of`. With a predicate, what windows are sorted by, if it is given.
        transforms: of each sample, before its size is taken: see `torchbudget.transforms`.
        threads: that apply them in each worker; 0: none of its own.
        window: samples that are read, sorted and cut together, over all ranks that share them.
            Default: 4,096 for each of them. A larger one pads less.
        look_ahead: bytes that a worker's samples may hold while they wait for their micro-batch; a
            window that would hold more is cut in parts. What does not count: one sample that did
            not fit any more, those in threads (two for each), one read ahead for each rank, and of
            several ranks the last micro-batch. Default: a quarter of the budget's `host`, divided
            among the workers; without one, no limit.
        shuffle: shards, and the micro-batches of a window. Otherwise they come longest first.
        seed: of all randomness, which is a function of (seed, epoch, shard, place within it).
        drop_last: drop the last micro-batch that could still have taken a sample, in each part.
        batches_per_epoch: batches on each rank; where the source ends before, it begins again.
        uneven: ranks may have unequal numbers of batches.
        collate_fn: makes a batch of a list of samples. Default: `PadCollate` of the same
            `size_multiple`.
        max_batch_size: as in `MemoryBudgetBatchSampler`.
        batch_size_multiple: likewise.
        size_multiple: likewise.
        oversize: what becomes of a sample that alone is over the budget: `"raise"`, `"skip"`
            (counted in `skipped_samples`, logged) or `"alone"`.
        on_error: what becomes of a sample whose transform or size raises: `"raise"` an error that
            names it, or `"skip"` (counted, logged once). A source that raises is at its end.
        split: how the processes share the source; see above.
        num_replicas: ranks. Default: those of `torch.distributed` where it is initialized, else 1.
        rank: of this process.

    Raises:
        OptionError: an option, or a pair of options, that cannot hold.
        BudgetError: the budget does not limit the device, or not the host where it must.

    While it is iterated:

    Raises:
        SampleError: a sample cannot be read or made.
        OversizeError: a sample alone is over the budget and `oversize="raise"`.
        UnevenRanksError: what is left cannot be dealt evenly to the ranks.

    The epoch is that of `set_epoch`, which reaches workers that persist.

    >>> texts = [["a", "bcd", "ef"], ["ghijk"]]  # two shards
    >>> stream = BudgetedIterableDataset(
    ...     texts, PaddedCost(unit_bytes=1), 6, size=len, collate_fn=list, shuffle=False)
    >>> list(stream)
    [['ghijk'], ['bcd', 'ef'], ['a']]
    """

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
        oversize: Oversize = "raise",
        on_error: str = "raise",
        split: Split | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__()
        check_flags(shuffle=shuffle, drop_last=drop_last, uneven=uneven)
        check_oversize(oversize)
        if on_error not in ("raise", "skip"):
            raise OptionError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        check_key(size)
        self.num_replicas, self.rank = ranks_of(num_replicas, rank)
        self.budget = None if budget is None else MemoryBudget.of(budget)
        seed = natural("seed", seed)
        reads = Source.of(source, split, shuffle=shuffle, seed=seed)
        shared = 1 if reads.split == "ranks" else self.num_replicas
        batches_per_epoch = optional("batches_per_epoch", batches_per_epoch)
        if shared < self.num_replicas and batches_per_epoch is None and not uneven:
            raise OptionError(
                f"each of {self.num_replicas} ranks reads a part of its own, so that numbers of "
                "batches differ, and ranks would wait for each other for ever: say "
                "batches_per_epoch=…; or uneven=True, and end the loop with stop_together(loader)"
            )
        window = optional("window", window) or default_window(shared)
        if window < shared:
            raise OptionError(f"window={window} is below the number of ranks, {shared}")
        self.look_ahead = None if look_ahead is None else parse_bytes(look_ahead)
        rules = {
            "size_multiple": at_least_one("size_multiple", size_multiple),
            "max_batch_size": optional("max_batch_size", max_batch_size),
            "batch_size_multiple": at_least_one("batch_size_multiple", batch_size_multiple),
        }
        if is_indexed(source):
            transforms = (source.__getitem__, *transforms)  # reading, in threads too
        if collate_fn is None:
            collate_fn = PadCollate(size_multiple=size_multiple)
        sized = isinstance(cost, CostModel) or size is not None
        self._settings = Settings(
            source=reads,
            transforms=tuple(transforms),
            threads=natural("threads", threads),
            grouping=self._grouping(cost, rules, oversize, shared),
            size=size,
            sized=sized,
            window=window,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            skip_failed=on_error == "skip",
            batches_per_epoch=batches_per_epoch,
            collate_fn=collate_fn,
            identity={
                "window": window,
                "seed": seed,
                "shuffle": shuffle,
                "split": reads.split,
                "sized": sized,
                "cost": _fingerprint(cost) if isinstance(cost, CostModel) else "a predicate",
                "budget": None if self.budget is None else self.budget.device,
                "drop_last": drop_last,
                "oversize": oversize,
                "on_error": on_error,
                "batches_per_epoch": batches_per_epoch,
                **rules,
            },
        )
        # Workers, those that persist too, see the epoch and are heard, through shared memory.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._left_out = torch.zeros((_WORKERS, len(_KINDS)), dtype=torch.int64).share_memory_()
        self._state: dict[str, Any] | None = None
        self._positions = Positions()
        self._walk: EpochReader | None = None  # the last one
        self._walks: weakref.WeakSet[EpochReader] = weakref.WeakSet()

    def _grouping(
        self, cost: CostModel | ShouldAdd, rules: dict[str, Any], oversize: Oversize, ranks: int
    ) -> Grouping:
        shared = Ranks(number=ranks)
        if not isinstance(cost, type) and isinstance(cost, CostModel):
            if self.budget is None:
                raise BudgetError("with a cost, the budget must limit the device, got None")
            return ByCost(BatchRules.of(cost, self.budget, **rules), oversize, shared)
        if isinstance(cost, type) or not callable(cost):
            raise OptionError(
                f"expected a cost model such as PaddedCost, or a predicate, got {cost!r}"
            )
        if rules != {"size_multiple": 1, "max_batch_size": None, "batch_size_multiple": 1}:
            raise OptionError(f"a predicate alone decides what a batch holds; leave out {rules}")
        return ByPredicate(cost, shared)

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()`, in every worker, read this epoch from its beginning.

        Where it is this epoch already nothing changes, so that a position that was loaded stays.
        """
        if natural("epoch", epoch) != self.epoch:
            self._epoch.fill_(epoch)
            self._state = None
            self._positions.clear(loaded=False)
        self._left_out.zero_()
        self._walk = None

    def __iter__(self) -> EpochReader:
        """Read the epoch from its beginning, or from the position that was loaded."""
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if self._walk is not None and self._walk.finished and (info is None or self._positions.own):
            self._state = None
        self._positions.use_up(self.epoch)
        state, shift = self._loaded, 0
        if state is not None and "workers" in state:
            if len(state["workers"]) != workers:
                raise StateMismatchError(
                    f"the state is that of {len(state['workers'])} workers, here are {workers}; "
                    f"it goes on with num_workers={len(state['workers'])}"
                )
            # A loader begins with its first worker, which is to be the one whose turn it was.
            shift = state["turn"]
        worker = (number + shift) % workers
        self._walk = walk = self._begun(worker, workers)
        self._walks.add(walk)
        if self._positions.too_late:  # torch hands on what the first batch raises
            walk.refused = StateError(
                "these workers persist, and a state was loaded since they began: load it before "
                "the first loop over the DataLoader"
            )
        if info is None:
            self._positions.forget()
        else:
            walk.watch = self._positions.watch(
                worker, workers, epoch=self.epoch, shift=shift, seed=info.seed - info.id
            )
        return walk

    @property
    def _loaded(self) -> dict[str, Any] | None:
        """The state that `iter()` begins with, if it is of the present epoch, and not used up."""
        state = self._state
        if state is None or state["epoch"] != self.epoch or not self._positions.goes_on:
            return None
        return state

    def _begun(self, worker: int, workers: int) -> EpochReader:
        """A worker's walk, where it begins."""
        slot = WorkerSlot(worker=worker, workers=workers, rank=self.rank, ranks=self.num_replicas)
        walk, state = self.reader_of(slot), self._loaded
        if state is not None:
            walk.load_state_dict(state["workers"][worker] if "workers" in state else state)
        return walk

    def reader_of(self, slot: WorkerSlot) -> EpochReader:
        """What one process reads of the present epoch, from its beginning."""
        most_bytes = self.look_ahead
        if most_bytes is None and self.budget is not None and self.budget.host is not None:
            most_bytes = max(self.budget.host // _HOST_SHARE // slot.workers, 1)
        count = partial(_add, self._left_out[slot.worker % _WORKERS])
        return EpochReader(self._settings, slot, self.epoch, most_bytes=most_bytes, count=count)

    def __len__(self) -> int:
        """Batches of an epoch on this rank.

        Raises:
            TypeError: only `batches_per_epoch` makes it known.
        """
        batches = self._settings.batches_per_epoch
        if batches is None:
            raise TypeError("the length of a stream is known with batches_per_epoch only")
        return batches

    @property
    def skipped_samples(self) -> SkippedSamples:
        """How many samples no micro-batch has."""
        counts = self._left_out.sum(dim=0).tolist()
        return SkippedSamples(**dict(zip(_KINDS, counts, strict=True)))

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Where an iteration stands, in plain JSON types, but for what the source itself says.

        In the process that iterates, and so in each worker of torchdata's `StatefulDataLoader`,
        that is where the last one stands; a source that has a state itself goes on by that
        (`"goes_on_by": "seeking"`), others are skipped through (`"skipping"`). Workers of a plain
        `DataLoader` run ahead: its process says how many batches it has taken.

        Args:
            batches_done: in the present loop over the `DataLoader`; it goes on with as many
                workers, and the source is skipped through.

        Raises:
            StateError: other processes iterate, and `batches_done` is not given; or so many were
                not made.
        """
        here = get_worker_info() is None
        if batches_done is not None and not natural("batches_done", batches_done):
            return self._beginning(self.epoch) if self._loaded is None else dict(self._loaded)
        if here and self._positions.has_begun(self.epoch):
            if batches_done is None:
                raise StateError(
                    "workers read this epoch, ahead of what the loop has taken: give "
                    "state_dict(batches_done=…), use a StatefulDataLoader, or set_epoch first"
                )
            return self._state_of_workers(batches_done)
        walk = self._walk
        if walk is None:
            if batches_done is not None:
                raise StateError(f"nobody has read {batches_done} micro-batches of this epoch")
            return self._beginning(self.epoch) if self._loaded is None else dict(self._loaded)
        state = walk.state_dict() if batches_done is None else walk.state_after(batches_done)
        return self._beginning(walk.epoch + 1) if here and state["finished"] else state

    def _state_of_workers(self, batches_done: int) -> dict[str, Any]:
        """The state of all workers, once the loop has taken so many micro-batches."""
        turn, positions = self._positions.after(batches_done, self.epoch)
        if positions == [END] * len(positions):
            return self._beginning(self.epoch + 1)
        states = []
        for worker, position in enumerate(positions):
            walk = self._begun(worker, len(positions))
            states.append(walk.state_dict() if position is None else walk.state_at(position))
        if len(states) == 1:
            return states[0]
        shared = {"epoch": self.epoch, "identity": self._settings.identity}
        return {**shared, "turn": turn, "workers": states}

    def _beginning(self, epoch: int) -> dict[str, Any]:
        slot = WorkerSlot(worker=0, workers=1, rank=self.rank, ranks=self.num_replicas)
        return {**self.reader_of(slot).beginning(), "epoch": epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make `iter()` begin where a state stands, until its epoch has ended.

        At a window's boundary a state of a process without workers can go on with any number of
        them, on any number of ranks, and under another budget, cost or look-ahead; at an epoch's
        beginning any can.

        Raises:
            StateError: the state is malformed; or, at the next loop, it is loaded too late for
                workers that persist and have begun.
            StateMismatchError: it is of another stream, or another number of workers; at the next
                loop.
        """
        if not isinstance(state_dict, Mapping) or "identity" not in state_dict:
            raise StateError("expected what BudgetedIterableDataset.state_dict() gave")
        workers, turn = state_dict.get("workers", [None]), state_dict.get("turn", 0)
        if not isinstance(workers, list) or turn not in range(len(workers)):
            raise StateError(f"the state is malformed: of {workers!r} it is the turn of {turn!r}")
        epoch = natural("epoch", state_dict.get("epoch", -1))
        if state_dict.get("finished"):  # of a worker: the next epoch may have been chosen already
            epoch = max(epoch, self.epoch)
        self._epoch.fill_(epoch)
        self._state = dict(state_dict)
        self._walk = None
        if get_worker_info() is None:
            self._positions.clear(loaded=True)
        else:
            self._positions.leave_alone()

    def close(self) -> None:
        """End all iterations of this process, and their threads."""
        for walk in list(self._walks):
            walk.close()

    def __enter__(self) -> BudgetedIterableDataset:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # A copy begins where `iter()` would; what is being read stays with the one that reads it.
        return {**self.__dict__, "_walk": None, "_walks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _walks=weakref.WeakSet())


def _fingerprint(cost: CostModel) -> str:
    """That of a cost on as many axes as it takes: a stream does not know its sizes yet."""
    of_axes = [cost_fingerprint(cost, np.full(axes, _LARGEST)) for axes in range(2, _AXES + 1)]
    return fingerprint(cost_fingerprint(cost, _LARGEST), *of_axes)


def _add(counts: torch.Tensor, kind: str, number: int) -> None:
    counts[_KINDS.index(kind)] += number


def stop_together(loader: Any, *, group: Any = None) -> Iterator[Any]:
    """Batches of a loader until any rank has none left: then all ranks end, and none waits.

    One collective of a single number for each batch, in the process that trains. What other ranks
    still had is not read.

    Args:
        loader: of this rank.
        group: of processes. Default: all, where `torch.distributed` is initialized.
    """
    joined = torch.distributed.is_available() and torch.distributed.is_initialized()
    batches = iter(loader)
    nothing = object()
    while True:
        batch = next(batches, nothing)
        there = torch.tensor(int(batch is not nothing))
        if joined:
            if "nccl" in torch.distributed.get_backend(group):
                there = there.cuda()
            torch.distributed.all_reduce(there, torch.distributed.ReduceOp.MIN, group=group)
        if not there:
            return
        yield batch
