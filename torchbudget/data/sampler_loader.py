"""What a tracked loop over a sampler's `DataLoader` needs of that loader."""

from __future__ import annotations

from typing import Any

from torchbudget.errors import OptionError, SampleError
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


def check_end(iterator: PlanIterator, done: int) -> None:
    """Raise a `SampleError` where a loader ended after batches that are not all of the epoch."""
    epoch = iterator.began.epoch
    if iterator.after(done)[1].epoch == epoch:
        raise SampleError(
            f"the loader ended after {done} batches of epoch {epoch}, which has more: its data set "
            "or its collate_fn raised StopIteration, as next() does on an iterator that has no more"
        )
