"""Grouping of a stream's samples, window by window, into micro-batches: by cost or predicate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.check_cost import check_cost
from torchbudget.plan.cut import arrange
from torchbudget.plan.dealing import Ranks, split_to
from torchbudget.plan.groups import Labels
from torchbudget.plan.oversize import Oversize, oversized
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import WindowKey, solve, without_last

_TILE: Final = 8  # samples of several axes that lie together if there is no cost to choose by


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


_NONE: Final = Rounds(np.empty(0, np.int64), [], [])


@dataclass(frozen=True, slots=True)
class ByCost:
    """Micro-batches that fit the budget, as the sampler makes them.

    Attributes:
        rules: budget and options of a micro-batch.
        oversize: see `oversized`.
    """

    rules: BatchRules
    oversize: Oversize
    _checked: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def check(self, sizes: npt.NDArray[Any]) -> None:
        """Raise a `CostError` if the cost is no valid one for these sizes; once in each process."""
        if not self._checked:
            check_cost(self.rules, sizes, sizes.max(axis=0))
            self._checked.append(True)

    def oversized(self, sizes: npt.NDArray[Any], first: int) -> IntArray:
        """Places of the samples to skip, or an `OversizeError`; see `oversized`."""

        # Transforms make several samples of one item, or none, so that samples have no index.
        def called(place: int) -> str:
            return f"sample {place} of those that begin with item {first}"

        return oversized(sizes, self.rules, self.oversize, called)

    def rounds(
        self,
        samples: Sequence[Any],
        sizes: npt.NDArray[Any] | None,
        ranks: Ranks,
        *,
        key: WindowKey,
        drop_last: bool,
        groups: IntArray | None = None,
    ) -> Rounds:
        """Cut a window and deal it to the ranks.

        Args:
            samples: samples of the window.
            sizes: sizes of the samples.
            ranks: ranks that share the window.
            key: key of the order of the rounds.
            drop_last: leave out the micro-batch that could still have taken a sample.
            groups: number of each sample's group, shape `(S,)`; see `solve`.

        Raises:
            UnevenRanksError: the samples cannot be dealt evenly.
        """
        if sizes is None:
            raise TypeError("a cost needs sizes")
        places = np.arange(len(sizes))
        if drop_last and len(sizes):
            stays = without_last(self.rules, sizes, ranks, labels=Labels(groups))
            places, sizes = places[stays], sizes[stays]
            groups = None if groups is None else groups[stays]
        if not len(sizes):
            return _NONE
        if len(sizes) < ranks.number:
            raise UnevenRanksError(f"{len(sizes)} samples for {ranks.number} ranks")
        block = solve(self.rules, sizes[None], ranks, key, labels=Labels(groups))
        starts, stops = block.starts.tolist(), block.stops.tolist()
        return Rounds(places[block.samples], starts, stops, block.amounts(self.rules).tolist())


@dataclass(frozen=True, slots=True)
class ByPredicate:
    """Micro-batches that grow as long as a function says so.

    Attributes:
        should_add: `should_add(batch, sample)`; the batch holds at least one sample.
    """

    should_add: Callable[[list[Any], Any], bool]

    def check(self, sizes: npt.NDArray[Any]) -> None:
        """Nothing to check: there is no cost."""

    def oversized(self, sizes: npt.NDArray[Any], first: int) -> IntArray:
        """No samples: a predicate has no budget."""
        return np.empty(0, np.int64)

    def rounds(
        self,
        samples: Sequence[Any],
        sizes: npt.NDArray[Any] | None,
        ranks: Ranks,
        *,
        key: WindowKey,
        drop_last: bool,
        groups: IntArray | None = None,
    ) -> Rounds:
        """See `ByCost`: in the order of sizes if there are any, else as they come."""
        order = list(range(len(samples)))
        if sizes is not None and len(sizes):
            axes = sizes.shape[1] if sizes.ndim == 2 else 1
            strips = max(round((len(sizes) / _TILE) ** (1 / axes)), 1)
            order = arrange(sizes[None], strips)[0].tolist()
        runs: list[int] = []  # the number of samples in each
        batch: list[Any] = []
        for place in order:
            if runs and self.should_add(batch, samples[place]):
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
            raise UnevenRanksError(f"{length} samples for {number} ranks")
        counts = np.array(runs, np.int64)
        starts = split_to(np.cumsum(counts) - counts, length, counts, target)
        stops = np.append(starts[1:], length)[: len(starts)]
        starts, stops = starts.reshape(-1, number), stops.reshape(-1, number)
        if key.shuffle and len(starts):
            shuffled = np.argsort(key.words(np.array([len(starts)])))
            starts, stops = starts[shuffled], stops[shuffled]
        return Rounds(np.array(order, np.int64), starts.ravel().tolist(), stops.ravel().tolist())


Grouping: TypeAlias = ByCost | ByPredicate
