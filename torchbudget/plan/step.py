"""`plan_step`: the micro-batches of one step whose samples are already in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, called_as
from torchbudget.cost.protocol import CostModel, IntArray
from torchbudget.plan.check_cost import check_cost
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.least_time import with_least_time
from torchbudget.plan.order import Order
from torchbudget.plan.oversize import Oversize
from torchbudget.plan.report import PlanReport, plan_report
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.shapes import fitted
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import solve
from torchbudget.units import Amount


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The micro-batches of one step.

    Attributes:
        micro_batches: for each rank, its micro-batches as lists of indices in `sizes`; the same
            number on every rank, the costliest first.
        inverse: puts results back into the order of `sizes`, shape `(n,)`. Join the results of all
            micro-batches of rank 0, then of rank 1, and so on, along the first axis:
            `joined[inverse]` are the results in the order of the samples, without skipped ones.
        skipped_samples: indices of samples that are over the budget alone and are in no
            micro-batch, with `oversize="skip"`; shape `(k,)`.
        size_multiple: padded sizes are multiples of it; `PadCollate(size_multiple=step)` reads it,
            and the shapes.
        shapes: pairs (n, L) of rows and padded length; empty without `max_shapes`.
    """

    micro_batches: list[list[list[int]]]
    inverse: IntArray
    skipped_samples: IntArray
    size_multiple: int
    shapes: tuple[tuple[int, int], ...]
    _report: Callable[[], PlanReport] = field(repr=False)

    def __repr__(self) -> str:
        ranks, each = len(self.micro_batches), len(self.micro_batches[0])
        counts = f"{each:,} micro-batches on each of {ranks} ranks"
        return f"<StepPlan: {len(self.inverse):,} samples, {counts}>"

    def report(self) -> PlanReport:
        """Report the fill, padding and imbalance of the step."""
        return self._report()


@called_as("plan_step(sizes, cost, budget, …), with a cost such as PaddedCost")
def plan_step(
    sizes: npt.ArrayLike,
    cost: CostModel,
    budget: MemoryBudget | int | str,
    *,
    num_replicas: int = 1,
    micro_batches_multiple: int = 1,
    max_batch_size: int | None = None,
    batch_size_multiple: int = 1,
    size_multiple: int = 1,
    limits: Sequence[tuple[CostModel, Amount]] = (),
    groups: npt.ArrayLike | None = None,
    units: Any = None,
    max_shapes: int | Sequence[tuple[int, int]] | None = None,
    time: CostModel | None = None,
    oversize: Oversize = "raise",
) -> StepPlan:
    """Cut samples that are in memory into micro-batches that fit a budget, evenly over ranks.

    For reinforcement learning, and other loops that know their samples before each step. All ranks
    that call it with the same arguments get the same plan; it uses no random numbers.

    Args:
        sizes: sizes of the step's samples, non-negative ints, shape `(N,)` or `(N, d)`.
        cost: bytes of a micro-batch, as in `MemoryBudgetBatchSampler`.
        budget: budget of a micro-batch, as in `MemoryBudgetBatchSampler`.
        num_replicas: ranks that share the step. They get equal numbers of micro-batches, with sums
            of costs as equal as possible.
        micro_batches_multiple: the number of micro-batches on each rank is a multiple of it, as
            pipeline schedules need.
        max_batch_size: largest number of samples in a micro-batch.
        batch_size_multiple: numbers of samples are multiples of it, unless fewer fit or are left,
            or a micro-batch is split so that all ranks get equally many.
        size_multiple: padded sizes are rounded up to a multiple of it.
        limits: further caps, as in `MemoryBudgetBatchSampler`.
        groups: one label for each sample, ints or text, shape `(N,)`. No micro-batch has samples of
            two groups; ranks may have different groups at the same time.
        units: one label for each sample, as `groups`. The samples of a label, a unit, stay on one
            rank; with a pair `(labels, "micro_batch")` in one micro-batch.
        max_shapes: padded batches take at most this number of shapes, or these shapes, and all
            ranks have the same one in each round, as in `MemoryBudgetBatchSampler`.
        time: cost model of a micro-batch's time, in any unit: the step is cut into the
            micro-batches that take the least time, and not into the fewest, and its sums over the
            ranks are made as equal as possible. If n samples take no less time together than one
            by one, it only balances; so does a `PackedCost` for packed samples. Default: the
            measured time of the cost, if it has one; else none, and ranks are balanced by `cost`.
        oversize: a sample that alone exceeds the budget raises an error (`"raise"`), is skipped
            (`"skip"`) or gets a micro-batch of its own (`"alone"`). The same holds for a unit of
            one micro-batch.

    Returns:
        The plan. O(N log N).

    Raises:
        SizesError: sizes of a wrong shape, type or sign.
        CostError: a cost that is not vectorised, or whose capacity does not fit the budget.
        BudgetError: the budget does not limit the device.
        OversizeError: a sample is over the budget and `oversize="raise"`.
        OptionError: an invalid option or combination of options.
        UnevenRanksError: too few samples for equal numbers of micro-batches; the message says how
            many are needed.

    >>> from torchbudget import PaddedCost, plan_step
    >>> step = plan_step([3, 9, 4, 8, 1, 2], PaddedCost(unit_bytes=1), 18, num_replicas=2)
    >>> step.micro_batches
    [[[1, 3]], [[2, 0, 5, 4]]]
    >>> import numpy as np
    >>> joined = np.array(sum((batch for rank in step.micro_batches for batch in rank), []))
    >>> joined[step.inverse].tolist()
    [0, 1, 2, 3, 4, 5]
    """
    table = SizeTable.of(sizes)
    rules = BatchRules.of(
        cost,
        budget,
        limits=limits,
        size_multiple=size_multiple,
        max_batch_size=max_batch_size,
        batch_size_multiple=batch_size_multiple,
        time=time,
        max_shapes=max_shapes,
    )
    check_cost(rules, table.values, table.largest)
    ranks = Dealing(
        number=at_least_one("num_replicas", num_replicas),
        even_sums=True,
        multiple=at_least_one("micro_batches_multiple", micro_batches_multiple),
    )
    options = {"groups": groups, "units": units, "shuffle": False}
    order = Order.of(table, rules, oversize, apart=False, **options)
    rules = fitted(rules, table.values, order.skipped)
    kept = order.indices((0, 0), 0, len(order))
    values, labels = table.values[kept], order.labels.take(kept)
    rules, strips = with_least_time(rules, [(values, labels)], ranks, None)
    block = solve(rules, values[None], ranks, strips=strips, labels=labels)
    indices = kept[block.samples].tolist()
    batches = [indices[start:stop] for start, stop in zip(block.starts, block.stops, strict=True)]
    micro_batches = [batches[rank :: ranks.number] for rank in range(ranks.number)]
    joined = [index for mine in micro_batches for batch in mine for index in batch]
    inverse = np.argsort(np.array(joined, np.int64))
    report = partial(plan_report, [block], table, rules, ranks, order)
    of_collate = rules.size_multiple, rules.shapes
    return StepPlan(micro_batches, inverse, order.skipped, *of_collate, report)
