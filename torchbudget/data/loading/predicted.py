"""`host_bytes`: what a `DataLoader` that the user made will need."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from torchbudget.data.loading.host_model import Setting
from torchbudget.data.loading.loader_parts import LoaderParts
from torchbudget.data.loading.parts import HostBytes
from torchbudget.data.loading.tried_model import loader_model
from torchbudget.errors import OptionError
from torchbudget.units import Amount, parse_bytes


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
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if loader.batch_sampler is None and not is_iterable:
        raise OptionError(
            "with batch_size=None each sample of a map-style data set is a batch: give the loader "
            "a batch_size or a batch_sampler"
        )
    parts = LoaderParts(
        dataset=loader.dataset,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        context=loader.multiprocessing_context,
        is_iterable=is_iterable,
        batch_size=loader.batch_size if is_iterable else None,
    )
    later = parse_bytes(reserve)
    model = loader_model(loader.batch_sampler, parts, later=later, seconds=trial_s)
    return model.needs(setting)
