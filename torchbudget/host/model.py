"""The model of a loader's memory: the batches in flight, and the bytes of every part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations_with_replacement, zip_longest
from typing import Any, Final

import numpy as np
from torch.multiprocessing import get_sharing_strategy
from torch.utils.data import DataLoader

from torchbudget.cost.protocol import FloatArray, IntArray
from torchbudget.data.cache.sample_cache import bytes_to_come
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.data.stream.dataset import BudgetedIterableDataset
from torchbudget.display import aligned
from torchbudget.errors import OptionError
from torchbudget.host.trial import Trial, forks, try_batches
from torchbudget.machine.process_tree import mapped_data_bytes, process_pages, process_tree
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.plan import Plan
from torchbudget.protocols import MapStyle
from torchbudget.units import format_bytes

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
