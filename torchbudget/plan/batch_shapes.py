"""The shapes of one rank's micro-batches, in the order in which they come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt

from torchbudget.plan.cursor import Cursor
from torchbudget.plan.plan import Plan

# Samples whose micro-batches are looked at: a second or so of planning.
_SAMPLES: Final = 2**22
_EPOCHS: Final = 10


@dataclass(frozen=True, slots=True, eq=False)
class BatchShapes:
    """What consecutive micro-batches of a rank are made of.

    Attributes:
        samples: in each, shape `(m,)`.
        padded: the padded size of each, shape `(m, d)`.
        sums: the sum of its samples' sizes on every axis, shape `(m, d)`.
        ends: where each epoch ends among them; the last one may be incomplete.
    """

    samples: npt.NDArray[np.int64]
    padded: npt.NDArray[np.int64]
    sums: npt.NDArray[np.int64]
    ends: tuple[int, ...]

    def __len__(self) -> int:
        """Micro-batches."""
        return len(self.samples)

    def at(self, numbers: Sequence[int]) -> BatchShapes:
        """The shapes of the micro-batches at these places, as one epoch."""
        which = np.array(numbers, np.int64)
        return BatchShapes(self.samples[which], self.padded[which], self.sums[which], (len(which),))


def batch_shapes(plan: Plan, *, epoch: int, rank: int) -> BatchShapes:
    """The shapes of the micro-batches of a rank, from the beginning of an epoch on.

    Of up to ten epochs, or 4 million samples: consecutive micro-batches differ between epochs.

    Returns:
        At least those of the first windows.
    """
    found: list[tuple[npt.NDArray[np.int64], ...]] = []
    ends: list[int] = []
    read = 0
    while len(ends) < (_EPOCHS if plan.order.shuffle else 1) and read < _SAMPLES:
        for span in plan.spans(Cursor(epoch=epoch + len(ends))):
            block = span.block
            mine = slice(rank, None, plan.ranks.number)
            starts, stops = block.starts[mine], block.stops[mine]
            sizes = block.sizes.reshape(len(block.sizes), -1).astype(np.int64)
            before = np.concatenate([np.zeros_like(sizes[:1]), sizes.cumsum(axis=0)])
            padded = plan.rules.padded(block.padded())[mine].reshape(len(starts), -1)
            found.append((stops - starts, padded, before[stops] - before[starts]))
            read += len(sizes)
            if read >= _SAMPLES:
                break
        ends.append(sum(len(one[0]) for one in found))
    samples, padded, sums = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return BatchShapes(samples, padded, sums, tuple(ends))


def batches_at(plan: Plan, numbers: Iterable[int], *, epoch: int, rank: int) -> list[list[int]]:
    """The indices in the data set of micro-batches of a rank, by their places in its epoch.

    Args:
        plan: of the epoch.
        numbers: of the micro-batches; those past the epoch's end are left out.
        epoch: counted from 0.
        rank: whose they are.
    """
    wanted = list(numbers)
    chosen = set(wanted)
    planned = (one.indices.tolist() for one in plan.micro_batches(Cursor(epoch=epoch), rank=rank))
    first = enumerate(islice(planned, max(wanted, default=-1) + 1))
    kept = {number: batch for number, batch in first if number in chosen}
    return [kept[number] for number in wanted if number in kept]
