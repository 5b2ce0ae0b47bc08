"""`BudgetedIterableDataset`: micro-batches that fit the budget, of data without an index."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final

import torch
from torch.utils.data import IterableDataset, get_worker_info

from torchbudget.budget import MemoryBudget
from torchbudget.checks import natural
from torchbudget.cost.models.protocol import CostModel
from torchbudget.data.sizes.key import SizeKey
from torchbudget.data.stream.epoch_reader import EpochReader
from torchbudget.data.stream.positions import END, Positions
from torchbudget.data.stream.settings import ShouldAdd, make_settings
from torchbudget.data.stream.source import Split, WorkerSlot
from torchbudget.data.stream.transforms import Transform
from torchbudget.distributed import ranks_of
from torchbudget.errors import StateError, StateMismatchError
from torchbudget.plan.oversize import Oversize
from torchbudget.protocols import ResumableSource
from torchbudget.units import parse_bytes

_HOST_SHARE: Final = 4  # a quarter of the host's bytes is for samples that wait
_WORKERS: Final = 512  # that count skipped samples separately
_KINDS: Final = ("oversize", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSamples:
    """Samples that are in no micro-batch, over all workers of this rank, since `set_epoch`.

    Attributes:
        oversize: alone over the budget, with `oversize="skip"`.
        failed: their transform or size raised, with `on_error="skip"`.
    """

    oversize: int
    failed: int


class BudgetedIterableDataset(IterableDataset[Any], ResumableSource):
    """Batches of a stream of ragged samples that fit a budget of bytes and fill it.

    Windows of consecutive samples are read, sorted by size and cut into micro-batches, each the
    longest run whose predicted cost is within the budget. The stream yields whole batches: pass it
    to a `DataLoader` with `batch_size=None`, and any number of workers.

    Every sample comes exactly once an epoch, over all ranks and workers, and every rank has the
    same number of batches. `split` names how the processes share the source:

    - `"none"`: all workers of all ranks read the whole source. The windows go to the workers in
      turn, and the micro-batches of a window are dealt to the ranks. A worker transforms the
      samples of its own windows only. The default for an iterable, and for a map-style data set,
      which is shuffled as a whole, and of which each worker reads its own samples only.
    - `"workers"`: each worker reads its own part, the same on every rank, and the micro-batches of
      its windows are dealt to the ranks. The default for a list of shards, and for a source that
      splits itself by worker (a streaming `datasets` dataset).
    - `"ranks"`: each worker of each rank reads its own part. The number of batches per rank is
      unknown in advance: with several ranks, give `batches_per_epoch`, or `uneven=True` if the loop
      ends all ranks together, by `stop_together` or by `GradAccumulator.flush`. The default for a
      function, a webdataset pipeline, a Ray Data iterator, and a `datasets` dataset split by node.

    Args:
        source: an iterable that can be iterated again (an `IterableDataset`, a file reader); a
            map-style data set whose sizes are unknown until its samples are read; a function
            `(shard, num_shards)` that returns an iterator; or a list of shards, each an iterable or
            a function without arguments that returns one.
        cost: bytes of a micro-batch, such as `PaddedCost`; or a predicate
            `should_add(batch, sample)`, of a list of at least one sample and the next one.
        budget: a `MemoryBudget`, or the device's bytes; with a predicate it may be `None`.
        size: what makes a sample ragged: a field, several, or a function of the sample, as in
            `sizes_of`. With a predicate, what windows are sorted by, if it is given.
        transforms: of each sample, before its size is taken: see `torchbudget.transforms`.
        threads: that apply the transforms in each worker; 0: the worker itself does.
        window: samples that are read, sorted and cut together, over all ranks that share them.
            Default: 4,096 for each of them. A larger one pads less.
        look_ahead: bytes of the samples that wait for their micro-batch in a worker; a window of
            more is cut in parts. Not counted: the sample that overflowed, two per thread, one
            prefetched per rank and, with several ranks, the last micro-batch. Default: a quarter of
            the budget's `host`, divided among the workers; without one, no limit.
        shuffle: shards, and the micro-batches of a window. Otherwise they come longest first.
        seed: of all randomness, which is a function of (seed, epoch, shard, place within it).
        drop_last: drop the last micro-batch that could still have taken a sample, in each part.
        batches_per_epoch: batches on each rank; a source that ends earlier starts over.
        uneven: ranks may have unequal numbers of batches.
        collate_fn: makes a batch of a list of samples. Default: `PadCollate` with the same
            `size_multiple`.
        max_batch_size: as in `MemoryBudgetBatchSampler`.
        batch_size_multiple: likewise.
        size_multiple: likewise.
        oversize: what becomes of a sample that alone is over the budget: `"raise"`, `"skip"`
            (counted in `skipped_samples`, logged) or `"alone"`.
        on_error: what becomes of a sample whose transform or size raises: `"raise"` an error that
            names it, or `"skip"` it (counted, logged once). A source that raises ends the epoch.
        split: how the processes share the source; see above.
        num_replicas: ranks. Default: those of `torch.distributed` where it is initialized, else 1.
        rank: of this process.

    Raises:
        OptionError: an option, or a pair of options, that cannot hold.
        BudgetError: the budget does not limit the device, or not the host where it must.

    While it is iterated:

    Raises:
        SampleError: a sample cannot be read or transformed.
        OversizeError: a sample alone is over the budget and `oversize="raise"`.
        UnevenRanksError: the remaining samples cannot be dealt evenly to the ranks.

    The epoch is that of `set_epoch`, which reaches persistent workers too.

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
        self.num_replicas, self.rank = ranks_of(num_replicas, rank)
        self.budget = None if budget is None else MemoryBudget.of(budget)
        self.look_ahead = None if look_ahead is None else parse_bytes(look_ahead)
        self._settings = make_settings(
            source,
            cost,
            self.budget,
            size=size,
            transforms=transforms,
            threads=threads,
            window=window,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            batches_per_epoch=batches_per_epoch,
            uneven=uneven,
            collate_fn=collate_fn,
            max_batch_size=max_batch_size,
            batch_size_multiple=batch_size_multiple,
            size_multiple=size_multiple,
            oversize=oversize,
            on_error=on_error,
            split=split,
            num_replicas=self.num_replicas,
        )
        # Workers read the epoch, and count skipped samples, in shared memory: it reaches those that
        # persist, too.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._skipped = torch.zeros((_WORKERS, len(_KINDS)), dtype=torch.int64).share_memory_()
        self._state: dict[str, Any] | None = None
        self._positions = Positions()
        self._reader: EpochReader | None = None  # the last one
        self._readers: weakref.WeakSet[EpochReader] = weakref.WeakSet()

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` reads."""
        return int(self._epoch)

    @property
    def size_multiple(self) -> int:
        """Padded sizes are multiples of it; `PadCollate(size_multiple=stream)` reads it."""
        return self._settings.size_multiple

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()`, in every worker, read this epoch from its beginning.

        If it already is this epoch, a loaded position stays.
        """
        if natural("epoch", epoch) != self.epoch:
            self._epoch.fill_(epoch)
            self._state = None
            self._positions.clear(loaded=False)
        self._skipped.zero_()
        self._reader = None

    def __iter__(self) -> EpochReader:
        """Read the epoch from its beginning, or from the loaded position."""
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        finished = self._reader is not None and self._reader.finished
        if finished and (info is None or self._positions.own_state):
            self._state = None
        self._positions.note_finished_loop(self.epoch)
        state, shift = self._loaded, 0
        if state is not None and "workers" in state:
            if len(state["workers"]) != workers:
                raise StateMismatchError(
                    f"the state is that of {len(state['workers'])} workers, here are {workers}; "
                    f"it goes on with num_workers={len(state['workers'])}"
                )
            # A loader takes from its first worker first: that one reads for the worker whose turn
            # it was.
            shift = state["turn"]
        worker = (number + shift) % workers
        self._reader = reader = self._resumed_reader(worker, workers)
        self._readers.add(reader)
        if self._positions.loaded_too_late:  # the DataLoader passes on what the first batch raises
            reader.first_error = StateError(
                "these workers persist, and a state was loaded after they started: load it before "
                "the first loop over the DataLoader"
            )
        if info is None:
            self._positions.reset()
        else:
            reader.record = self._positions.recorder(
                worker, workers, epoch=self.epoch, shift=shift, seed=info.seed - info.id
            )
        return reader

    @property
    def _loaded(self) -> dict[str, Any] | None:
        """The state that `iter()` begins with, if it is of this epoch and not used up."""
        state = self._state
        if state is None or state["epoch"] != self.epoch or not self._positions.resumes:
            return None
        return state

    def _resumed_reader(self, worker: int, workers: int) -> EpochReader:
        """What a worker reads, from the loaded state on."""
        slot = WorkerSlot(worker=worker, workers=workers, rank=self.rank, ranks=self.num_replicas)
        reader, state = self.reader_of(slot), self._loaded
        if state is not None:
            reader.load_state_dict(state["workers"][worker] if "workers" in state else state)
        return reader

    def reader_of(self, slot: WorkerSlot) -> EpochReader:
        """What one process reads of the present epoch, from its beginning."""
        look_ahead = self.look_ahead
        if look_ahead is None and self.budget is not None and self.budget.host is not None:
            look_ahead = max(self.budget.host // _HOST_SHARE // slot.workers, 1)
        count_skipped = partial(_add, self._skipped[slot.worker % _WORKERS])
        return EpochReader(
            self._settings, slot, self.epoch, look_ahead=look_ahead, count_skipped=count_skipped
        )

    def __len__(self) -> int:
        """Batches of an epoch on this rank.

        Raises:
            TypeError: it is known with `batches_per_epoch` only.
        """
        batches = self._settings.batches_per_epoch
        if batches is None:
            raise TypeError("the length of a stream is known with batches_per_epoch only")
        return batches

    @property
    def skipped_samples(self) -> SkippedSamples:
        """How many samples were skipped."""
        counts = self._skipped.sum(dim=0).tolist()
        return SkippedSamples(**dict(zip(_KINDS, counts, strict=True)))

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """The position of an iteration, in plain JSON types, except for the source's own state.

        In the process that iterates, and so in each worker of torchdata's `StatefulDataLoader`, it
        is the position of the last iteration. A source that has a state of its own resumes by it
        (`"goes_on_by": "seeking"`), others are skipped through (`"skipping"`). The workers of a
        plain `DataLoader` run ahead: its process gives the number of batches that it has taken.

        Args:
            batches_done: in the present loop over the `DataLoader`; it goes on with as many
                workers, and the source is skipped through.

        Raises:
            StateError: other processes iterate, and `batches_done` is not given; or fewer batches
                were made.
        """
        here = get_worker_info() is None
        if batches_done is not None and not natural("batches_done", batches_done):
            return self._first_state()
        if here and self._positions.has_started(self.epoch):
            if batches_done is None:
                raise StateError(
                    "workers read this epoch, ahead of what the loop has taken: give "
                    "state_dict(batches_done=…), use a StatefulDataLoader, or set_epoch first"
                )
            return self._state_of_workers(batches_done)
        reader = self._reader
        if reader is None:
            if batches_done is not None:
                raise StateError(f"batches_done={batches_done}, but this epoch was not read yet")
            return self._first_state()
        state = reader.state_dict() if batches_done is None else reader.state_after(batches_done)
        return self._beginning(reader.epoch + 1) if here and state["finished"] else state

    def _first_state(self) -> dict[str, Any]:
        """The state before the first batch."""
        return self._beginning(self.epoch) if self._loaded is None else dict(self._loaded)

    def _state_of_workers(self, batches_done: int) -> dict[str, Any]:
        """The state of all workers, after so many micro-batches of the loop."""
        turn, positions = self._positions.after(batches_done, self.epoch)
        if positions == [END] * len(positions):
            return self._beginning(self.epoch + 1)
        states = []
        for worker, position in enumerate(positions):
            reader = self._resumed_reader(worker, len(positions))
            states.append(reader.state_dict() if position is None else reader.state_at(position))
        if len(states) == 1:
            return states[0]
        shared = {"epoch": self.epoch, "identity": self._settings.identity}
        return {**shared, "turn": turn, "workers": states}

    def _beginning(self, epoch: int) -> dict[str, Any]:
        slot = WorkerSlot(worker=0, workers=1, rank=self.rank, ranks=self.num_replicas)
        return {**self.reader_of(slot).beginning(), "epoch": epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make `iter()` begin at a saved position, until its epoch has ended.

        At a window's boundary a state of a process without workers can go on with any number of
        them, on any number of ranks, and under another budget, cost or look-ahead; at an epoch's
        beginning any state can.

        Raises:
            StateError: the state is malformed; or, at the next loop, persistent workers had started
                before it was loaded.
            StateMismatchError: at the next loop, it is of another stream, or another number of
                workers.
        """
        if not isinstance(state_dict, Mapping) or "identity" not in state_dict:
            raise StateError("expected what BudgetedIterableDataset.state_dict() returned")
        workers, turn = state_dict.get("workers", [None]), state_dict.get("turn", 0)
        if not isinstance(workers, list) or turn not in range(len(workers)):
            raise StateError(f"the state is malformed: turn {turn!r} of workers {workers!r}")
        epoch = natural("epoch", state_dict.get("epoch", -1))
        if state_dict.get("finished"):  # of a worker: the next epoch may have been chosen already
            epoch = max(epoch, self.epoch)
        self._epoch.fill_(epoch)
        self._state = dict(state_dict)
        self._reader = None
        if get_worker_info() is None:
            self._positions.clear(loaded=True)
        else:
            self._positions.use_own_state()

    def close(self) -> None:
        """End all iterations of this process, and their threads."""
        for reader in list(self._readers):
            reader.close()

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
        # A copy begins where `iter()` would; an iteration stays with the process that iterates.
        return {**self.__dict__, "_reader": None, "_readers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _readers=weakref.WeakSet())


def _add(counts: torch.Tensor, kind: str, number: int) -> None:
    counts[_KINDS.index(kind)] += number
