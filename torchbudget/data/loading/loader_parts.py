"""What a `DataLoader` is made of, whatever its number of workers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoaderParts:
    """The parts of a loader that its options leave alone.

    Attributes:
        dataset: map-style, or an iterable one that yields batches.
        collate_fn: as the `DataLoader`'s.
        worker_init_fn: likewise.
        context: the way that workers are started; `None`: the default one.
        is_iterable: there are no lists of indices.
        batch_size: of the loader's own batches of an iterable data set; `None`: it yields batches.
    """

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    worker_init_fn: Callable[[int], None] | None
    context: Any
    is_iterable: bool = False
    batch_size: int | None = None

    @property
    def workers_context(self) -> Any:
        """The context of `multiprocessing` that workers are started in."""
        if self.context is None or isinstance(self.context, str):
            return multiprocessing.get_context(self.context)
        return self.context

    @property
    def starts_by_fork(self) -> bool:
        """Whether workers share this process's memory when they start."""
        return bool(self.workers_context.get_start_method() == "fork")

    def loader(self, batches: Any, **options: Any) -> DataLoader[Any]:
        """A loader of these batches, which draws nothing from the global generators.

        Args:
            batches: an iterable of lists of indices; not looked at where the data set is iterable.
            options: of the loader, its number of workers among them.
        """
        workers = bool(options["num_workers"])
        order: dict[str, Any] = {"batch_sampler": batches}
        if self.is_iterable:
            order = {"batch_size": self.batch_size}
        return DataLoader(
            self.dataset,
            **order,
            collate_fn=self.collate_fn,
            multiprocessing_context=self.context if workers else None,
            generator=torch.Generator(),
            **{"worker_init_fn": self.worker_init_fn} | options,
        )
