"""The micro-batches of a stream's window: by a cost or a predicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.cut import arrange
from torchbudget.plan.dealing import Dealing, split_to
from torchbudget.plan.groups import Labels
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import WindowKey, solve, without_last

# `should_add(batch, sample)`; the batch holds at least one sample.
ShouldAdd: TypeAlias = Callable[[list[Any], Any], bool]


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
