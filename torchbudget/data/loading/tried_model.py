"""The model of a loader, by a trial with its own data set."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

import numpy as np

from torchbudget.data.loading.batch_bytes import BatchBytes
from torchbudget.data.loading.host_model import HostModel, cache_bytes, present_bytes
from torchbudget.data.loading.in_flight import InFlight, Observed, Planned
from torchbudget.data.loading.loader_parts import LoaderParts
from torchbudget.data.loading.trial import Trial, try_batches, try_stream
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.errors import OptionError
from torchbudget.machine.host import shared_memory
from torchbudget.plan.batch_shapes import BatchShapes, batch_shapes, batches_at
from torchbudget.random_state import RandomState
from torchbudget.units import MiB

# Batches of the trial: from the smallest to the largest; then as many as time allows.
_SPREAD: Final = 16
_MORE: Final = 256
# Of one that is made while one is held; and what a prediction from smaller ones may miss.
_AT_ONCE: Final = 3
_SLACK: Final = 1.5
_BATCHES: Final = 64  # of a sampler whose plan is unknown


def loader_model(
    batch_sampler: Any, parts: LoaderParts, *, later: int, seconds: float
) -> HostModel:
    """The model of a loader.

    Args:
        batch_sampler: of the loader; not looked at where the data set is iterable.
        parts: of the loader.
        later: bytes that this process will allocate later on.
        seconds: that the trial may take.

    Raises:
        OptionError: the batch sampler cannot be copied, or there is no batch.
    """
    if parts.is_iterable:  # of which a copy is read
        own = replace(parts, dataset=copy.copy(parts.dataset))
        trial = try_stream(own, seconds=seconds, most=_MORE)
        in_flight: InFlight = Observed(trial.batches)
    elif isinstance(batch_sampler, MemoryBudgetBatchSampler):
        trial, in_flight = _by_plan(batch_sampler, parts, seconds)
    else:
        batches = _first_batches(batch_sampler, parts.dataset)
        smallest = min(batches, key=len)
        tried = [smallest, smallest, *batches]
        trial = try_batches(parts, tried, seconds=seconds, fits=lambda *_: True)
        in_flight = Observed(trial.batches)
    return HostModel(
        trial=trial,
        in_flight=in_flight,
        samples=0 if parts.is_iterable else len(parts.dataset),
        present=present_bytes(),
        later=later,
        caches=cache_bytes(),
        forks=parts.starts_by_fork,
    )


def _by_plan(
    sampler: MemoryBudgetBatchSampler, parts: LoaderParts, seconds: float
) -> tuple[Trial, InFlight]:
    """A trial of batches that a plan decides, and what all of them need by it."""
    shapes = batch_shapes(sampler.plan, epoch=sampler.epoch, rank=sampler.rank)
    numbers = _to_try(shapes)
    batches = batches_at(sampler.plan, numbers, epoch=sampler.epoch, rank=sampler.rank)
    elements = _elements(shapes)[numbers]
    pool = shared_memory()

    def fits(number: int, before: Sequence[tuple[int, BatchBytes]]) -> bool:
        if pool is None or not before:
            return True
        each = max(one.total / elements[place] for place, one in before)
        needed = _AT_ONCE * (_SLACK * each * elements[number] + MiB(1))
        return bool(needed <= pool.free_bytes)

    trial = try_batches(parts, batches, seconds=seconds, fits=fits)
    tried = shapes.at([numbers[i] for i in trial.numbers])
    return trial, Planned(shapes, tried, trial.batches)


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


def _first_batches(batch_sampler: Any, dataset: Any) -> list[list[int]]:
    """The first batches of a sampler, which stays where it is, as do the global generators.

    Raises:
        OptionError: it cannot be copied, or has no batch.
    """
    state = RandomState.take()
    try:
        copied = copy.deepcopy(batch_sampler, {id(dataset): dataset})
        batches = [list(batch) for batch in islice(copied, _BATCHES)]
    except TypeError as error:
        raise OptionError(f"the loader's batch sampler cannot be copied: {error}") from error
    finally:
        state.restore()
    if not batches:
        raise OptionError("the loader has no batches")
    return batches
