"""An epoch that holds every sample of the data set once, so that results can be put in order."""

from __future__ import annotations

import numpy as np

from torchbudget.errors import OptionError, StateError
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.iterator import PlanIterator
from torchbudget.plan.plan import Plan


def whole_epoch(plan: Plan, cursor: Cursor, *, rank: int, dataset_length: int) -> PlanIterator:
    """The micro-batches of an epoch on one rank, each as indices in the data set.

    Args:
        plan: of the epoch.
        cursor: where it begins.
        rank: whose micro-batches.
        dataset_length: samples in the data set that the indices are of.

    Raises:
        OptionError: the epoch leaves samples out or repeats them, or there are not as many sizes as
            samples.
        StateError: it begins within the epoch.
    """
    order = plan.order
    order.check_length(dataset_length)
    if len(order.skipped):
        raise OptionError(
            f"oversize='skip' leaves out {len(order.skipped):,} of {dataset_length:,} samples, the "
            f"first at index {order.skipped[0]}, so that they would have no output: raise the "
            "budget, or use oversize='alone'"
        )
    if order.replacement or len(order) != dataset_length:
        replaced = " with replacement" if order.replacement else ""
        raise OptionError(
            f"an epoch of this sampler is {len(order):,} of {dataset_length:,} samples{replaced}, "
            "so that some would have no output, or several: leave out replacement and num_samples"
        )
    if plan.drop_last:
        raise OptionError(
            "drop_last=True may leave samples out, which would have no output: use drop_last=False"
        )
    if cursor.stop:
        left = plan.left_of(cursor)
        window = cursor.stop - cursor.start if left is None else int(np.count_nonzero(left))
        done = cursor.stop - window
        raise StateError(
            f"the sampler goes on within epoch {cursor.epoch}, of which {done:,} samples are done "
            "and would have no output: use another sampler, or call "
            f"set_epoch({cursor.epoch + 1}) first"
        )
    return PlanIterator(plan, cursor, rank=rank)
