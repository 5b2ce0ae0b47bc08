"""`loader_options`: the largest options of a `DataLoader` that stay within the host's budget."""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from multiprocessing.context import BaseContext
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from torchbudget.budget import MemoryBudget
from torchbudget.checks import optional
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.data.stream.dataset import BudgetedIterableDataset
from torchbudget.distributed import Ranks, ranks_on_this_machine
from torchbudget.errors import BudgetError, OptionError
from torchbudget.host.model import HostBytes, HostModel
from torchbudget.machine.host import SHM, free_descriptors, shared_memory, usable_processors
from torchbudget.protocols import MapStyle
from torchbudget.units import Amount, format_bytes, parse_bytes

_PREFETCH: Final = 8  # batches a worker at the most; more help only where their times vary
_log: Final = logging.getLogger("torchbudget")


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
