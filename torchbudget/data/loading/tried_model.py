"""The model of a sampler's or stream's loader, by a trial with its own data set."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from torchbudget.data.loading.batch_bytes import BatchBytes
from torchbudget.data.loading.host_model import HostModel, present_bytes
from torchbudget.data.loading.in_flight import Observed, Planned
from torchbudget.data.loading.trial import LoaderParts, try_batches, try_stream
from torchbudget.data.planned_sampler import PlannedSampler
from torchbudget.machine.host import shared_memory
from torchbudget.plan.batch_shapes import BatchShapes, batch_shapes, batches_at
from torchbudget.units import MiB

# Batches of the trial: from the smallest to the largest; then as many as time allows.
_SPREAD: Final = 16
_MORE: Final = 256
# Of one that is made while one is held; and what a prediction from smaller ones may miss.
_AT_ONCE: Final = 3
_SLACK: Final = 1.5


def planned_model(
    sampler: PlannedSampler, parts: LoaderParts, *, later: int, seconds: float
) -> HostModel:
    """The model of a loader whose batches a plan decides.

    Args:
        sampler: the plan's, for this rank.
        parts: of the loader.
        later: bytes that this process will allocate later on.
        seconds: that the trial may take.
    """
    shapes = batch_shapes(sampler.plan, epoch=sampler.epoch, rank=sampler.rank)
    numbers = _to_try(shapes)
    batches = batches_at(sampler.plan, numbers, epoch=sampler.epoch, rank=sampler.rank)
    elements = _elements(shapes)[numbers]
    free = _free_shared()

    def fits(number: int, before: Sequence[tuple[int, BatchBytes]]) -> bool:
        if free is None or not before:
            return True
        each = max(one.total / elements[place] for place, one in before)
        return bool(_AT_ONCE * (_SLACK * each * elements[number] + MiB(1)) <= free)

    trial = try_batches(parts, batches, seconds=seconds, fits=fits)
    tried = shapes.at([numbers[i] for i in trial.numbers])
    return HostModel(
        trial=trial,
        in_flight=Planned(shapes, tried, trial.batches),
        samples=len(parts.dataset),
        present=present_bytes(),
        later=later,
        forks=parts.starts_by_fork,
    )


def _to_try(shapes: BatchShapes) -> list[int]:
    """Places of batches: the smallest twice, larger ones up to the largest, then all others."""
    count = shapes.ends[0]
    ascending = np.argsort(_elements(shapes)[:count], kind="stable")
    spread = ascending[np.linspace(0, count - 1, _SPREAD).astype(np.int64)].tolist()
    widest = [shapes.padded[:count].sum(axis=1).argmax(), shapes.samples[:count].argmax()]
    # Each is foreseen from those before; the largest is soon among them.
    chosen = [*spread[:1], *spread[3::4], *map(int, widest), *spread]
    rest = [number for number in range(min(count, _MORE)) if number not in set(chosen)]
    return [chosen[0], *dict.fromkeys(chosen), *rest]


def _elements(shapes: BatchShapes) -> Any:
    """About the padded elements of each batch, at least 1."""
    return shapes.samples * np.maximum(shapes.padded, 1).prod(axis=1)


def _free_shared() -> int | None:
    pool = shared_memory()
    return None if pool is None else pool.free_bytes


def stream_model(parts: LoaderParts, *, later: int, seconds: float) -> HostModel:
    """The model of a loader of an iterable data set, of which a copy is read.

    Args:
        parts: of the loader.
        later: as above.
        seconds: as above.
    """
    own = LoaderParts(
        dataset=copy.copy(parts.dataset),
        collate_fn=parts.collate_fn,
        worker_init_fn=parts.worker_init_fn,
        context=parts.context,
        is_iterable=True,
        batch_size=parts.batch_size,
    )
    trial = try_stream(own, seconds=seconds, most=_MORE)
    return HostModel(
        trial=trial,
        in_flight=Observed(trial.batches),
        samples=0,
        present=present_bytes(),
        later=later,
        forks=parts.starts_by_fork,
    )


def observed_model(
    parts: LoaderParts, batches: Sequence[list[int]], *, later: int, seconds: float
) -> HostModel:
    """The model of a loader of a map-style data set, by some of its batches.

    Args:
        parts: of the loader.
        batches: lists of indices, at least one.
        later: as above.
        seconds: as above.
    """
    smallest = min(batches, key=len)
    trial = try_batches(
        parts, [smallest, smallest, *batches], seconds=seconds, fits=lambda *_: True
    )
    return HostModel(
        trial=trial,
        in_flight=Observed(trial.batches),
        samples=len(parts.dataset),
        present=present_bytes(),
        later=later,
        forks=parts.starts_by_fork,
    )
