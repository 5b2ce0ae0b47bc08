"""What a sampler needs of the `DataLoader` whose batches it makes: how far its loop has come."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from torchbudget.errors import OptionError, SampleError, StateError
from torchbudget.plan.iterator import PlanIterator
from torchbudget.plan.step_source import IndexSource


def check_loader(loader: Any, sampler: IndexSource) -> None:
    """Check that a loop over a loader can be tracked.

    Raises:
        OptionError: it has another batch sampler or a state of its own, yields batches out of their
            order, or its data set has not one sample for each size.
    """
    if getattr(loader, "batch_sampler", None) is not sampler or hasattr(loader, "state_dict"):
        raise OptionError(
            "tracked needs a DataLoader whose batch_sampler this is; a StatefulDataLoader "
            f"saves its position itself: got {type(loader).__name__}"
        )
    if loader.num_workers and not getattr(loader, "in_order", True):
        raise OptionError("with in_order=False it is unknown which batches came: use in_order=True")
    sampler.check_dataset(loader.dataset)


def check_not_batched_again() -> None:
    """Check that what iterates the sampler that calls is no `BatchSampler` of torch.

    Raises:
        OptionError: the loader was given the sampler as `sampler=`.
    """
    caller = sys._getframe(2)
    if caller.f_globals.get("__name__") == BatchSampler.__module__:
        raise OptionError(
            "this sampler yields whole batches, which torch's BatchSampler would batch again: pass "
            "it to the DataLoader as batch_sampler=, not as sampler="
        )


def check_end(iterator: PlanIterator, done: int) -> None:
    """Raise a `SampleError` where a loader ended after batches that are not all of the epoch."""
    epoch = iterator.began.epoch
    if iterator.after(done)[1].epoch == epoch:
        raise SampleError(
            f"the loader ended after {done} batches of epoch {epoch}, which has more: its data set "
            "or its collate_fn raised StopIteration, as next() does on an iterator that has no more"
        )


class WorkersLoop:
    """The loop of a plain `DataLoader` whose workers read ahead of it.

    It is known from the frame that calls `iter(sampler)`, and is not kept alive.

    Args:
        loop: the iterator of the loader.
    """

    def __init__(self, loop: _MultiProcessingDataLoaderIter) -> None:
        self._loop = weakref.ref(loop)

    @classmethod
    def of_caller(cls) -> WorkersLoop | None:
        """The loop that calls the caller of this method; `None`: another one."""
        frame = sys._getframe(2)
        if frame.f_globals.get("__name__") != _MultiProcessingDataLoaderIter.__module__:
            return None  # before Python 3.13 `f_locals` keeps a caller's values alive
        loop = frame.f_locals.get("self")
        return cls(loop) if isinstance(loop, _MultiProcessingDataLoaderIter) else None

    def check_not_ahead(self, iterator: PlanIterator) -> None:
        """Raise a `StateError` where batches were drawn that may not have come to the loop."""
        loop, drawn = self._loop(), iterator.drawn
        if loop is not None:
            came = loop._num_yielded
        else:  # it ended, or was broken off
            came = drawn if iterator.after(None)[1].epoch != iterator.began.epoch else 0
        if came < drawn:
            raise StateError(
                f"workers of the DataLoader have read {drawn} batches, ahead of what the loop has "
                "taken: loop over sampler.tracked(loader), use a StatefulDataLoader, or give "
                "batches_done"
            )
