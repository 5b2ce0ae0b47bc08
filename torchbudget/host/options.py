"""`loader_options`: the largest options of a `DataLoader` that stay within the host's budget.

They follow from a model of the loader's memory: the batches in flight, and the bytes of every part.
The model follows from a trial: one real worker makes a few batches, and its memory is read between
them.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations_with_replacement, pairwise, zip_longest
from math import inf
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchbudget.budget import MemoryBudget
from torchbudget.checks import optional
from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.data.cache import bytes_to_come
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.data.stream.dataset import BudgetedIterableDataset
from torchbudget.display import aligned
from torchbudget.distributed import Ranks, ranks_on_this_machine
from torchbudget.errors import BudgetError, OptionError
from torchbudget.machine.host import (
    SHM,
    allow_more_descriptors,
    free_descriptors,
    shared_memory,
    usable_processors,
)
from torchbudget.machine.process_tree import (
    ProcessPages,
    mapped_data_bytes,
    process_pages,
    process_tree,
    restart_peak,
)
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.plan import Plan
from torchbudget.protocols import MapStyle
from torchbudget.units import Amount, format_bytes, parse_bytes

_PREFETCH: Final = 8  # batches a worker at the most; more help only where their times vary
# Share of what workers and batches need, for the difference between a trial and a long run; in
# /dev/shm a run of 14 batches took 0.8 % more than any 14 batches in a row. Set by
# `examples/benchmarks/host_budget.py`: with 0.03 the worst of 30 rows was 0.6 % over its budget.
_MARGIN: Final = 0.06
# Pipes of indices and results, events and semaphores of a worker, beside its batches.
_DESCRIPTORS_PER_WORKER: Final = 8
_PAGE_BYTES: Final = 4096
# The plan is read this far: about a second of planning.
_EPOCHS: Final = 10
_SAMPLES: Final = 2**22
_BATCHES: Final = 64  # given to a trial in their order
_SPREAD: Final = 6  # batches from the smallest to the largest that a trial begins with
_log: Final = logging.getLogger("torchbudget")
# A data set that is slow to read gets at least 8 batches, a fast one as many as 2 seconds allow.
_ALWAYS: Final = 8
_TRIAL_S: Final = 2.0
# A batch is tried where /dev/shm has room for three (the one in use, the next and one being made),
# half as large again as the batches before foretell.
_ROOM: Final = 3 * 1.5


class LoaderOptions(dict[str, Any]):
    """Keyword arguments of a `DataLoader`, as `loader_options` chose them.

    Attributes:
        needs: the predicted bytes of the loader.
        budget_bytes: bytes of the host.
        limited_by: the limit that one more worker, or one more prefetched batch, would exceed.
    """

    needs: HostBytes
    budget_bytes: int
    limited_by: str

    def explain(self) -> str:
        """The options, their limit, and the bytes of each part against the budget, as text."""
        chosen = ", ".join(f"{name}={one}" for name, one in self.items() if one is not None)
        return f"{chosen}\nlimited by {self.limited_by}\n\n{self.needs.table(self.budget_bytes)}"


def loader_options(
    sampler_or_stream: MemoryBudgetBatchSampler | BudgetedIterableDataset,
    budget: MemoryBudget,
    *,
    dataset: MapStyle | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: str | BaseContext | None = None,
    max_workers: int | None = None,
    ranks_per_machine: int | None = None,
    reserve: Amount = 0,
) -> LoaderOptions:
    """Choose the options of a stock `DataLoader` that stay within the host's budget.

    It starts one real worker, which makes a few of the plan's batches, the smallest and the largest
    among them, and reads that worker's memory. This takes about two seconds after the worker has
    started. The memory of batches that exist at the same time follows from the plan. It chooses as
    many workers as fit, up to the number of processors, and then as many prefetched batches as fit,
    up to 8 for each worker. Workers persist. Batches are pinned if there is an accelerator and the
    copies fit. You may lower any of the options, which then need less memory.

    Call it after the model is built, since the memory that this process uses at the call counts.
    Only the worker reads the data set. The sampler or stream does not move, and the global random
    generators do not change.

    It is a collective of the ranks of `torch.distributed`: every rank must call it, and all get the
    smallest number of workers that any of them may have, since ranks that share a stream need equal
    numbers. It is none if `num_replicas` or `rank` was given to the sampler or stream.

    Args:
        sampler_or_stream: the sampler or stream whose batches the loader yields.
        budget: the budget. Its `host` bytes limit this process and its descendants. Its `shared`
            bytes, and the free bytes of `/dev/shm`, limit the batches in flight.
        dataset: the sampler's data set; a stream has its own.
        collate_fn: `collate_fn` of the loader; a stream has its own.
        worker_init_fn: `worker_init_fn` of the loader.
        multiprocessing_context: how workers start, such as `"spawn"`. Default: torch's.
        max_workers: the most workers. Default: the processors that this process may use, divided by
            the ranks of this machine.
        ranks_per_machine: number of ranks that share this machine's processors and `/dev/shm`.
            Default: torchrun's `LOCAL_WORLD_SIZE`; 1 for a single process. The budget's `host`
            bytes are those of this rank alone.
        reserve: bytes that this process will allocate later, such as a model on the CPU.

    Raises:
        BudgetError: the budget states no host bytes; or not even a loader without workers fits, and
            the error names the smallest budget that would.
        OptionError: an argument is invalid, or cannot be combined with the sampler or stream; or
            there are several ranks, `LOCAL_WORLD_SIZE` is not set, and `ranks_per_machine` is not
            given.
        MachineError: there is no `/proc` to read memory from.
        RankError: another rank failed.

    >>> dataset = [{"ids": torch.arange(length)} for length in (5, 9, 2, 7)]
    >>> sampler = MemoryBudgetBatchSampler([5, 9, 2, 7], PaddedCost(unit_bytes=1), 18)
    >>> host, collate = MemoryBudget(host="64GiB"), PadCollate()
    >>> options = loader_options(sampler, host, dataset=dataset, collate_fn=collate)
    >>> loader = torch.utils.data.DataLoader(
    ...     dataset, batch_sampler=sampler, collate_fn=collate, **options)
    >>> options["prefetch_factor"], options["persistent_workers"]
    (8, True)
    """
    given_ranks = getattr(sampler_or_stream, "_ranks", None)
    joined = Ranks(alone=given_ranks is None or not given_ranks.joined)
    with joined.together():
        ranks = ranks_on_this_machine(ranks_per_machine)
        host, shared = MemoryBudget.of(budget).host, MemoryBudget.of(budget).shared
        if host is None:
            raise BudgetError(
                f"the budget must state the host's bytes, as in MemoryBudget(host='16GiB'), "
                f"got {budget!r}"
            )
        most = optional("max_workers", max_workers) or max(1, usable_processors() // ranks)
        samples: Any = dataset
        order: dict[str, Any] = {"batch_sampler": sampler_or_stream}
        if isinstance(sampler_or_stream, BudgetedIterableDataset):
            if dataset is not None or collate_fn is not None:
                raise OptionError(
                    "a stream has a data set and a collate_fn of its own: leave both out"
                )
            samples, order = sampler_or_stream, {"batch_size": None}
        loader = DataLoader(
            samples,
            collate_fn=collate_fn,
            num_workers=1,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            **order,
        )
        model = HostModel.of(loader, later=parse_bytes(reserve))
        shm = shared_memory()
        given = [shared, None if shm is None else shm.free_bytes // ranks]
        limits: Any = {
            "the host's budget": (host, format_bytes),
            str(SHM): (min((one for one in given if one is not None), default=inf), format_bytes),
            "open files (ulimit -n)": (free_descriptors(), str),
        }
        pins = torch.accelerator.is_available()

        def over(workers: int, prefetch: int) -> str:
            """The limit that these options exceed, for people; empty where they fit."""
            needs = model.needs(workers, prefetch, pins=pins)
            needed = (needs.total_bytes, needs.shared_bytes, needs.descriptors)
            for amount, (name, (limit, text)) in zip(needed, limits.items(), strict=True):
                if amount > limit:
                    return f"{name}: {text(amount)} of {text(limit)}"
            return ""

        pins = pins and not over(0, 0)
        if over(0, 0):  # host bytes: without workers nothing is in /dev/shm or an open file
            needs = model.needs(0, 0, pins=False)
            raise BudgetError(
                "even without workers the loader needs more than the host's budget of "
                f"{format_bytes(host)}: raise it to MemoryBudget(host={needs.total_bytes}), "
                f"{format_bytes(needs.total_bytes)}, at least. Or free memory, make micro-batches "
                "smaller (a sampler's limits=, a stream's max_batch_size=), or buffer fewer "
                f"samples (a stream's look_ahead=):\n{needs.table(host)}"
            )
        fitting = next((n for n in range(most, 0, -1) if not over(n, 1)), 0)
    workers = min(joined.gather_objects(fitting))
    prefetch = next((n for n in range(_PREFETCH, 0, -1) if workers and not over(workers, n)), 0)
    more = over(workers + 1, 1) if workers < most else over(workers, prefetch + 1)
    if workers < fitting:
        more = "another rank, where no more workers fit"
    limited_by = more or f"max_workers={most}, or the processors of this rank"
    if not workers:
        _log.warning("no worker fits: %s; batches will be loaded in the loop", limited_by)
    options = LoaderOptions(
        num_workers=workers,
        prefetch_factor=prefetch or None,
        pin_memory=pins,
        persistent_workers=workers > 0,
        multiprocessing_context=multiprocessing_context if workers else None,
    )
    options.needs = model.needs(workers, prefetch, pins=pins)
    options.budget_bytes, options.limited_by = host, limited_by
    return options


def host_bytes(loader: DataLoader[Any], *, reserve: Amount = 0) -> HostBytes:
    """Predict the most that a `DataLoader` will need of the host, this process included.

    The model and the trial are those of `loader_options`, the options those of the loader. The
    loader is not iterated and no data is read here.

    Args:
        loader: over a `MemoryBudgetBatchSampler` or a `BudgetedIterableDataset`; the workers of one
            that is being iterated count twice.
        reserve: bytes that this process will allocate later.

    Raises:
        OptionError: it is another loader, or has another number of samples than its sampler.
        MachineError: there is no `/proc` to read memory from.

    >>> dataset = [torch.zeros(1000) for _ in range(20)]
    >>> sampler = MemoryBudgetBatchSampler([1000] * 20, PaddedCost(unit_bytes=1), 5000)
    >>> needs = host_bytes(torch.utils.data.DataLoader(dataset, batch_sampler=sampler))
    >>> needs.total_bytes > needs.shared_bytes == 0
    True
    """
    return HostModel.of(loader, later=parse_bytes(reserve)).needs(
        loader.num_workers,
        loader.prefetch_factor or 0,
        pins=loader.pin_memory and torch.accelerator.is_available(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """The most that a loader is predicted to need while it is iterated; as text, a table.

    Attributes:
        parts: name and peak bytes of each part. Shared pages count once; mapped data files do not
            count.
        shared_bytes: the bytes of `/dev/shm` among them.
        descriptors: files that this process has open for workers and batches.
    """

    parts: tuple[tuple[str, int], ...]
    shared_bytes: int
    descriptors: int

    @property
    def total_bytes(self) -> int:
        """All parts, in bytes."""
        return sum(size for _, size in self.parts)

    def table(self, budget_bytes: int | None = None) -> str:
        """One line for each part and one for the total, against a budget where one is given."""
        rows = [*self.parts, ("total", self.total_bytes)]
        lines = aligned([(name, format_bytes(size)) for name, size in rows], right=1)
        if budget_bytes is not None:
            lines[-1] += f"  {self.total_bytes / budget_bytes:.1%} of {format_bytes(budget_bytes)}"
        shared = format_bytes(self.shared_bytes)
        lines.append(f"{shared} of it in /dev/shm; {self.descriptors} open files")
        return "\n".join(lines)

    __str__ = table


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShapes:
    """Shapes of consecutive micro-batches of one rank, over up to ten epochs or 4 million samples.

    Attributes:
        indices: indices in the data set, grouped by micro-batch.
        stops: position in `indices` at which each micro-batch ends, shape `(m,)`.
        samples: number of samples of each, shape `(m,)`.
        amounts: padded size of each, or the sum of packed sizes; shape `(m, d)`.
    """

    indices: IntArray
    stops: IntArray
    samples: IntArray
    amounts: IntArray

    @classmethod
    def read(cls, plan: Plan, *, epoch: int, rank: int) -> PlannedShapes:
        """Read the plan from the beginning of an epoch on."""
        epochs = (plan.spans(Cursor(epoch=number)) for number in range(epoch, epoch + _EPOCHS))
        mine, read = slice(rank, None, plan.ranks.number), 0
        found: list[tuple[IntArray, ...]] = []
        for span in chain.from_iterable(epochs):
            starts, stops = span.block.starts[mine], span.block.stops[mine]
            amounts = span.block.amounts(plan.rules)[mine]
            found.append((span.indices, read + stops, stops - starts, amounts))
            read += len(span.indices)
            if read >= _SAMPLES:
                break
        return cls(*map(np.concatenate, zip(*found, strict=True)))

    @property
    def elements(self) -> IntArray:
        """About the padded elements of each micro-batch, at least 1; shape `(m,)`."""
        return np.asarray(self.samples * np.maximum(self.amounts, 1).prod(axis=1))

    def to_try(self) -> list[int]:
        """Places to try: the smallest batch twice, some up to the largest, then all in order."""
        ascending = np.argsort(self.elements, kind="stable")
        spread = ascending[np.linspace(0, len(ascending) - 1, _SPREAD).astype(np.int64)]
        widest = (self.amounts.sum(axis=1).argmax(), self.samples.argmax())
        places = dict.fromkeys(map(int, [*spread, *widest, *range(_BATCHES)]))
        return [int(spread[0]), *(place for place in places if place < len(ascending))]

    def batch(self, place: int) -> list[int]:
        """The indices in the data set of one micro-batch."""
        end = self.stops[place]
        return list(map(int, self.indices[end - self.samples[place] : end]))

    def features(self) -> FloatArray:
        """1, n, n·ΠL, Lᵢ, n·Lᵢ and n·LᵢLⱼ of each micro-batch, each at least 1; shape `(m, f)`."""
        n, axes = self.samples, self.amounts.T
        pairs = [n * one * other for one, other in combinations_with_replacement(axes, 2)]
        columns = [np.ones_like(n), n, self.elements, *axes, *(n * axes), *pairs]
        return np.asarray(np.maximum(np.stack(columns, axis=1), 1), np.float64)


class InFlight:
    """Bytes of the batches that exist at once.

    With a plan, the bytes of every micro-batch follow from its shape, and the highest sum over
    consecutive micro-batches counts. Without a plan, the largest batch that was tried counts for
    all.

    Args:
        trial: the bytes of some batches.
        shapes: the plan's micro-batches; `None` where there is no plan.
        places: place among them of each batch that was given to the trial.

    Attributes:
        storages: bytes of each storage of each planned batch, or of each that was tried; shape
            `(tensors, m)`.
        building: the most bytes that a worker takes beside a batch while it makes it.
    """

    def __init__(
        self, trial: Trial, shapes: PlannedShapes | None = None, places: Sequence[int] = ()
    ) -> None:
        storages = [*zip_longest(*trial.storages, fillvalue=0)]
        columns = np.array([trial.plain, trial.building, *storages], np.float64)
        self._is_planned = shapes is not None
        if shapes is not None:
            asked = shapes.features()
            known = asked[[places[number] for number in trial.numbers]]
            columns = np.stack([_bound(known, row, asked) for row in columns])
        self._plain, self.storages = columns[0], columns[2:]
        self._shared = (-(-self.storages // _PAGE_BYTES) * _PAGE_BYTES).sum(axis=0)
        self.building = int(columns[1].max())

    def peak(self, batches: int) -> int:
        """The most bytes of so many batches at once, in whole pages."""
        return self._highest(self._shared + self._plain, batches)

    def peak_shared(self, batches: int) -> int:
        """The most bytes of `/dev/shm` that they take."""
        return self._highest(self._shared, batches)

    def peak_pinned(self, batches: int) -> int:
        """The most pinned memory that torch's allocator keeps for them.

        Free blocks of one size are used again, and blocks of other sizes are kept beside them.
        """
        blocks = pinned_block(self.storages)
        return sum(
            int(size) * self._highest((blocks == size).sum(axis=0), batches)
            for size in np.unique(blocks[blocks > 0])
        )

    def _highest(self, values: FloatArray, batches: int) -> int:
        """The highest sum over so many consecutive batches."""
        values = values if self._is_planned else values.max(keepdims=True)
        values = np.tile(values, -(-batches // len(values)))  # epochs follow each other
        until = np.concatenate([[0], np.cumsum(values)])
        return int((until[batches:] - until[:-batches]).max())


def pinned_block(num_bytes: Any) -> IntArray:
    """Bytes as torch's allocator of pinned memory takes them: a power of two, kept when it is free.

    `CachingHostAllocator` rounds up to reuse blocks (`ATen/core/CachingHostAllocator.h`; pytorch
    #95823), unless `pinned_max_round_threshold_mb` is set.

    >>> pinned_block([0, 1, 5, 1024, 1025]).tolist()
    [0, 1, 8, 1024, 2048]
    """
    sizes = np.asarray(num_bytes, np.float64)
    powers = np.exp2(np.ceil(np.log2(np.maximum(sizes, 1))))
    return np.where(sizes > 0, powers, 0).astype(np.int64)


def _bound(known: FloatArray, values: FloatArray, asked: FloatArray) -> FloatArray:
    """An upper bound by the one feature whose multiple covers the known values most closely.

    A tensor has as many elements as one of the features says, so that its bound is exact.
    """
    scales = (values[:, None] / known).max(axis=0)
    best = (scales * known.sum(axis=0)).argmin()
    # Whole bytes; what is exact but for rounding must not become the next power of two.
    return np.asarray(np.ceil(scales[best] * asked[:, best] - 1e-3))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostModel:
    """The bytes that a loader needs, by a trial of it.

    Attributes:
        trial: the trial of one worker.
        in_flight: the loader's batches.
        elements: elements of the data set, whose objects forked workers copy; 0 where none do.
        known: name and bytes of each part that does not depend on the loader.
    """

    trial: Trial
    in_flight: InFlight
    elements: float
    known: Mapping[str, int]

    @classmethod
    def of(cls, loader: DataLoader[Any], *, later: int) -> HostModel:
        """Try a loader, whatever its number of workers, and then read this process's memory.

        Raises:
            OptionError: it has neither a sampler with a map-style data set nor a stream of ours, or
                not as many samples as the sampler has sizes.
            MachineError: there is no `/proc`.
        """
        dataset: Any = getattr(loader, "dataset", None)
        sampler: Any = getattr(loader, "batch_sampler", None)
        elements = 0.0  # that forked workers copy
        if isinstance(sampler, MemoryBudgetBatchSampler) and isinstance(dataset, MapStyle):
            sampler.check_dataset(dataset)
            shapes = PlannedShapes.read(sampler.plan, epoch=sampler.epoch, rank=sampler.rank)
            places = shapes.to_try()
            trial = try_batches(loader, [*map(shapes.batch, places)], [*shapes.elements[places]])
            in_flight = InFlight(trial, shapes, places)
            elements = forks(loader) * len(dataset) * shapes.elements.sum() / shapes.samples.sum()
        elif isinstance(dataset, BudgetedIterableDataset):
            trial = try_batches(loader, [[n] for n in range(_BATCHES)], [1] * _BATCHES)
            in_flight = InFlight(trial)
        else:
            raise OptionError(
                "batches must come from a MemoryBudgetBatchSampler of a map-style data set, or a "
                f"BudgetedIterableDataset, got batch_sampler={type(sampler).__name__}, "
                f"dataset={type(dataset).__name__}"
            )
        tree, libraries = process_tree(), process_pages().file - mapped_data_bytes()
        # Without the data files that this process maps, which can be read again.
        present = sum(one.unreclaimable_bytes for one in tree) + max(0, libraries)
        known = {
            "this process and its descendants now": present,
            "reserved for later": later,
            "sample caches, once they are full": bytes_to_come(one.pid for one in tree),
        }
        return cls(trial=trial, in_flight=in_flight, elements=elements, known=known)

    def needs(self, workers: int, prefetch: int, *, pins: bool) -> HostBytes:
        """The bytes of each part of a loader with these options, while it is iterated.

        Args:
            workers: `num_workers`.
            prefetch: `prefetch_factor`; 0 without workers.
            pins: whether batches are copied to pinned memory.
        """
        trial, flight = self.trial, self.in_flight
        # Batches that workers were asked for, one that is returned, one that the loop still has.
        batches = workers * prefetch + 2
        building = max(workers, 1) * flight.building
        # Each worker that persists reads all of the data set sooner or later.
        copied = min(int(trial.copied_each * self.elements), trial.common)
        # Workers start before any batch is on its way.
        starting = trial.starting - flight.peak(batches) - building if workers else 0
        parts = {
            "workers": workers * trial.private,
            "workers' copies of this process's objects": workers * copied,
            "batches in flight": flight.peak(batches),
            "samples of batches that are being built": building,
            "pinned copies": flight.peak_pinned(batches) if pins else 0,
            "extra memory while workers start": max(0, starting),
        }
        parts["margin"] = int(_MARGIN * sum(parts.values()))
        files = batches * len(flight.storages) if get_sharing_strategy() == "file_descriptor" else 0
        return HostBytes(
            parts=tuple((name, size) for name, size in {**self.known, **parts}.items() if size),
            # The kernel may count a batch for a moment after it was freed.
            shared_bytes=int((1 + _MARGIN) * flight.peak_shared(batches)) if workers else 0,
            descriptors=files + _DESCRIPTORS_PER_WORKER * workers if workers else 0,
        )


# ---------------------------------------------------------------------- the trial


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """The result of a trial, in bytes.

    The first four have one item for each batch that was made; without the first batch, during which
    a worker imports.

    Attributes:
        numbers: places of the batches in the list that was given.
        storages: bytes of each tensor's storage, which a worker hands over in a file of `/dev/shm`
            of its own; a storage that several tensors share counts once.
        plain: bytes of everything else (text, NumPy arrays, objects), sent through a pipe.
        building: bytes that the worker took beside the batch while it read its samples and made it.
        private: the most memory that the worker had between batches and shared with no other
            process: its heap, its imports, its copies of this process's pages.
        copied_each: bytes of this process's memory that the worker copied per element in the second
            half of the trial: Python counts references in the objects, so that reading is writing.
        common: bytes of this process's memory that the worker had not copied in the end.
        starting: bytes that a worker takes while it starts, beside `private`.
    """

    numbers: Sequence[int]
    storages: Sequence[tuple[int, ...]]
    plain: Sequence[int]
    building: Sequence[int]
    private: int
    copied_each: float = 0.0
    common: int = 0
    starting: int = 0


def try_batches(
    loader: DataLoader[Any], batches: Sequence[list[int]], elements: Sequence[int]
) -> Trial:
    """Let one worker make batches one after the other, and read its memory between them.

    The data set is read in the worker only; of a stream, a copy.

    Args:
        loader: gives the data set, the collate and the way workers start.
        batches: lists of indices, at least two, the first two of them small; of a stream, numbers.
        elements: about the elements of each batch, at least 1, in any unit: batches that could
            overflow `/dev/shm`, by what those before took, are left out.

    Raises:
        MachineError: the worker's memory cannot be read.
    """
    numbers: list[int] = []
    readings: list[ProcessPages] = []
    found: list[tuple[tuple[int, ...], int]] = []  # of the batches that came
    children, pool, mapped = _children(), shared_memory(), 0  # bytes of mapped data files

    def watched() -> Iterator[list[int]]:
        # The loader asks for the next list when the worker has handed over a batch and is idle.
        nonlocal mapped
        [pid] = _children() - children
        ends = time.monotonic() + _TRIAL_S
        for number, batch in enumerate(batches):
            if len(numbers) >= _ALWAYS and time.monotonic() > ends:
                break
            each = [sum(one[0]) / elements[n] for n, one in zip(numbers, found, strict=False)]
            if pool is None or _ROOM * max(each, default=0) * elements[number] <= pool.free_bytes:
                readings.append(process_pages(pid))
                restart_peak(pid)
                numbers.append(number)
                yield batch
        readings.append(process_pages(pid))
        mapped = mapped_data_bytes(pid)

    for batch in _with_one_worker(loader, watched()):
        found.append(batch_bytes(batch))
        del batch
    storages, plain = zip(*found[1:], strict=True)
    amounts = [elements[number] for number in numbers]
    half = (len(amounts) + 1) // 2  # of what followed the first batch
    settled, middle, last = readings[1], readings[half], readings[-1]
    sent = 0 if forks(loader) else len(ForkingPickler.dumps(loader.dataset))
    # What building leaves in the heap is in `private`, and is used again.
    highest = max(one.anonymous for one in readings[1:])
    return Trial(
        numbers=numbers[1:],
        storages=storages,
        plain=plain,
        building=[
            _building(before, after, sum(one), highest)
            for (before, after), one in zip(pairwise(readings[1:]), storages, strict=True)
        ],
        # Pages of mapped data may be dirty still, and are then no private pages of files.
        private=max(one.private + max(0, one.private_file - mapped) for one in readings[1:]),
        copied_each=max(0, middle.common - last.common) / max(1, sum(amounts[half:])),
        common=last.common,
        starting=max(0, settled.peak_resident - settled.resident) + sent,
    )


class StreamBatches(Dataset[Any]):
    """The batches of a stream by number, as a worker reads them one after the other.

    A stream that ends starts over.

    Args:
        stream: that yields batches; a copy is read.
        convert: what a `DataLoader` does with each.
    """

    def __init__(self, stream: IterableDataset[Any], convert: Callable[[Any], Any]) -> None:
        self._stream, self._convert = copy.copy(stream), convert
        self._batches: Iterator[Any] = iter(())

    def __getitem__(self, number: int) -> Any:
        for _ in range(2):
            for batch in self._batches:
                return self._convert(batch)
            self._batches = iter(self._stream)
        raise OptionError("the data set yields no batch, so the bytes of a batch are unknown")


def batch_bytes(batch: Any) -> tuple[tuple[int, ...], int]:
    """Bytes of each storage of a batch, and of everything else in it; whatever its structure.

    O(bytes that are not in tensors).

    >>> storages, plain = batch_bytes({"ids": torch.zeros(3, 5), "labels": torch.zeros(3)})
    >>> storages
    (60, 12)
    """
    file = io.BytesIO()
    weigher = _Weigher(file, protocol=pickle.HIGHEST_PROTOCOL)
    weigher.storages = {}
    weigher.dump(batch)
    # An empty storage has no file.
    return tuple(size for size in weigher.storages.values() if size), len(file.getbuffer())


class _Weigher(pickle.Pickler):
    """Pickle a batch without the contents of its tensors, whose storages are noted."""

    storages: dict[int, int]

    def persistent_id(self, obj: Any) -> int | None:
        # A sparse tensor is pickled as the dense ones that it consists of.
        if not isinstance(obj, Tensor) or obj.layout is not torch.strided:
            return None
        storage = obj.untyped_storage()
        self.storages[storage._cdata] = storage.nbytes()
        return id(obj)


def _start(start: Callable[[int], None] | None, worker: int) -> None:
    """Start a worker as the user's function does, after a full garbage collection.

    Every worker of a long run collects some time, and so copies the headers of this process's
    objects. A worker that runs out of open files while it sends a batch waits forever.
    """
    allow_more_descriptors()
    gc.collect()
    if start is not None:
        start(worker)


def forks(loader: DataLoader[Any]) -> bool:
    """Whether workers share this process's memory when they start."""
    context = loader.multiprocessing_context or multiprocessing.get_context()
    return bool(context.get_start_method() == "fork")


def _with_one_worker(loader: DataLoader[Any], order: Iterator[list[int]]) -> DataLoader[Any]:
    """The same loader with one worker that makes one batch ahead.

    It draws nothing from the global generators.
    """
    dataset: Any = loader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    return DataLoader(
        StreamBatches(dataset, loader.collate_fn) if is_stream else dataset,
        batch_sampler=order,
        collate_fn=itemgetter(0) if is_stream else loader.collate_fn,
        num_workers=1,
        prefetch_factor=1,
        worker_init_fn=partial(_start, loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
    )


def _building(before: ProcessPages, after: ProcessPages, batch_bytes: int, highest: int) -> int:
    """Bytes beside the batch and beyond the highest anonymous memory between batches.

    Pages of files are not counted, which stay.
    """
    stays = max(0, after.file - before.file) + max(0, highest - before.anonymous)
    return max(0, after.peak_resident - before.resident - batch_bytes - stays)


def _children() -> set[int]:
    return {one.pid for one in multiprocessing.active_children() if one.pid}
