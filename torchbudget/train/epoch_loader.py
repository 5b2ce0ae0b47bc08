"""The random numbers that loops over loaders draw, so that a loop can begin as it did before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import torch
from torch.utils.data import DataLoader

from torchbudget.protocols import HasEpochs, ResumableSource, Stateful


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochLoader:
    """A loader in one epoch of a training.

    The workers' seeds are not drawn from a generator that others draw from, since workers that
    persist are seeded once, but once more where a training goes on.

    Attributes:
        loader: as the user made it.
        epoch: of the training.
        seed: of the training, for the workers of all loops.
    """

    loader: Iterable[Any]
    epoch: int
    seed: int

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self.loader
        for source in _sources_of(loader):
            if isinstance(source, HasEpochs):
                source.set_epoch(self.epoch)
        # Workers that persist are those of the first epoch.
        persist = getattr(loader, "persistent_workers", False)
        with _workers_seeded(loader, self.seed + (0 if persist else self.epoch)):
            return loop_over(loader)

    def __length_hint__(self) -> int:
        return batches_left(self.loader) or 0


def loop_over(loader: Any) -> Iterator[Any]:
    """Begin a loop over a loader, whose sampler or stream knows which batches came.

    So it is an error where the loop ends before the epoch does, as after a `StopIteration` out of
    a `collate_fn`, and batches are compared with what was planned.
    """
    for source in _sources_of(loader):
        if isinstance(source, ResumableSource):
            if not isinstance(loader, Stateful):
                return source.tracked(loader)
            source.check_ranks()
    return iter(loader)


def read_as_plain(loader: Any) -> Any:
    """Return a `DataLoader` for a `StatefulDataLoader` whose sampler or stream has the position.

    After the last batch of an epoch its own state would go on with the batches of the next epoch.
    """
    resumable = any(isinstance(source, ResumableSource) for source in _sources_of(loader))
    if not (resumable and isinstance(loader, Stateful)):
        return loader
    plain: DataLoader[Any] = DataLoader.__new__(DataLoader)
    vars(plain).update(vars(loader), _iterator=None)
    return plain


def _sources_of(loader: Any) -> list[Any]:
    return [getattr(loader, name, None) for name in ("batch_sampler", "sampler", "dataset")]


def batches_left(loader: Any) -> int | None:
    """How many batches a loop over a loader brings; `None` where that is unknown in advance.

    The length of a loader is that of the whole epoch, also where its sampler goes on within it.
    """
    sampler = getattr(loader, "batch_sampler", None)
    left = sampler.batches_left if isinstance(sampler, ResumableSource) else None
    return left or length_hint(loader) or None


def generators_of(loader: Any) -> list[torch.Generator]:
    """Those that a loader and its samplers draw from, each once."""
    sampler = getattr(loader, "batch_sampler", None)
    owners = (loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return [one for one in dict.fromkeys(found) if isinstance(one, torch.Generator)]


@contextmanager
def _workers_seeded(loader: Any, seed: int) -> Iterator[None]:
    """Inside, `iter(loader)` draws the seed of its workers from a generator of its own."""
    if not isinstance(loader, DataLoader):  # it has no workers, as far as is known
        yield
        return
    before = loader.generator
    loader.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        loader.generator = before
