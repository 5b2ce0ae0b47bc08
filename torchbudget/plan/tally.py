"""What an epoch's batches are, and what the budget is used for, summed up block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import Block, over_runs
from torchbudget.units import MAX_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetShares:
    """What the budget is used for: shares of it, means over batches, that add up to 1.

    Where batches are over the budget they add up to more.

    Attributes:
        model: what a batch needs without any sample: parameters, gradients, optimizer state.
        data: what the samples need by their own sizes: what the batch would cost beyond the model
            if each sample were charged as in a batch of as many samples of its own size.
        padding: the rest of what the batch costs.
        no_room: empty, since not one more sample like the batch's longest would fit; of packed
            batches, not one of the least size that occurs on every axis.
        limited: empty, since `max_batch_size` or `batch_size_multiple` allows no more samples.
        left_over: empty, although more samples would fit: the window had no more of them, or they
            were split to give ranks equal numbers, or the epoch or the step a given number.
    """

    model: float
    data: float
    padding: float
    no_room: float
    limited: float
    left_over: float

    @property
    def empty(self) -> float:
        """All that is empty."""
        return self.no_room + self.limited + self.left_over


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Figures of an epoch's batches.

    Attributes:
        batches: how many, on all ranks together.
        samples: in them.
        fill: mean predicted bytes of a batch / budget.
        shares: what the budget is used for.
        padding: share of the batches' elements that are padding, over all axes.
        axis_padding: the same for each ragged axis.
        smallest: the least number of samples in a batch.
        largest: the largest number.
        over_budget: batches whose predicted bytes exceed the budget.
    """

    batches: int
    samples: int
    fill: float
    shares: BudgetShares
    padding: float
    axis_padding: tuple[float, ...]
    smallest: int
    largest: int
    over_budget: int


class Tally:
    """Sums over batches.

    Args:
        sizes: of the data set.
        rules: by whose cost and budget batches are judged, whoever made them.
    """

    def __init__(self, sizes: SizeTable, rules: BatchRules) -> None:
        self.rules = rules
        self.batches = self.samples = self.over = self.largest = 0
        self.smallest = np.iinfo(np.int64).max
        self.cost = 0.0
        self.real = np.zeros(sizes.axes)
        self.padded = np.zeros(sizes.axes)
        model_bytes = rules.model_bytes(sizes.largest)
        self._model_bytes = 0 if model_bytes == MAX_BYTES else model_bytes  # nothing is known
        self._least_bytes = 0
        if rules.packing is not None:
            least = rules.padded(sizes.values.min(axis=0))
            self._least_bytes = int(rules.packing.item_bytes(least))
        self._uses = np.zeros(6)  # bytes, in the order of `BudgetShares`

    def add(self, block: Block) -> None:
        """Count the micro-batches of a block."""
        taken, sizes = block.stops - block.starts, block.sizes
        costs = block.costs(self.rules, self.rules.cost)
        padded = block.padded()
        self.batches += len(taken)
        self.samples += int(taken.sum())
        self.smallest = min(self.smallest, int(taken.min()))
        self.largest = max(self.largest, int(taken.max()))
        self.over += int(np.count_nonzero(costs > self.rules.budget_bytes))
        self.cost += float(costs.sum(dtype=np.float64))
        axes = len(self.real)
        self.real += sizes.reshape(-1, axes).sum(axis=0, dtype=np.float64)
        if self.rules.packing is not None:
            totals = over_runs(np.add, self.rules.padded(sizes).reshape(-1, axes), block.starts)
            padded_totals = self.rules.packing.padded_totals(totals)
            self.padded += padded_totals.sum(axis=0, dtype=np.float64)
        else:
            elements = self.rules.padded(padded).reshape(-1, axes).astype(np.float64)
            self.padded += (elements * taken[:, None]).sum(axis=0)
        self._use(block, costs, padded)

    def _use(self, block: Block, costs: IntArray, padded: npt.NDArray[np.int64]) -> None:
        """Count what the budget is used for."""
        costs = costs.astype(np.float64)
        model = np.minimum(self._model_bytes, costs)
        own = np.clip(self._own_bytes(block), model, costs)
        empty = np.maximum(self.rules.budget_bytes - costs, 0)
        fits, allowed = self._could_grow(block, padded, empty)
        self._uses += [
            used.sum()
            for used in (
                model,
                own - model,
                costs - own,
                empty[~fits],
                empty[fits & ~allowed],
                empty[fits & allowed],
            )
        ]

    def _own_bytes(self, block: Block) -> npt.NDArray[np.float64]:
        """What each micro-batch would cost if no sample were padded, shape `(micro-batches,)`."""
        rules, sizes = self.rules, block.sizes.astype(np.int64, copy=False)
        if rules.packing is not None:
            each = rules.packing.item_bytes(sizes).astype(np.float64)
            return rules.packing.base_bytes + over_runs(np.add, each, block.starts)
        # Each sample's share of a batch of as many samples, all of its size.
        numbers = block.for_samples(block.stops - block.starts)
        each = rules.costs(rules.cost, numbers, sizes) / numbers
        return over_runs(np.add, each, block.starts)

    def _could_grow(
        self, block: Block, padded: npt.NDArray[np.int64], empty: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Whether one more sample would fit each micro-batch, and whether the options allow it."""
        rules, taken = self.rules, block.stops - block.starts
        most = rules.max_batch_size
        if rules.packing is not None:
            return empty >= self._least_bytes, taken < (taken.max() + 1 if most is None else most)
        fits = taken < rules.cost.capacity(rules.padded(padded), rules.budget_bytes)
        return fits, taken < rules.rounded(rules.capacity(padded, rules.budget_bytes))

    def figures(self) -> BatchFigures:
        """What was counted."""

        def share(real: float, padded: float) -> float:
            return float(1 - real / padded) if padded else 0.0

        whole = self.batches * self.rules.budget_bytes
        uses = (self._uses / whole if whole else self._uses).tolist()
        return BatchFigures(
            batches=self.batches,
            samples=self.samples,
            fill=self.cost / whole if whole else 0.0,
            shares=BudgetShares(**dict(zip(BudgetShares.__slots__, uses, strict=True))),
            padding=share(self.real.sum(), self.padded.sum()),
            axis_padding=tuple(map(share, self.real.tolist(), self.padded.tolist())),
            smallest=int(self.smallest) if self.batches else 0,
            largest=self.largest,
            over_budget=self.over,
        )
