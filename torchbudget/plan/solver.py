"""Windows of one length, cut into micro-batches and dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import AdditiveCost, IntArray
from torchbudget.plan.arrange import arrange
from torchbudget.plan.cut import cut
from torchbudget.plan.dealing import deal, lowest_budget, split_to
from torchbudget.plan.pack import pack
from torchbudget.plan.permutation import WordArray
from torchbudget.plan.rules import BatchRules


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Micro-batches of one or more windows, in the order in which the ranks take them.

    Attributes:
        samples: places in the given sizes, taken window after window, grouped by micro-batch:
            shape `(windows·S,)`.
        sizes: the samples' sizes in that order, shape `(windows·S,)` or `(windows·S, d)`.
        starts: where each micro-batch starts in `samples`, shape `(micro-batches,)`; window by
            window, in a window round by round, in a round rank by rank.
        stops: where it ends.
        rounds: micro-batches of each window on each rank, shape `(windows,)`.
    """

    samples: IntArray
    sizes: npt.NDArray[Any]
    starts: IntArray
    stops: IntArray
    rounds: IntArray

    def costs(self, rules: BatchRules) -> IntArray:
        """Predicted bytes of each micro-batch, shape `(micro-batches,)`."""
        return run_costs(self.sizes, self.starts, self.stops, rules)

    def work(self, rules: BatchRules) -> IntArray:
        """What ranks are balanced by, of each micro-batch, shape `(micro-batches,)`."""
        return run_work(self.sizes, self.starts, self.stops, rules)

    def padded(self) -> npt.NDArray[Any]:
        """The largest size on every axis in each micro-batch, before rounding."""
        return _over_runs(np.maximum, self.sizes, self.starts)


def _over_runs(reduce: np.ufunc, values: npt.NDArray[Any], starts: IntArray) -> npt.NDArray[Any]:
    """Reduce over runs that tile `values`, for starts in any order."""
    ascending = np.argsort(starts)
    reduced = reduce.reduceat(values, starts[ascending], axis=0)
    out = np.empty_like(reduced)
    out[ascending] = reduced
    return out


def run_costs(
    sizes: npt.NDArray[Any], starts: IntArray, stops: IntArray, rules: BatchRules
) -> IntArray:
    """Predicted bytes of runs of samples that tile `sizes`, shape `(runs,)`."""
    if rules.packing is not None:
        items = rules.packing.item_bytes(rules.padded(sizes))
        return rules.packing.base_bytes + _over_runs(np.add, items, starts)
    padded = rules.padded(_over_runs(np.maximum, sizes, starts))
    return rules.cost.batch_bytes(stops - starts, padded)


def run_work(
    sizes: npt.NDArray[Any], starts: IntArray, stops: IntArray, rules: BatchRules
) -> IntArray:
    """What ranks are balanced by, of runs of samples that tile `sizes`, shape `(runs,)`."""
    if rules.balance is None:
        return run_costs(sizes, starts, stops, rules)
    padded = rules.padded(_over_runs(np.maximum, sizes, starts))
    return rules.balance.batch_bytes(stops - starts, padded)


class _Cutter:
    """One arrangement of some windows, to be cut under any budget.

    Attributes:
        samples: places in the given sizes, shape `(windows·S,)`, window after window.
        sizes: of those samples, shape `(windows, S)` or `(windows, S, d)`.
    """

    def __init__(
        self,
        sizes: npt.NDArray[Any],
        rules: BatchRules,
        strips: int,
        keys: npt.NDArray[Any] | None = None,
    ) -> None:
        self._rules = rules
        windows, length = sizes.shape[:2]
        order = arrange(sizes if keys is None else keys, strips)
        order += np.arange(windows)[:, None] * length
        self.samples = order.reshape(-1)
        flat = sizes.reshape(windows * length, *sizes.shape[2:])
        self.sizes = flat.take(self.samples, axis=0, mode="clip").reshape(sizes.shape)

    def starts(self, budget_bytes: IntArray) -> IntArray:
        """Where the micro-batches start, as `cut` gives it."""
        return cut(self.sizes, self._rules, budget_bytes)

    def settle(self, budget_bytes: IntArray) -> IntArray:
        """Cut under the final budget; `samples` and `sizes` then stand in the order of the cut."""
        return self.starts(budget_bytes)


class _Packer(_Cutter):
    """The samples of one window, to be packed under any budget."""

    def __init__(self, sizes: npt.NDArray[Any], rules: BatchRules, packing: AdditiveCost) -> None:
        def item_bytes(sizes: npt.NDArray[Any]) -> IntArray:
            return packing.item_bytes(rules.padded(sizes))

        # Along one axis bytes rise with the size, and are needed of the distinct sizes only.
        keys = None if sizes.ndim == 2 else item_bytes(sizes)
        super().__init__(sizes, rules, strips=1, keys=keys)
        kinds = self.sizes[0] if keys is None else keys[0, self.samples]
        first = np.flatnonzero(np.append(True, kinds[1:] != kinds[:-1]))
        self._base = packing.base_bytes
        self._items = item_bytes(self.sizes[0, first])
        self._counts = np.diff(first, append=len(kinds))

    def starts(self, budget_bytes: IntArray) -> IntArray:
        """Where the bins start once the samples are grouped by bin, shape `(bins, 1)`."""
        return self._packed(budget_bytes)[1]

    def settle(self, budget_bytes: IntArray) -> IntArray:
        """Pack under the final budget; `samples` and `sizes` are then grouped by bin."""
        grouped, starts = self._packed(budget_bytes)
        self.samples = self.samples.take(grouped, mode="clip")
        self.sizes = self.sizes.take(grouped, axis=1, mode="clip")
        return starts

    def _packed(self, budget_bytes: IntArray) -> tuple[IntArray, IntArray]:
        room = int(budget_bytes[0]) - self._base
        grouped, starts = pack(self._items, self._counts, room, self._rules.max_batch_size)
        return grouped, starts[:, None]


