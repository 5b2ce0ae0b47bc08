"""What a planned epoch holds, beside fixed-size batches of the same worst case."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from torchbudget.plan.dealing import Ranks
from torchbudget.plan.order import Order
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import Block

_CHUNK = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFigures:
    """Figures of an epoch's batches.

    Attributes:
        batches: how many, on all ranks together.
        samples: in them.
        fill: mean predicted bytes of a batch / budget.
        padding: share of the batches' elements that are padding, over all axes.
        axis_padding: the same for each ragged axis.
        smallest: the least number of samples in a batch.
        largest: the largest number.
        over_budget: batches whose predicted bytes exceed the budget.
    """

    batches: int
    samples: int
    fill: float
    padding: float
    axis_padding: tuple[float, ...]
    smallest: int
    largest: int
    over_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A planned epoch, to be printed or read.

    Attributes:
        plan: the planned micro-batches.
        fixed: what batches of one fixed number of samples would be, the largest number that fits
            the budget whatever the sizes, over the same samples in random order.
        steps: optimizer steps of each rank.
        ranks: how many ranks.
        imbalance: Σ over steps of the costliest rank's bytes / Σ of the mean rank's: 1 is even.
            With `balance=`, of what that model says.
        dropped: positions of the epoch that `drop_last` drops.
        skipped: samples that are over the budget alone and are never drawn.
    """

    plan: BatchFigures
    fixed: BatchFigures
    steps: int
    ranks: int
    imbalance: float
    dropped: int
    skipped: int

    def __str__(self) -> str:
        """A table for people."""
        rows = [
            ("", "torchbudget", f"fixed batches of {self.fixed.largest}"),
            ("batches", f"{self.plan.batches:,}", f"{self.fixed.batches:,}"),
            ("samples in a batch", _range(self.plan), _range(self.fixed)),
            ("fill of the budget", f"{self.plan.fill:.1%}", f"{self.fixed.fill:.1%}"),
            ("padding", f"{self.plan.padding:.1%}", f"{self.fixed.padding:.1%}"),
            ("batches over budget", f"{self.plan.over_budget:,}", f"{self.fixed.over_budget:,}"),
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        lines.append(
            f"{self.plan.samples:,} samples in {self.steps:,} steps on {self.ranks} rank(s), "
            f"imbalance {self.imbalance:.4f}, dropped {self.dropped:,}, skipped {self.skipped:,}"
        )
        return "\n".join(line.rstrip() for line in lines)


def _range(figures: BatchFigures) -> str:
    return f"{figures.smallest:,} to {figures.largest:,}"


class _Tally:
    """Sums over batches."""

    def __init__(self, sizes: SizeTable, rules: BatchRules) -> None:
        self.rules = rules
        self.batches = self.samples = self.over = self.largest = 0
        self.smallest = np.iinfo(np.int64).max
        self.cost = 0.0
        self.real = np.zeros(sizes.axes)
        self.padded = np.zeros(sizes.axes)

    def add(self, block: Block) -> None:
        """Count the micro-batches of a block."""
        taken, sizes = block.stops - block.starts, block.sizes
        costs = block.costs(self.rules, self.rules.cost)
        self.batches += len(taken)
        self.samples += int(taken.sum())
        self.smallest = min(self.smallest, int(taken.min()))
        self.largest = max(self.largest, int(taken.max()))
        self.over += int(np.count_nonzero(costs > self.rules.budget_bytes))
        self.cost += float(costs.sum(dtype=np.float64))
        axes = len(self.real)
        self.real += sizes.reshape(-1, axes).sum(axis=0, dtype=np.float64)
        if self.rules.packing is not None:
            self.padded += self.rules.padded(sizes).reshape(-1, axes).sum(axis=0, dtype=np.float64)
        else:
            elements = self.rules.padded(block.padded()).reshape(-1, axes).astype(np.float64)
            self.padded += (elements * taken[:, None]).sum(axis=0)

    def figures(self) -> BatchFigures:
        def share(real: float, padded: float) -> float:
            return float(1 - real / padded) if padded else 0.0

        return BatchFigures(
            batches=self.batches,
            samples=self.samples,
            fill=self.cost / (self.batches * self.rules.budget_bytes) if self.batches else 0.0,
            padding=share(self.real.sum(), self.padded.sum()),
            axis_padding=tuple(map(share, self.real.tolist(), self.padded.tolist())),
            smallest=int(self.smallest) if self.batches else 0,
            largest=self.largest,
            over_budget=self.over,
        )


def plan_report(
    blocks: Iterable[Block],
    sizes: SizeTable,
    rules: BatchRules,
    ranks: Ranks,
    order: Order,
    epoch: int,
) -> PlanReport:
    """Sum up the micro-batches of an epoch block by block, in constant memory."""
    tally = _Tally(sizes, rules)
    steps, costliest, mean = 0, 0.0, 0.0
    for block in blocks:
        tally.add(block)
        per_step = block.costs(rules, rules.work).reshape(-1, ranks.number).astype(np.float64)
        if ranks.even_sums:
            per_step = np.add.reduceat(per_step, np.cumsum(block.rounds) - block.rounds, axis=0)
        steps += len(per_step)
        costliest += float(per_step.max(axis=1).sum())
        mean += float(per_step.mean(axis=1).sum())
    return PlanReport(
        plan=tally.figures(),
        fixed=_fixed(sizes, rules, order, epoch),
        steps=steps,
        ranks=ranks.number,
        imbalance=costliest / mean if mean else 1.0,
        dropped=len(order) - tally.samples,
        skipped=len(order.skipped),
    )


def _fixed(sizes: SizeTable, rules: BatchRules, order: Order, epoch: int) -> BatchFigures:
    """Batches of the one size that fits whatever it draws."""
    tally, drawn, positions = _Tally(sizes, rules), order.epoch(epoch), len(order)
    fits = rules.rounded(rules.capacity(sizes.largest, rules.budget_bytes))
    number = min(int(fits), positions)
    stretch = max(_CHUNK // number, 1) * number
    for start in range(0, positions, stretch):
        chunk = sizes.values[drawn.indices(start, min(start + stretch, positions))]
        starts = np.arange(0, len(chunk), number)
        stops = np.append(starts[1:], len(chunk))
        none = starts[:0]
        tally.add(Block(samples=none, sizes=chunk, starts=starts, stops=stops, rounds=none))
    return tally.figures()
