"""`loader_options`: the fastest options of a `DataLoader` that stay within the host's budget."""

from __future__ import annotations

import logging
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Final

import torch
from torch.utils.data import get_worker_info

from torchbudget.budget import MemoryBudget
from torchbudget.checks import check_flags, is_number, optional
from torchbudget.data.loading.host_model import HostModel, Setting
from torchbudget.data.loading.limits import HostLimits
from torchbudget.data.loading.loader_parts import LoaderParts
from torchbudget.data.loading.parts import HostBytes
from torchbudget.data.loading.timing import fastest, time_workers
from torchbudget.data.loading.trial import Trial
from torchbudget.data.loading.tried_model import loader_model
from torchbudget.data.map_style import MapStyle
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.data.stream.dataset import BudgetedIterableDataset
from torchbudget.distributed import ranks_on_this_machine
from torchbudget.errors import BudgetError, OptionError
from torchbudget.machine.limits import usable_processors
from torchbudget.plan.batch_shapes import batches_at
from torchbudget.units import Amount, format_bytes, parse_bytes

# Batches that wait for the loop help only where their times vary.
_MOST_PREFETCHED: Final = 8
_TIMED_PREFETCH: Final = 2
_TIMED: Final = 512  # batches
_log: Final = logging.getLogger("torchbudget")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderOptions(Mapping[str, Any]):
    """Keyword arguments of a `DataLoader`, as `loader_options` chose them.

    Attributes:
        options: the arguments.
        needs: what the loader is predicted to need.
        budget_bytes: of the host.
        limited_by: what one more worker, or batch that is prefetched, would exceed.
        speeds: samples a second of the numbers of workers that were timed.
    """

    options: Mapping[str, Any]
    needs: HostBytes
    budget_bytes: int
    limited_by: str
    speeds: Mapping[int, float]

    def __getitem__(self, name: str) -> Any:
        return self.options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.options)

    def __len__(self) -> int:
        return len(self.options)

    def __repr__(self) -> str:
        return f"LoaderOptions({', '.join(f'{name}={one!r}' for name, one in self.items())})"

    def explain(self) -> str:
        """What was chosen, why not more, and the bytes of each part against the budget."""
        chosen = ", ".join(f"{name}={one}" for name, one in self.items() if one is not None)
        lines = [chosen, f"limited by {self.limited_by}"]
        lines += [f"{speed:,.0f} samples/s with {n} workers" for n, speed in self.speeds.items()]
        return "\n".join([*lines, "", self.needs.table(self.budget_bytes)])


