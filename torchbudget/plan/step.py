"""The micro-batches of samples in memory: of one step, by `plan_step`, or of a stream's window.

A stream's window is cut by a cost or by a predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, called_as
from torchbudget.cost.protocol import CostModel, IntArray
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.check_cost import check_cost, check_keeps_gradients
from torchbudget.plan.cut import arrange
from torchbudget.plan.dealing import Dealing, split_to
from torchbudget.plan.groups import Labels
from torchbudget.plan.least_time import with_least_time
from torchbudget.plan.order import Order
from torchbudget.plan.oversize import Oversize
from torchbudget.plan.report import PlanReport, plan_report
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.shapes import fitted
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import WindowKey, solve, without_last
from torchbudget.units import Amount

# `should_add(batch, sample)`; the batch holds at least one sample.
ShouldAdd: TypeAlias = Callable[[list[Any], Any], bool]


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
        cost: the cost that they are planned by.
    """

    micro_batches: list[list[list[int]]]
    inverse: IntArray
    skipped_samples: IntArray
    size_multiple: int
    shapes: tuple[tuple[int, int], ...]
    cost: CostModel = field(repr=False)
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
        CostError: a cost that is not vectorised, or whose capacity does not fit the budget; or a
            measured one without the gradients of earlier micro-batches.
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
    check_keeps_gradients(cost)
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
    rules = with_least_time(rules, [(values, labels)], ranks)
    block = solve(rules, values[None], ranks, labels=labels)
    indices = kept[block.samples].tolist()
    batches = [indices[start:stop] for start, stop in zip(block.starts, block.stops, strict=True)]
    micro_batches = [batches[rank :: ranks.number] for rank in range(ranks.number)]
    joined = [index for mine in micro_batches for batch in mine for index in batch]
    inverse = np.argsort(np.array(joined, np.int64))
    report = partial(plan_report, [block], table, rules, ranks, order)
    return StepPlan(
        micro_batches=micro_batches,
        inverse=inverse,
        skipped_samples=order.skipped,
        size_multiple=rules.size_multiple,
        shapes=rules.shapes,
        cost=rules.cost,
        _report=report,
    )


# ---------------------------------------------------------------------- a stream's window


class Rounds(NamedTuple):
    """The micro-batches of a window: rounds of one for each rank, one after the other.

    Attributes:
        places: places of the samples in the window, shape `(S,)`.
        starts: start of each micro-batch among them.
        stops: end of each micro-batch.
        padded_sizes: padded size of each micro-batch, of packed ones the sum; `None`: not planned.
    """

    places: IntArray
    starts: list[int]
    stops: list[int]
    padded_sizes: list[list[int]] | None = None


def rounds_by_cost(
    rules: BatchRules,
    sizes: npt.NDArray[Any],
    ranks: Dealing,
    key: WindowKey,
    *,
    drop_last: bool,
    groups: IntArray | None = None,
) -> Rounds:
    """Cut a window into micro-batches that fit the budget, and split it over the ranks.

    Args:
        rules: budget and options of a micro-batch.
        sizes: sizes of the samples.
        ranks: ranks that share the window.
        key: key of the order of the rounds.
        drop_last: leave out the micro-batch that could still have taken a sample.
        groups: number of each sample's group, shape `(S,)`; see `solve`.

    Raises:
        UnevenRanksError: the samples cannot be split evenly.
    """
    places, labels = np.arange(len(sizes)), Labels(groups)
    if drop_last and len(sizes):
        places = np.flatnonzero(without_last(rules, sizes, ranks, labels=labels))
        sizes, labels = sizes[places], labels.take(places)
    if not len(sizes):
        return Rounds(places, [], [])
    block = solve(rules, sizes[None], ranks, key, labels=labels)
    starts, stops = block.starts.tolist(), block.stops.tolist()
    return Rounds(places[block.samples], starts, stops, block.amounts(rules).tolist())


def rounds_by_predicate(
    should_add: ShouldAdd,
    samples: Sequence[Any],
    sizes: npt.NDArray[Any] | None,
    ranks: Dealing,
    key: WindowKey,
    *,
    drop_last: bool,
) -> Rounds:
    """Cut a window into micro-batches that grow as long as a function of batch and sample says so.

    The samples come in the order of sizes if there are any (of several axes, of their sums), else
    as they are. The other arguments and errors are those of `rounds_by_cost`.
    """
    order = list(range(len(samples)))
    if sizes is not None and len(sizes):
        order = arrange(sizes.reshape(1, len(sizes), -1).sum(axis=2), 1)[0].tolist()
    runs: list[int] = []  # the number of samples in each
    batch: list[Any] = []
    for place in order:
        if runs and should_add(batch, samples[place]):
            runs[-1] += 1
            batch.append(samples[place])
        else:
            runs.append(1)
            batch = [samples[place]]
    if drop_last and runs:
        del order[-runs.pop() :]
    number, length = ranks.number, len(order)
    target = -(-len(runs) // number) * number
    if target > length:
        raise UnevenRanksError(f"{length} samples are too few for {number} ranks")
    counts = np.array(runs, np.int64)
    starts = split_to(np.cumsum(counts) - counts, length, counts, target)
    stops = np.append(starts[1:], length)[: len(starts)]
    starts, stops = starts.reshape(-1, number), stops.reshape(-1, number)
    if key.shuffle and len(starts):
        shuffled = key.shuffled(np.array([len(starts)]))
        starts, stops = starts[shuffled], stops[shuffled]
    return Rounds(np.array(order, np.int64), starts.ravel().tolist(), stops.ravel().tolist())