def best_strips(sizes: npt.NDArray[Any], rules: BatchRules) -> int:
    """How many strips per axis give the fewest micro-batches, by trying powers of √2.

    From 1, which sorts by the last axis alone, to as many as there are samples, which sorts by the
    first one alone: where one axis decides the cost, an end is best. Where several do, the middle
    is.

    Args:
        sizes: of a window's samples, shape `(S,)` or `(S, d)`.
        rules: what a micro-batch may be.

    Returns:
        The number of strips, 1 for one axis and for packing, which have none.
    """
    length = len(sizes)
    if sizes.ndim == 1 or rules.packing is not None:
        return 1
    tried = sorted({round(2 ** (power / 2)) for power in range(2 * length.bit_length() + 1)})
    arranged = np.stack([sizes[arrange(sizes[None], strips)[0]] for strips in tried])
    starts = cut(arranged, rules, np.full(len(tried), rules.budget_bytes))
    fewest = int(np.count_nonzero(starts < length, axis=0).argmin())
    return tried[fewest]


def solve(
    sizes: npt.NDArray[Any],
    rules: BatchRules,
    *,
    strips: int = 1,
    ranks: int = 1,
    even_sums: bool = False,
    keys: Callable[[int], WordArray] | None = None,
) -> Block:
    """Cut windows into micro-batches and deal them.

    Args:
        sizes: shape `(windows, S)` or `(windows, S, d)`; a single window if the rules pack.
        rules: what a micro-batch may be.
        strips: see `arrange`.
        ranks: how many ranks share each window.
        even_sums: see `deal`.
        keys: gives words of shape `(windows, rounds)` that the rounds of each window are shuffled
            by; `None`: the longest (for several ranks the costliest) first.

    Raises:
        UnevenRanksError: a window cannot be dealt evenly.
    """
    windows, length = sizes.shape[:2]
    cutter = (
        _Cutter(sizes, rules, strips)
        if rules.packing is None
        else _Packer(sizes, rules, rules.packing)
    )
    budget = np.full(windows, rules.budget_bytes)
    if ranks > 1:
        budget, target = lowest_budget(
            cutter.starts,
            low=rules.cost.batch_bytes(1, rules.padded(sizes.min(axis=1))),
            high=rules.budget_bytes,
            length=length,
            ranks=ranks,
        )
        starts = _split(cutter.settle(budget).T, target, cutter.sizes, rules)
    else:
        starts = cutter.settle(budget).T
    flat_sizes = cutter.sizes.reshape(-1, *sizes.shape[2:])
    counts = np.count_nonzero(starts < length, axis=1)
    real = np.arange(starts.shape[1]) < counts[:, None]
    stops = np.append(starts[:, 1:], np.full((windows, 1), length), axis=1)
    first = np.arange(windows)[:, None] * length
    if ranks > 1:
        costs = np.full(starts.shape, -1)
        costs[real] = run_work(flat_sizes, (starts + first)[real], (stops + first)[real], rules)
        rounds = deal(costs, ranks, even_sums=even_sums)
    else:
        rounds = np.broadcast_to(np.arange(starts.shape[1])[:, None], (*starts.shape, 1))
    taken = counts // ranks
    if keys is not None:
        words = keys(rounds.shape[1])
        words[np.arange(rounds.shape[1]) >= taken[:, None]] = np.iinfo(np.uint64).max
        shuffled = np.argsort(words, axis=1, kind="stable")
        rounds = np.take_along_axis(rounds, shuffled[..., None], axis=1)
    number = rounds.reshape(windows, -1)
    pick = partial(np.take_along_axis, indices=number, axis=1)
    return Block(
        samples=cutter.samples,
        sizes=flat_sizes,
        starts=pick(starts + first)[real],
        stops=pick(stops + first)[real],
        rounds=taken,
    )


def _split(
    starts: IntArray, target: IntArray, sizes: npt.NDArray[Any], rules: BatchRules
) -> IntArray:
    """Split micro-batches wherever a window has fewer than its target.

    Args:
        starts: shape `(windows, micro-batches)`, filled with S.
        target: shape `(windows,)`.
        sizes: as they are cut, shape `(windows, S)` or `(windows, S, d)`.
        rules: what a micro-batch may be.

    Returns:
        Shape `(windows, max(target))`, filled with S.
    """
    windows, length = sizes.shape[:2]
    out = np.full((windows, int(target.max())), length)
    for window in range(windows):
        mine = starts[window][starts[window] < length]
        if len(mine) < target[window]:
            stops = np.append(mine[1:], length)
            costs = run_costs(sizes[window], mine, stops, rules)
            mine = np.array(
                split_to(
                    mine.tolist(),
                    length,
                    costs.tolist(),
                    int(target[window]),
                    multiple=rules.batch_size_multiple,
                )
            )
        out[window, : len(mine)] = mine
    return out
