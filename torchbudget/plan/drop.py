"""What `drop_last` leaves of an epoch's last window."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from torchbudget.plan.cursor import BoolArray
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import Block, solve


def without_last(
    sizes: npt.NDArray[Any], rules: BatchRules, *, strips: int, multiple_of: int = 1
) -> BoolArray:
    """Which samples stay when the micro-batch that could still have taken one is dropped.

    Args:
        sizes: of the window's samples, shape `(S,)` or `(S, d)`.
        rules: what a micro-batch may be.
        strips: see `arrange`.
        multiple_of: drop the last samples in the order of the cut too, until a multiple of this
            number stays.

    Returns:
        Shape `(S,)`.
    """
    block = solve(sizes[None], rules, strips=strips)
    last = int(_room(block, rules).argmax())
    stays = np.ones(len(sizes), np.bool_)
    if _room(block, rules)[last] > 0:
        stays[block.samples[block.starts[last] : block.stops[last]]] = False
    still = block.samples[stays[block.samples]]
    stays[still[len(still) - len(still) % multiple_of :]] = False
    return stays


def _room(block: Block, rules: BatchRules) -> npt.NDArray[np.int64]:
    """How much each micro-batch could still have taken; above 0 only where that is a sample."""
    if rules.packing is None:
        # Every run but the last took all that fits.
        room = rules.rounded(rules.capacity(block.padded(), rules.budget_bytes))
        room -= block.stops - block.starts
        return np.where(block.starts == block.starts.max(), room, 0)
    free = rules.budget_bytes - block.costs(rules)
    if rules.max_batch_size is not None:
        free = np.where(block.stops - block.starts < rules.max_batch_size, free, 0)
    smallest = int(rules.packing.item_bytes(rules.padded(block.sizes)).min())
    return np.where(free >= smallest, free, 0)
