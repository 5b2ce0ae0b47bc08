"""`host_bytes`: what a `DataLoader` that the user made will need."""

from __future__ import annotations

import copy
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset

from torchbudget.data.loading.host_model import HostModel, Setting
from torchbudget.data.loading.parts import HostBytes
from torchbudget.data.loading.trial import LoaderParts
from torchbudget.data.loading.tried_model import observed_model, planned_model, stream_model
from torchbudget.data.planned_sampler import PlannedSampler
from torchbudget.errors import OptionError
from torchbudget.random_state import RandomState
from torchbudget.units import Amount, parse_bytes

_BATCHES: Final = 64  # of a sampler whose plan is unknown


def host_bytes(loader: DataLoader[Any], *, reserve: Amount = 0, trial_s: float = 2.0) -> HostBytes:
    """What a `DataLoader` will need of the host at the most, this process included.

    The same model, and the same trial in a worker of its own, as in `loader_options`. The batches
    of a `MemoryBudgetBatchSampler` are known in advance; of another loader some are read, and the
    largest of them counts for all. The loader is not iterated and no data is read here.

    Args:
        loader: any; one that is being iterated has workers already, which then count twice.
        reserve: bytes that this process will allocate later on.
        trial_s: seconds for the trial, without the time in which its worker starts.

    Raises:
        OptionError: it is no `DataLoader`, or one whose order cannot be looked at.
        MachineError: there is no `/proc` to read memory from.

    >>> dataset = [torch.zeros(1000) for _ in range(20)]
    >>> needs = host_bytes(torch.utils.data.DataLoader(dataset, batch_size=5), trial_s=0)
    >>> needs.total_bytes > needs.shared_bytes == 0
    True
    """
    if not isinstance(loader, DataLoader):
        raise OptionError(f"expected a DataLoader, got {type(loader).__name__}")
    accelerated = torch.accelerator.is_available()
    setting = Setting(
        workers=loader.num_workers,
        prefetch=(loader.prefetch_factor or 0) if loader.num_workers else 0,
        pins=loader.pin_memory and accelerated,
        persists=loader.persistent_workers,
    )
    return _model(loader, parse_bytes(reserve), trial_s).needs(setting)


def _model(loader: DataLoader[Any], later: int, seconds: float) -> HostModel:
    batch_sampler: Any = loader.batch_sampler
    is_iterable = isinstance(loader.dataset, IterableDataset)
    parts = LoaderParts(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        context=loader.multiprocessing_context,
        is_iterable=is_iterable,
        batch_size=loader.batch_size if is_iterable else None,
    )
    if is_iterable:
        return stream_model(parts, later=later, seconds=seconds)
    if isinstance(batch_sampler, PlannedSampler):
        return planned_model(batch_sampler, parts, later=later, seconds=seconds)
    if batch_sampler is None:
        raise OptionError(
            "with batch_size=None each sample of a map-style data set is a batch: give the loader "
            "a batch_size or a batch_sampler"
        )
    return observed_model(
        parts, _first_batches(batch_sampler, loader.dataset), later=later, seconds=seconds
    )


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
