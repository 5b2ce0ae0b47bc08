"""What people otherwise do under the same worst case: batches by other rules, summed up alike.

Each of them is the largest of its kind whose worst batch fits the budget; a sample that alone is
over the budget is alone, or skipped, as in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.padded import PackedCost, PaddedCost
from torchbudget.cost.models.protocol import IntArray
from torchbudget.plan.arrange import ascending
from torchbudget.plan.order import Order
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import Block, solve
from torchbudget.plan.tally import BatchFigures, Tally

_CHUNK: Final = 2**17
# Batches whose samples are sorted together when samples are grouped by length, as in transformers'
# `LengthGroupedSampler`.
_GROUPED: Final = 50
# Between the smallest and the largest size, so many are all looked at; beyond, those that occur.
_LENGTHS: Final = 2**20


def fixed_number(sizes: SizeTable, rules: BatchRules, order: Order) -> int:
    """The largest number of samples that fits whatever their sizes; at most an epoch's."""
    largest = sizes.largest
    if len(order.skipped):
        largest = np.delete(sizes.values, order.skipped, axis=0).max(axis=0)
    return min(int(rules.rounded(rules.capacity(largest, rules.budget_bytes))), len(order))


def fixed_batches(
    sizes: SizeTable, rules: BatchRules, order: Order, epoch: int, *, number: int, grouped: bool
) -> BatchFigures:
    """Batches of one number of samples over an epoch; O(samples).

    Args:
        sizes: of the data set.
        rules: by which they are judged.
        order: of the samples.
        epoch: of the order.
        number: of samples in a batch.
        grouped: sort the samples of 50 batches by size, and of several axes by what one of them
            costs; otherwise they stay in their order.
    """
    tally = Tally(sizes, rules)
    for chunk in _chunks(sizes, order, epoch, number * (_GROUPED if grouped else 1)):
        values = _sorted(chunk, number * _GROUPED, rules) if grouped else chunk
        starts = np.arange(0, len(values), number)
        tally.add(_block(values, starts))
    return tally.figures()


def _chunks(
    sizes: SizeTable, order: Order, epoch: int, multiple: int
) -> Iterator[npt.NDArray[Any]]:
    """The sizes of an epoch's samples in their order, in multiples of a number."""
    drawn, positions = order.epoch(epoch), len(order)
    stretch = max(_CHUNK // multiple, 1) * multiple
    for start in range(0, positions, stretch):
        yield sizes.values[drawn.indices(start, min(start + stretch, positions))]


def _sorted(sizes: npt.NDArray[Any], length: int, rules: BatchRules) -> npt.NDArray[Any]:
    """Sizes whose stretches of a length are sorted, each and the rest by itself."""
    keys = sizes if sizes.ndim == 1 else rules.costs(rules.cost, 1, rules.padded(sizes))
    whole = len(keys) - len(keys) % length
    order = ascending(keys[:whole].reshape(-1, length)) + np.arange(0, whole, length)[:, None]
    rest = whole + ascending(keys[None, whole:])[0]
    return sizes.take(np.append(order.reshape(-1), rest), axis=0)


def _block(sizes: npt.NDArray[Any], starts: IntArray) -> Block:
    none = starts[:0]
    stops = np.append(starts[1:], len(sizes))
    return Block(samples=none, sizes=sizes, starts=starts, stops=stops, rounds=none)


class TokenLimit:
    """Batches of at most so many elements, padding included, cut from the same windows.

    Args:
        sizes: of the data set, of one axis.
        rules: by which batches are judged, and whose options hold for these too.
        limit: of elements.

    Attributes:
        limit: as given.
    """

    def __init__(self, sizes: SizeTable, rules: BatchRules, limit: int) -> None:
        self.limit = limit
        packed = rules.packing is not None
        cost = PackedCost(unit_bytes=1) if packed else PaddedCost(unit_bytes=1)
        self._rules = replace(rules, cost=cost, budget_bytes=limit, balance=None)
        self._tally = Tally(sizes, rules)

    @classmethod
    def of(
        cls, sizes: SizeTable, rules: BatchRules, order: Order, *, window: int
    ) -> TokenLimit | None:
        """With the largest limit whose worst batch fits; None where there is none.

        There is none of several axes, and where samples without elements cost something.
        """
        if sizes.axes > 1:
            return None
        limit = _most_elements(_lengths(sizes, rules, order), rules, min(window, len(order)))
        return None if limit < 1 else cls(sizes, rules, limit)

    def add(self, block: Block) -> None:
        """Cut the windows of a block anew, and count their batches."""
        windows = block.sizes.reshape(len(block.rounds), -1)
        self._tally.add(solve(self._rules, windows))

    def figures(self) -> BatchFigures:
        """What was counted."""
        return self._tally.figures()


def _lengths(sizes: SizeTable, rules: BatchRules, order: Order) -> IntArray:
    """Every size between the smallest and the largest, or those that occur where these are many."""
    smallest, largest = int(sizes.values.min()), int(sizes.largest)
    if largest - smallest < _LENGTHS:
        lengths = np.arange(smallest, largest + 1)
    else:
        lengths = np.unique(sizes.values).astype(np.int64)
    if len(order.skipped):
        lengths = lengths[rules.cost.capacity(rules.padded(lengths), rules.budget_bytes) >= 1]
    return lengths


def _most_elements(lengths: IntArray, rules: BatchRules, window: int) -> int:
    """The largest number of elements of which no batch is over the budget.

    Args:
        lengths: that samples may have, shape `(k,)`.
        rules: with the cost and the budget.
        window: samples that a batch may have at the most.
    """
    padded = rules.padded(lengths)
    if rules.packing is not None:
        items = rules.packing.item_bytes(padded)
        costly = items > 0
        if not costly.any():
            return window * int(padded.max())
        worst = int((padded[costly] / items[costly]).argmin())
        room = rules.budget_bytes - rules.packing.base_bytes
        return max(room, 0) * int(padded[costly][worst]) // int(items[costly][worst])
    fits = rules.capacity(lengths, rules.budget_bytes)
    binding = fits < (window if rules.max_batch_size is None else min(window, rules.max_batch_size))
    # One element less than what takes one sample more than fits.
    least = ((fits[binding] + 1) * padded[binding] - 1).min(initial=window * int(padded.max()))
    return int(least)
