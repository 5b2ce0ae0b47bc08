"""What a planned epoch holds, beside what people otherwise do under the same worst case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchbudget.plan.advice import Advice
from torchbudget.plan.alternatives import TokenLimit, fixed_batches, fixed_number
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.order import Order
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import Block
from torchbudget.plan.tally import BatchFigures, Tally
from torchbudget.tables import aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A planned epoch, to be printed or read.

    Attributes:
        plan: the planned micro-batches.
        fixed: what batches of one fixed number of samples would be, the largest number that fits
            the budget whatever the sizes, over the same samples in random order.
        grouped: the same number, of samples that were sorted by size 50 batches at a time; None
            for packed batches, which have no padding to save.
        token_limit: batches of at most `tokens` elements, padding included, cut from the same
            windows; None of several axes, or where no such limit keeps the budget.
        tokens: the largest number of elements of which no batch is over the budget.
        steps: optimizer steps of each rank.
        windows: how many the epoch has, each cut by itself.
        ranks: how many ranks.
        imbalance: Σ over steps of the costliest rank's bytes / Σ of the mean rank's: 1 is even.
            With `balance=`, of what that model says.
        dropped: positions of the epoch that `drop_last` drops.
        skipped: samples that are over the budget alone and are never drawn.
        advice: what would fill the budget better, the best first; each was tried out.
    """

    plan: BatchFigures
    fixed: BatchFigures
    grouped: BatchFigures | None
    token_limit: BatchFigures | None
    tokens: int | None
    steps: int
    windows: int
    ranks: int
    imbalance: float
    dropped: int
    skipped: int
    advice: tuple[Advice, ...] = ()

    @property
    def compared(self) -> dict[str, BatchFigures]:
        """The plan and what it is compared with, by a name for people."""
        number = self.fixed.largest
        found = {
            "torchbudget": self.plan,
            f"fixed batches of {number}": self.fixed,
            f"{number} of similar length": self.grouped,
            f"at most {self.tokens or 0:,} tokens": self.token_limit,
        }
        return {name: figures for name, figures in found.items() if figures is not None}

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The table as text: a row of headings, and one for each figure."""
        compared = self.compared
        return [
            ("", *compared),
            *((name, *map(cell, compared.values())) for name, cell in _ROWS.items()),
        ]

    @property
    def remarks(self) -> tuple[str, str]:
        """Why the rest of the budget is empty, and what the epoch has."""
        shares = self.plan.shares
        empty = (
            f"empty: {shares.no_room:.1%} no room for another sample, {shares.limited:.1%} option "
            f"limits, {shares.left_over:.1%} left over by windows"
        )
        epoch = (
            f"{self.plan.samples:,} samples in {self.steps:,} steps ({self.windows:,} windows) on "
            f"{self.ranks} rank(s), imbalance {self.imbalance:.4f}, dropped {self.dropped:,}, "
            f"skipped {self.skipped:,}"
        )
        return empty, epoch

    def __str__(self) -> str:
        """A table for people, where the budget goes, and what would help."""
        advice = (f"advice: {advice}" for advice in self.advice)
        return "\n".join([*aligned(self.rows), *self.remarks, *advice])


_ROWS: Final[dict[str, Callable[[BatchFigures], str]]] = {
    "batches": lambda figures: f"{figures.batches:,}",
    "samples in a batch": lambda figures: f"{figures.smallest:,} to {figures.largest:,}",
    "fill of the budget": lambda figures: f"{figures.fill:.1%}",
    "  by the model": lambda figures: f"{figures.shares.model:.1%}",
    "  by data": lambda figures: f"{figures.shares.data:.1%}",
    "  by padding": lambda figures: f"{figures.shares.padding:.1%}",
    "padding of elements": lambda figures: f"{figures.padding:.1%}",
    "batches over budget": lambda figures: f"{figures.over_budget:,}",
}


def plan_report(
    blocks: Iterable[Block],
    sizes: SizeTable,
    rules: BatchRules,
    ranks: Ranks,
    order: Order,
    epoch: int,
    *,
    window: int,
) -> PlanReport:
    """Sum up the micro-batches of an epoch block by block, in constant memory; O(samples)."""
    tally = Tally(sizes, rules)
    limited = TokenLimit.of(sizes, rules, order, window=window)
    steps, windows, costliest, mean = 0, 0, 0.0, 0.0
    for block in blocks:
        tally.add(block)
        if limited is not None:
            limited.add(block)
        per_step = block.costs(rules, rules.work).reshape(-1, ranks.number).astype(np.float64)
        if ranks.even_sums:
            per_step = np.add.reduceat(per_step, np.cumsum(block.rounds) - block.rounds, axis=0)
        steps += len(per_step)
        windows += len(block.rounds)
        costliest += float(per_step.max(axis=1).sum())
        mean += float(per_step.mean(axis=1).sum())
    number = fixed_number(sizes, rules, order)
    fixed, grouped = (
        fixed_batches(sizes, rules, order, epoch, number=number, grouped=sorted_first)
        for sorted_first in (False, True)
    )
    return PlanReport(
        plan=tally.figures(),
        fixed=fixed,
        grouped=grouped if rules.packing is None else None,
        token_limit=None if limited is None else limited.figures(),
        tokens=None if limited is None else limited.limit,
        steps=steps,
        windows=windows,
        ranks=ranks.number,
        imbalance=costliest / mean if mean else 1.0,
        dropped=len(order) - tally.samples,
        skipped=len(order.skipped),
    )