def loader_options(
    sampler_or_stream: MemoryBudgetBatchSampler | BudgetedIterableDataset,
    budget: MemoryBudget,
    *,
    dataset: MapStyle | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    pin_memory: bool | None = None,
    persistent_workers: bool = True,
    multiprocessing_context: str | BaseContext | None = None,
    max_workers: int | None = None,
    ranks_per_machine: int | None = None,
    reserve: Amount = 0,
    trial_s: float = 4.0,
) -> LoaderOptions:
    """The fastest options of a stock `DataLoader` that stay within the host's budget.

    One real worker reads a few of the plan's batches, the smallest and the largest among them,
    while its memory is read from here. With it is known what a worker needs, what it copies of this
    process's objects, and what a batch needs in shared memory and while it is built; the batches
    that exist at once are a window over the plan's own sequence. Then, of the numbers of workers
    that fit, the fastest is taken (of nearly the same speed: most workers; none only where workers
    are clearly slower, since they also read while the step runs), with as many batches prefetched
    as fit, up to 8 a worker.

    Call it where the loader is made: after the model is built, since what this process has now
    counts. The data set is read in other processes only, the sampler or stream stays where it is,
    and the global random generators are not drawn from.

    Args:
        sampler_or_stream: whose batches the loader yields.
        budget: whose `host` bytes are the limit, for this process and its descendants; its `shared`
            bytes too, and what `/dev/shm` has free.
        dataset: the sampler's; a stream has its own.
        collate_fn: the loader's. A stream has its own.
        worker_init_fn: the loader's.
        pin_memory: copy batches to pinned memory. Default: if there is an accelerator, and the
            copies fit. They are rounded up to powers of two and kept.
        persistent_workers: workers live on after an epoch.
        multiprocessing_context: how workers start, such as `"spawn"`; default: torch's.
        max_workers: workers at the most. Default: the processors that this process may use, divided
            by the ranks of this machine.
        ranks_per_machine: that share its processors and `/dev/shm`. Default: torchrun's
            `LOCAL_WORLD_SIZE`, 1 for a process that is alone. The budget's `host` is this rank's.
        reserve: bytes that this process will allocate later on, such as a model on the CPU.
        trial_s: seconds for the trial and for timing, half of them each, without the time in which
            workers start, and more where a few batches take longer; 0: a few batches, and the most
            workers that fit.

    Raises:
        BudgetError: the budget states no host bytes; or no setting fits: the error names the
            smallest budget that would do.
        OptionError: an argument is invalid, or does not go with the sampler or stream; or this is
            one of several ranks whose launcher does not say how many share the machine.
        MachineError: there is no `/proc` to read memory from.

    >>> dataset = [{"ids": torch.arange(length)} for length in (5, 9, 2, 7)]
    >>> sampler = MemoryBudgetBatchSampler([5, 9, 2, 7], PaddedCost(unit_bytes=1), 18)
    >>> host, collate = MemoryBudget(host="64GiB"), PadCollate()
    >>> options = loader_options(sampler, host, dataset=dataset, collate_fn=collate, trial_s=0)
    >>> loader = torch.utils.data.DataLoader(
    ...     dataset, batch_sampler=sampler, collate_fn=collate, **options)
    >>> sorted(options)
    ['num_workers', 'persistent_workers', 'pin_memory', 'prefetch_factor']
    """
    check_flags(persistent_workers=persistent_workers)
    if pin_memory not in (None, True, False):
        raise OptionError(f"pin_memory must be a bool or None, got {pin_memory!r}")
    budget_bytes, later = _host_bytes(budget), parse_bytes(reserve)
    if not is_number(trial_s) or not 0 <= trial_s < float("inf"):
        raise OptionError(f"trial_s must be a number of seconds of at least 0, got {trial_s!r}")
    ranks = ranks_on_this_machine(ranks_per_machine)
    most = optional("max_workers", max_workers) or max(1, usable_processors() // ranks)
    if get_worker_info() is not None or multiprocessing.current_process().daemon:
        raise OptionError("a worker cannot start workers: call loader_options where the loader is")
    parts = _parts(sampler_or_stream, dataset, collate_fn, worker_init_fn, multiprocessing_context)
    model = loader_model(sampler_or_stream, parts, later=later, seconds=trial_s / 2)
    limits = HostLimits.of(MemoryBudget.of(budget), budget_bytes, ranks)
    choice = _Choice(
        model, limits, most, pin_memory, persistent_workers, is_stream=parts.is_iterable
    )
    speeds: dict[int, float] = {}
    if isinstance(sampler_or_stream, MemoryBudgetBatchSampler) and trial_s and choice.most:
        speeds = _speeds(sampler_or_stream, parts, choice, model.trial, trial_s / 2)
    setting = choice.setting(fastest(speeds) if speeds else choice.most)
    options: dict[str, Any] = {
        "num_workers": setting.workers,
        "prefetch_factor": setting.prefetch or None,
        "pin_memory": choice.pins,
        "persistent_workers": setting.persists,
    }
    if multiprocessing_context is not None and setting.workers:
        options["multiprocessing_context"] = multiprocessing_context
    return LoaderOptions(
        options=options,
        needs=model.needs(setting),
        budget_bytes=budget_bytes,
        limited_by=choice.reason(setting),
        speeds=speeds,
    )


class _Choice:
    """The settings that fit.

    Raises:
        BudgetError: none does.
    """

    def __init__(
        self,
        model: HostModel,
        limits: HostLimits,
        most: int,
        pin_memory: bool | None,
        persists: bool,
        *,
        is_stream: bool,
    ) -> None:
        self._model, self._limits = model, limits
        self._allowed, self._persists = most, persists
        self.pins = torch.accelerator.is_available() if pin_memory is None else pin_memory
        over = self._over(self._of(0, 0))
        if over and pin_memory is None and self.pins:
            self.pins = False
            over = self._over(self._of(0, 0))
        if over:  # host bytes: without workers nothing is in /dev/shm or an open file
            raise _too_small(model.needs(self._of(0, 0)), limits, is_stream)
        fitting = (n for n in range(most, 0, -1) if not self._over(self._of(n, 1)))
        self.most = next(fitting, 0)
        if not self.most:
            _log.warning(
                "no worker fits: %s; batches will be loaded in the loop", self._over(self._of(1, 1))
            )

    def setting(self, workers: int, *, most: int = _MOST_PREFETCHED) -> Setting:
        """With as many batches prefetched as fit."""
        if not workers:
            return self._of(0, 0)
        fitting = (p for p in range(most, 0, -1) if not self._over(self._of(workers, p)))
        return self._of(workers, next(fitting))

    def reason(self, setting: Setting) -> str:
        """What a larger setting would exceed."""
        workers, prefetch = setting.workers, setting.prefetch
        is_cut = bool(workers) and prefetch < _MOST_PREFETCHED
        batches = self._over(self._of(workers, prefetch + 1)) if is_cut else ""
        if workers == self._allowed:
            return batches or f"max_workers={self._allowed}, or the processors of this rank"
        more = self._over(self._of(workers + 1, 1))
        return more or batches or "speed: more workers were no faster"

    def _of(self, workers: int, prefetch: int) -> Setting:
        pins = self.pins and torch.accelerator.is_available()
        persists = self._persists and workers > 0
        return Setting(workers=workers, prefetch=prefetch, pins=pins, persists=persists)

    def _over(self, setting: Setting) -> str:
        return self._limits.exceeded_by(self._model.needs(setting))


def _host_bytes(budget: MemoryBudget | Amount) -> int:
    host = MemoryBudget.of(budget).host
    if host is None:
        raise BudgetError(
            f"the budget must state the host's bytes, as in MemoryBudget(host='16GiB'), "
            f"got {budget!r}"
        )
    return host


def _parts(
    source: Any, dataset: Any, collate_fn: Any, worker_init_fn: Any, context: Any
) -> LoaderParts:
    methods = multiprocessing.get_all_start_methods()
    if not (context is None or isinstance(context, BaseContext) or context in methods):
        raise OptionError(
            f"multiprocessing_context must be one of {', '.join(methods)} or a context, "
            f"got {context!r}"
        )
    for name, function in (("collate_fn", collate_fn), ("worker_init_fn", worker_init_fn)):
        if function is not None and not callable(function):
            raise OptionError(f"{name} must be a function, got {function!r}")
    if isinstance(source, BudgetedIterableDataset):
        if dataset is not None or collate_fn is not None:
            raise OptionError("a stream has its data set and its collate_fn: leave both out")
    elif not isinstance(source, MemoryBudgetBatchSampler):
        raise OptionError(
            "expected a MemoryBudgetBatchSampler or a BudgetedIterableDataset, "
            f"got {type(source).__name__}; host_bytes(loader) predicts what any loader needs"
        )
    elif not isinstance(dataset, MapStyle):
        raise OptionError(
            "give dataset=, the sampler's map-style data set: the bytes of its samples are found "
            f"by reading some; got {type(dataset).__name__}"
        )
    else:
        source.check_dataset(dataset)
    return LoaderParts(
        dataset=source if dataset is None else dataset,
        collate_fn=collate_fn,
        worker_init_fn=worker_init_fn,
        context=context,
        is_iterable=dataset is None,
    )


def _too_small(needs: HostBytes, limits: HostLimits, is_stream: bool) -> BudgetError:
    least = needs.total_bytes
    smaller = "the sampler's host_batch_bytes="
    if is_stream:
        smaller = "the stream's max_batch_size=), let fewer samples wait (its look_ahead="
    return BudgetError(
        f"even without workers the loader needs more than the host's budget of "
        f"{format_bytes(limits.host_bytes)}: the smallest that would do is "
        f"MemoryBudget(host={least}), {format_bytes(least)}. Free memory, make micro-batches "
        f"smaller ({smaller}), or raise it:\n"
        f"{needs.table(limits.host_bytes)}"
    )


def _speeds(
    sampler: MemoryBudgetBatchSampler,
    parts: LoaderParts,
    choice: _Choice,
    trial: Trial,
    seconds: float,
) -> dict[int, float]:
    """Samples a second of the numbers of workers that were timed."""
    return time_workers(
        parts,
        batches_at(sampler.plan, range(_TIMED), epoch=sampler.epoch, rank=sampler.rank),
        lambda workers: choice.setting(workers, most=_TIMED_PREFETCH),
        choice.most,
        batch_s=statistics.fmean(one.seconds for one in trial.batches),
        seconds=seconds,
    )
