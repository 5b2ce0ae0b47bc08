"""The report of a planned epoch: fill, padding, numbers and imbalance of its micro-batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchbudget.cost.measured import OfWays
from torchbudget.cost.surface import Surface
from torchbudget.display import aligned
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.order import Order
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import Block, over_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """How much the micro-batches of an epoch use of one limit.

    Attributes:
        name: `"cost"` for the budget, `"max_batch_size"`, or the position in `limits`.
        amount: the limit, with its unit, for people.
        fill: mean amount of a micro-batch / the limit.
        ended: share of the micro-batches in which this limit is the fullest one.
    """

    name: str
    amount: str
    fill: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Figures of a planned epoch; `print` shows them as a table.

    Attributes:
        batches: number of micro-batches of all ranks.
        samples: number of samples in these micro-batches.
        fill: mean predicted bytes of a micro-batch / budget.
        limits: the use of each limit, the budget first.
        elements: padded elements of all batches, a sum over all axes.
        padding: share of the batches' elements that are padding, over all axes; NaN if the batches
            of a stream do not know their lengths.
        axis_padding: the same share for each ragged axis.
        smallest: smallest number of samples in a micro-batch.
        largest: largest number of samples in a micro-batch.
        over_budget: number of micro-batches whose predicted bytes exceed the budget.
        steps: number of optimizer steps of each rank.
        ranks: number of ranks.
        skipped: number of samples that alone exceed the budget and are never drawn.
        windows: number of windows of the epoch; 0 for a stream.
        imbalance: Σ over steps of the costliest rank's bytes / Σ of the ranks' mean bytes; 1 is
            even. With `time=`, the same in the unit of that model.
        fullest: bytes of the fullest micro-batch / budget.
        epoch_s: predicted seconds of all micro-batches on the slowest rank of each step, by the
            measured time of the cost; `None`: the plan has another time, or none.
        dropped: number of samples that `drop_last` drops.
        masked_rows: number of rows without a sample, with `max_shapes`; `None` without it.
        passes: over each source of a mixture, from its first sample to the end of the epoch.
    """

    batches: int
    samples: int
    fill: float
    limits: tuple[LimitUse, ...]
    elements: int
    padding: float
    axis_padding: tuple[float, ...]
    smallest: int
    largest: int
    over_budget: int
    steps: int
    ranks: int
    skipped: int
    windows: int = 0
    imbalance: float = 1.0
    fullest: float = 0.0
    epoch_s: float | None = None
    dropped: int = 0
    masked_rows: int | None = None
    passes: Mapping[Any, float] = field(default_factory=dict)

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Return the table as text: a name and a value in each row."""
        axes = [f"{share:.1%}" for share in self.axis_padding]
        each = self.samples / max(self.steps, 1)
        by_axis = f" ({', '.join(axes)} by axis)" if len(axes) > 1 else ""
        on_ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        seconds = self.epoch_s or 0.0
        time = f"{seconds:,.1f} s, {seconds / max(self.steps, 1):.3g} s a step"
        left_out = f"{self.dropped:,} dropped, {self.skipped:,} skipped"
        rows = [
            ("micro-batches", f"{self.batches:,}{on_ranks}"),
            ("samples", f"{self.samples:,}, {self.smallest:,} to {self.largest:,} in a batch"),
            ("optimizer steps", f"{self.steps:,} of {each:,.1f} samples" if self.windows else ""),
            *(self._row(limit) for limit in self.limits),
            ("fullest micro-batch", f"{self.fullest:.1%} of the budget" if seconds else ""),
            ("predicted time", time if seconds else ""),
            ("padded elements", f"{self.elements:,}"),
            ("padding of elements", f"{self.padding:.1%}{by_axis}"),
            ("masked rows", f"{self.masked_rows:,}" if self.masked_rows is not None else ""),
            ("batches over budget", f"{self.over_budget:,}" if self.over_budget else ""),
            ("imbalance of ranks", f"{self.imbalance:.4f}" if on_ranks and self.windows else ""),
            ("samples left out", left_out if self.dropped or self.skipped else ""),
            *((f"passes over {name}", f"{passes:.3g}") for name, passes in self.passes.items()),
        ]
        return [(name, text) for name, text in rows if text]

    def _row(self, limit: LimitUse) -> tuple[str, str]:
        if limit.name == "cost":
            name, fill = "fill of the budget", f"{limit.fill:.1%}"
        else:
            name, fill = f"fill of {limit.name}", f"{limit.fill:.1%} of {limit.amount}"
        ended = f", ended {limit.ended:.1%} of the batches" if len(self.limits) > 1 else ""
        return name, fill + ended

    def __str__(self) -> str:
        """A table for people."""
        return "\n".join(aligned(self.rows))


def plan_report(
    blocks: Iterable[Block],
    sizes: SizeTable,
    rules: BatchRules,
    ranks: Dealing,
    order: Order,
) -> PlanReport:
    """Sum up the micro-batches of an epoch block by block, in constant memory; O(samples).

    Args:
        blocks: all windows of the epoch.
        sizes: sizes of the data set.
        rules: the cost, the budget and the options of a micro-batch.
        ranks: ranks that share each window.
        order: the order of the epoch, for the samples that are left out.
    """
    batches = samples = over_budget = largest = steps = windows = 0
    smallest = np.iinfo(np.int64).max
    costliest = mean = fullest = 0.0
    caps = [limit for limit in rules.limits if limit.name != "max_shapes"]
    used, ended = np.zeros(len(caps)), np.zeros(len(caps))
    amounts = np.array([max(limit.amount, 1) for limit in caps], np.float64)
    all_rows = 0
    real, padded = np.zeros(sizes.axes), np.zeros(sizes.axes)
    for block in blocks:
        taken = block.stops - block.starts
        batches += len(taken)
        samples += int(taken.sum())
        smallest, largest = min(smallest, int(taken.min())), max(largest, int(taken.max()))
        uses = np.array([block.used(rules, limit) for limit in caps])
        over_budget += int(np.count_nonzero(uses[0] > rules.budget_bytes))
        fullest = max(fullest, float(uses[0].max() / amounts[0]))
        used += uses.sum(axis=1, dtype=np.float64)
        nearest = (uses / amounts[:, None]).argmax(axis=0)
        ended += np.bincount(nearest, minlength=len(amounts))
        own = block.sizes.reshape(len(block.sizes), -1)
        real += own.sum(axis=0, dtype=np.float64)
        if rules.packing is None:
            rows, longest = rules.shaped(taken, taken)[0], block.amounts(rules)
            all_rows += int(rows.sum())
            padded += (longest.astype(np.float64) * rows[:, None]).sum(axis=0)
        else:
            totals = over_runs(np.add, rules.padded(own), block.starts)
            padded += rules.packing.padded_totals(totals).sum(axis=0, dtype=np.float64)
        work = block.costs(rules, rules.work).reshape(-1, ranks.number).astype(np.float64)
        if ranks.even_sums:  # a window is one step
            work = np.add.reduceat(work, np.cumsum(block.rounds) - block.rounds, axis=0)
        steps += len(work)
        windows += len(block.rounds)
        costliest += float(work.max(axis=1).sum())
        mean += float(work.mean(axis=1).sum())
    fills = (used / (max(batches, 1) * amounts)).tolist()
    shares = (ended / max(batches, 1)).tolist()
    limits = [
        LimitUse(name=limit.name, amount=limit.text(limit.amount), fill=fill, ended=share)
        for limit, fill, share in zip(caps, fills, shares, strict=True)
    ]
    return PlanReport(
        batches=batches,
        samples=samples,
        fill=fills[0],
        limits=tuple(limits),
        elements=int(padded.sum()),
        padding=_padding(real.sum(), padded.sum()),
        axis_padding=tuple(map(_padding, real.tolist(), padded.tolist())),
        smallest=smallest if batches else 0,
        largest=largest,
        over_budget=over_budget,
        steps=steps,
        windows=windows,
        ranks=ranks.number,
        imbalance=costliest / mean if mean else 1.0,
        fullest=fullest,
        epoch_s=costliest / 1e9 if isinstance(rules.time, (Surface, OfWays)) else None,
        dropped=0 if order.endless else order.samples - samples,
        skipped=len(order.skipped),
        masked_rows=all_rows - samples if rules.shapes else None,
    )


@dataclass(slots=True)
class ReadBatches:
    """The batches of a stream that a loop has read, summed up.

    Attributes:
        shapes: number of batches of each shape (number of samples, padded size).
        real: elements without padding; NaN if a batch does not know its lengths.
    """

    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    real: float = 0.0

    def report(self, rules: BatchRules, ranks: int, skipped: int) -> PlanReport:
        """Return the report of these batches, which one rank has read; O(shapes).

        Args:
            rules: the rules that they were planned by.
            ranks: the number of ranks.
            skipped: samples that were skipped.
        """
        rows, times = np.array([*self.shapes]), np.array([*self.shapes.values()])
        n, sizes = rows[:, 0], rows[:, 1:]
        elements = int((sizes.sum(axis=1) * times * (n if rules.packing is None else 1)).sum())
        if rules.packing is not None:
            sizes = -(-sizes // n[:, None])
        used = rules.costs(rules.cost, n, sizes if sizes.shape[1] > 1 else sizes[:, 0])
        batches = int(times.sum())
        fill = float((used * times).sum() / (batches * rules.budget_bytes))
        cap, padding = rules.limits[0], _padding(self.real, elements)
        use = LimitUse(name=cap.name, amount=cap.text(cap.amount), fill=fill, ended=1.0)
        return PlanReport(
            batches=batches,
            samples=int((n * times).sum()),
            fill=fill,
            limits=(use,),
            elements=elements,
            padding=padding,
            axis_padding=(padding,),
            smallest=int(n.min()),
            largest=int(n.max()),
            over_budget=int(times[used > rules.budget_bytes].sum()),
            steps=batches,
            ranks=ranks,
            skipped=skipped,
        )


def _padding(real: float, padded: float) -> float:
    return float(1 - real / padded) if padded else 0.0
