"""The window solver: sizes of windows in, micro-batches of every rank out.

Each window is arranged so that neighbours are alike, cut into runs that fit the budget, evened out
over the ranks, dealt to them, and its rounds are shuffled. Nothing is carried from one window to
the next: the solution is a function of the rules, the window's sizes, the ranks and its key.

How a window is cut (`arranged_windows`):

| samples              | class           | why                                                     |
|----------------------|-----------------|---------------------------------------------------------|
| padded, one axis     | `SortedWindows` | sorted, so that a run's first sample decides its length |
| padded, several axes | `TiledWindows`  | the maximum on each axis is searched over the run       |
| padded to few shapes | `RoundWindow`   | a round is one run, so that all ranks have one shape    |
| packed               | `PackedWindow`  | a sum counts, not an order: samples fill bins           |

How it is dealt to several ranks (`solve`):

| window                         | function       | why                                            |
|--------------------------------|----------------|------------------------------------------------|
| packed, without groups;        | `_dealt_first` | samples are dealt, and each rank's are cut:    |
| or units that stay on one rank |                | sums of samples are more even than sums of     |
|                                |                | micro-batches, and a unit has one rank         |
| all others                     | `_cut_first`   | micro-batches of a round are neighbours in the |
|                                |                | cut, so that ranks do alike work               |
| one step, one axis, no labels  | and `level`    | few long micro-batches cannot be dealt evenly: |
|                                |                | short samples fill the ranks up                |
| begun under another plan       | `_in_parts`    | a state has a second bit only for samples of   |
|                                |                | the part that was begun                        |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Final, TypeVar, cast

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import AdditiveCost, CostModel, IntArray
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cut import SortedWindows, TiledWindows, Windows, arrange
from torchbudget.plan.dealing import (
    Dealing,
    deal_rounds,
    least_rounds,
    level,
    lowest_budgets,
    split_to,
)
from torchbudget.plan.groups import NO_LABELS, Labels
from torchbudget.plan.pack import (
    PackedWindow,
    fewest_bins,
    grouped_by,
    of_items,
    parts_of,
    spread,
    work_of,
)
from torchbudget.plan.permutation import Purpose, random_words, shuffled_keys
from torchbudget.plan.rules import BatchRules, Limit
from torchbudget.plan.shapes import RoundWindow
from torchbudget.units import MAX_BYTES

# Samples of a window that decide how its axes are cut into strips.
_SURVEY: Final = 512
_ONE_RANK: Final = Dealing()

_Found = TypeVar("_Found", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class WindowKey:
    """The key by which the rounds of windows are shuffled, and ranks take turns.

    Attributes:
        seed: of all randomness.
        path: numbers that tell windows at the same place apart, such as the epoch and the pass.
        places: the position of each window's first sample, shape `(windows,)`.
        numbers: the number of each window, counted over passes, shape `(windows,)`.
        shuffle: put the rounds of a window in random order; otherwise the longest samples (for
            several ranks the costliest micro-batches) come first.
    """

    seed: int
    path: tuple[int, ...]
    places: IntArray
    numbers: IntArray
    shuffle: bool

    def shuffled(self, rounds: IntArray) -> IntArray:
        """The order of the rounds of all windows, shuffled within each window.

        Args:
            rounds: number of rounds in each window, shape `(windows,)`.

        Returns:
            Numbers of rounds, shape `(rounds.sum(),)`.
        """
        first = np.repeat(self.places - (np.cumsum(rounds) - rounds), rounds)
        numbers = first + np.arange(len(first))
        words = shuffled_keys(self.seed, *self.path, Purpose.ROUNDS, numbers=numbers)
        # The window in the upper bits, so that one sort does.
        bits = np.uint64(len(rounds).bit_length())
        window = np.repeat(np.arange(len(rounds), dtype=np.uint64), rounds)
        return np.argsort(window << (np.uint64(64) - bits) | words >> bits)

    def rotated(self, places: IntArray, rounds: IntArray) -> IntArray:
        """Give the places of rounds to other ranks in every window.

        The costliest place has fewer and longer samples than the cheapest one, and no rank should
        keep it throughout a run: in `ranks` windows each rank takes each place once.

        Args:
            places: numbers of the micro-batches at each place, shape `(rounds, ranks)`.
            rounds: number of rounds in each window, shape `(windows,)`.
        """
        ranks = places.shape[1]
        offset = int(random_words(self.seed, Purpose.TURNS, count=1)[0] % np.uint64(ranks))
        turns = np.repeat((self.numbers + offset) % ranks, rounds)[:, None]
        return np.take_along_axis(places, (np.arange(ranks) + turns) % ranks, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Micro-batches of one or more windows, in the order in which the ranks take them.

    Attributes:
        samples: places in the given sizes, window after window, grouped by micro-batch, shape
            `(windows·S,)`.
        sizes: the samples' sizes in that order, shape `(windows·S,)` or `(windows·S, d)`.
        starts: start of each micro-batch in `samples`, shape `(micro-batches,)`; window by
            window, in a window round by round, in a round rank by rank.
        stops: where it ends.
        rounds: micro-batches of each window on each rank, shape `(windows,)`.
    """

    samples: IntArray
    sizes: npt.NDArray[Any]
    starts: IntArray
    stops: IntArray
    rounds: IntArray

    def costs(self, rules: BatchRules, model: CostModel) -> IntArray:
        """The cost of each micro-batch by `rules.cost` or `rules.work`; see `run_costs`."""
        return run_costs(self.sizes, self.starts, self.stops, rules, model)

    def used(self, rules: BatchRules, limit: Limit) -> IntArray:
        """The amount of a limit that each micro-batch uses, shape `(micro-batches,)`."""
        if limit.name == "cost":
            return self.costs(rules, rules.chosen)
        if limit.summed is not None:
            return summed_costs(rules.padded(self.sizes), self.starts, limit.summed)
        size = rules.padded(self.padded()) if limit.any_size is None else limit.any_size
        return limit.cost.batch_bytes(self.stops - self.starts, size)

    def padded(self) -> npt.NDArray[Any]:
        """The largest size on every axis in each micro-batch, before rounding."""
        return over_runs(np.maximum, self.sizes, self.starts)

    def amounts(self, rules: BatchRules) -> IntArray:
        """The padded size of each micro-batch; of packed samples, the sum of their sizes.

        Shape `(micro-batches, d)`.
        """
        if rules.packing is None:
            amounts = rules.shaped(self.stops - self.starts, rules.padded(self.padded()))[1]
        else:
            amounts = over_runs(np.add, self.sizes.astype(np.int64), self.starts)
        return amounts.reshape(len(self.starts), -1)


def over_runs(reduce: np.ufunc, values: npt.NDArray[Any], starts: IntArray) -> npt.NDArray[Any]:
    """Reduce over runs that tile `values`, for starts in any order."""
    ascending = np.argsort(starts)
    reduced = reduce.reduceat(values, starts[ascending], axis=0)
    out = np.empty_like(reduced)
    out[ascending] = reduced
    return out


def run_costs(
    sizes: npt.NDArray[Any], starts: IntArray, stops: IntArray, rules: BatchRules, model: CostModel
) -> IntArray:
    """The cost of runs of samples that tile `sizes`, shape `(runs,)`.

    Args:
        sizes: sizes of the samples before rounding, shape `(S,)` or `(S, d)`.
        starts: first sample of each run, shape `(runs,)`.
        stops: end of each run, shape `(runs,)`.
        rules: rules of a micro-batch.
        model: `rules.cost` or `rules.work`.
    """
    if rules.packing is not None and isinstance(model, AdditiveCost):
        return summed_costs(rules.padded(sizes), starts, model)
    padded = rules.padded(over_runs(np.maximum, sizes, starts))
    return rules.costs(model, *rules.shaped(stops - starts, padded))


def summed_costs(padded: npt.NDArray[Any], starts: IntArray, model: AdditiveCost) -> IntArray:
    """The summed cost of runs of samples that tile `padded`, sizes after rounding; `(runs,)`."""
    items = over_runs(np.add, model.item_bytes(padded), starts)
    beside = model.padding_bytes(over_runs(np.add, padded, starts))
    costs: IntArray = model.base_bytes + items + beside
    return costs


def best_strips(sizes: npt.NDArray[Any], rules: BatchRules) -> int:
    """Find the number of strips per axis that gives the fewest micro-batches, among powers of √2.

    With a cap on their time, the number that takes the least time.

    One strip sorts by the last axis alone; as many strips as samples sort by the first axis alone.
    If a single axis decides the cost, one of these is best. If several axes do, numbers between
    are.

    Args:
        sizes: of a window's samples, shape `(S,)` or `(S, d)`.
        rules: of a micro-batch.

    Returns:
        The number of strips, 1 for one axis and for packing, which have none.
    """
    length = len(sizes)
    if sizes.ndim == 1 or rules.packing is not None:
        return 1
    tried = sorted({round(2 ** (power / 2)) for power in range(2 * length.bit_length() + 1)})
    order = np.concatenate([arrange(sizes[None], strips) for strips in tried])
    windows = TiledWindows(np.broadcast_to(sizes, (len(tried), *sizes.shape)), order, rules)
    cuts = windows.cut(np.full(len(tried), rules.lowered.amount))
    if rules.most_time is None:
        return tried[min(range(len(tried)), key=lambda number: len(cuts[number]))]
    work, firsts = work_of_runs(windows, cuts)
    return tried[int(np.add.reduceat(work, firsts).argmin())]


def work_of_runs(windows: Windows, cuts: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """The work of each run of some windows, and the place of each window's first one."""
    starts, stops, counts = _in_all(windows, cuts)
    flat = windows.sizes.reshape(-1, *windows.sizes.shape[2:])
    work = run_costs(flat, starts, stops, windows.rules, windows.rules.work)
    return work, np.cumsum(counts) - counts


def _in_all(windows: Windows, cuts: Sequence[IntArray]) -> tuple[IntArray, IntArray, IntArray]:
    """Starts and stops of runs, counted over all windows, and the number of each window's."""
    counts = np.array([*map(len, cuts)])
    starts = np.concatenate(cuts) + np.repeat(np.arange(len(cuts)) * windows.length, counts)
    return starts, np.append(starts[1:], len(cuts) * windows.length), counts


def arranged_windows(
    sizes: npt.NDArray[Any], rules: BatchRules, labels: Labels, ranks: Dealing = _ONE_RANK
) -> Windows:
    """Arrange windows to be cut; the arguments are those of `solve`.

    Raises:
        OptionError: shapes do not go together with the labels or the ranks.
    """
    mixed = labels.groups is not None and ranks.number > 1
    if rules.shapes and (mixed or labels.units is not None or ranks.multiple > 1):
        raise OptionError(
            "all ranks must have one shape at a time: max_shapes takes no units, no "
            "micro_batches_multiple and, on several ranks, no windows that mix groups, as "
            "samples_per_step makes them"
        )
    if rules.packing is not None:
        return PackedWindow(sizes, rules, labels)
    if rules.shapes:
        return RoundWindow(sizes, rules, ranks, labels)
    if sizes.ndim == 2:
        return SortedWindows(sizes, rules, labels)
    strips = rules.strips
    if strips is None:
        strips = best_strips(sizes[0, :: max(sizes.shape[1] // _SURVEY, 1)], rules)
    return TiledWindows(sizes, arrange(sizes, strips), rules, labels)


def _capped(find: _Found) -> _Found:
    """Windows with too few samples for the micro-batches of the cap on time are cut without it."""

    @wraps(find)
    def found(rules: BatchRules, *arguments: Any, **options: Any) -> Any:
        if rules.most_time is not None:
            with suppress(UnevenRanksError):
                return find(rules, *arguments, **options)
            rules = replace(rules, most_time=None)
        return find(rules, *arguments, **options)

    return cast(_Found, found)


@_capped
def rounds_needed(
    rules: BatchRules, sizes: npt.NDArray[Any], ranks: Dealing, *, labels: Labels = NO_LABELS
) -> IntArray:
    """Micro-batches that each rank needs of windows; the arguments are those of `solve`.

    Returns:
        `Block.rounds` of the solution, shape `(windows,)`. It takes a part of the time of `solve`,
        since most windows are cut once and not dealt. Windows that are packed or have units are
        solved.

    Raises:
        UnevenRanksError: a window cannot be split evenly over the ranks.
    """
    if rules.packing is not None or labels.units is not None:
        return solve(rules, sizes, ranks, labels=labels).rounds
    windows = arranged_windows(sizes, rules, labels, ranks)
    cuts = windows.cut(np.full(len(sizes), rules.lowered.amount))
    return least_rounds(np.array([*map(len, cuts)]), len(windows.firsts), ranks)


def _cut_into(
    windows: Windows, cuts: list[IntArray], target: IntArray
) -> tuple[list[IntArray], IntArray]:
    """Cut windows into more runs, which are as alike as can be.

    Args:
        windows: windows that were cut under the whole budget.
        cuts: starts of the runs of these cuts.
        target: number of runs for each window, at least as many as it has, shape `(windows,)`.

    Returns:
        The starts of the runs, and the lowered budgets that padded windows were cut under.
    """
    rules, length = windows.rules, windows.length
    cap = rules.lowered
    budgets = np.full(len(target), cap.amount)
    if rules.packing is None:
        low = cap.cost.batch_bytes(1, rules.padded(windows.sizes.min(axis=1)))
        budgets = lowest_budgets(windows, target=target, low=low, high=cap.amount)
        cuts = windows.cut(budgets)
    for row, (starts, wanted) in enumerate(zip(cuts, target.tolist(), strict=True)):
        if len(starts) < wanted:
            stops, firsts = np.append(starts[1:], length), windows.firsts
            costs = run_costs(windows.sizes[row], starts, stops, rules, cap.cost)
            runs = np.searchsorted(firsts, starts)
            cuts[row] = firsts[split_to(runs, len(firsts), costs, wanted)]
    return cuts, budgets


def _dealt_first(
    rules: BatchRules, sizes: npt.NDArray[Any], ranks: Dealing, labels: Labels
) -> Block | None:
    """Give units of even work to the ranks, and cut each rank's samples by themselves.

    Args:
        rules: of a micro-batch.
        sizes: of one window, shape `(1, S)` or `(1, S, d)`.
        ranks: that share the window.
        labels: see `solve`; without units, each sample is one.

    Returns:
        The micro-batches; round k has the k-th costliest one of every rank. `None` if a rank has
        fewer samples than another rank needs micro-batches.

    Raises:
        UnevenRanksError: the same, but the samples of units cannot be dealt otherwise.
    """
    every, number = np.arange(sizes.shape[1]), ranks.number
    units = every if labels.units is None else labels.units
    stay = labels.units is not None and not labels.whole
    work = np.bincount(units, work_of(rules, sizes[0]))
    parts, rooms = parts_of(rules, sizes[0], every if stay else units)
    if stay:
        parts = np.array([of_items(row, units) for row in parts])
    rounds = -(-fewest_bins(parts, rooms) // ranks.together) * ranks.multiple
    while True:
        wide = [min(room * rounds, MAX_BYTES) for room in rooms]
        of_rank = spread(np.minimum(parts, np.array(wide)[:, None]), wide, number, work)[units]
        places, firsts = grouped_by(of_rank)
        mine = np.split(places, firsts[1:])
        cuts: list[IntArray] = []
        if len(mine) <= number:
            windows = [arranged_windows(sizes[:, at], rules, labels.take(at)) for at in mine]
            cuts = [_in_rounds(window, rounds) for window in windows]
        needed = max(map(len, cuts), default=rounds + 1)
        if needed <= rounds:
            break
        rounds = -(-needed // ranks.multiple) * ranks.multiple
    if len(mine) < number or min(map(len, cuts)) < rounds:
        if not stay:
            return None
        raise UnevenRanksError(
            f"{len(work)} units cannot be split evenly over {number} ranks: one rank's units have "
            f"{min(map(len, mine)) if len(mine) == number else 0} samples, and another's need "
            f"{rounds} micro-batches; use more units, fewer ranks or a larger budget"
        )
    bins = np.empty_like(every)
    for rank, (at, window, starts) in enumerate(zip(mine, windows, cuts, strict=True)):
        lengths = np.diff(starts, append=len(at))
        bins[at[window.samples]] = np.repeat(every[:rounds] * number + rank, lengths)
    samples, starts = grouped_by(bins)
    stops, dealt = np.append(starts[1:], len(samples)), sizes[0][samples]
    costs = run_costs(dealt, starts, stops, rules, rules.work).reshape(rounds, number)
    turns = np.argsort(-costs, axis=0, kind="stable") * number + np.arange(number)
    starts, stops = starts[turns.reshape(-1)], stops[turns.reshape(-1)]
    return Block(samples, dealt, starts, stops, np.array([rounds]))


def _in_rounds(window: Windows, rounds: int) -> IntArray:
    """The starts of `rounds` runs of a rank's samples.

    There are more runs if the budget needs more, and fewer if there are too few samples.
    """
    starts = window.even(rounds) if isinstance(window, PackedWindow) else None
    if starts is None:
        starts = window.cut(np.array([window.rules.lowered.amount]))[0]
        if len(starts) <= rounds <= len(window.firsts):
            starts = _cut_into(window, [starts], np.array([rounds]))[0][0]
    return starts


def _cut_first(arranged: Windows, ranks: Dealing) -> Block:
    """Cut windows into a multiple of the ranks' number, and deal the costliest round first."""
    rules, windows, length = arranged.rules, len(arranged.sizes), arranged.length
    by_rounds = isinstance(arranged, RoundWindow)
    budgets = np.full(windows, rules.lowered.amount)
    cuts = arranged.cut(budgets)
    if ranks.together > 1 and not by_rounds:
        needed = least_rounds(np.array([*map(len, cuts)]), len(arranged.firsts), ranks)
        cuts, budgets = _cut_into(arranged, cuts, needed * ranks.number)
    starts, stops, counts = _in_all(arranged, cuts)
    flat = arranged.sizes.reshape(-1, *arranged.sizes.shape[2:])
    if ranks.number > 1 and not by_rounds:
        work = run_costs(flat, starts, stops, rules, rules.work)
        rounds = _dealt(work, stops - starts, counts, ranks)
        alike = arranged.units is None and arranged.groups is None
        if ranks.even_sums and isinstance(arranged, SortedWindows) and alike:
            for row, last in enumerate(np.cumsum(counts).tolist()):
                first = last - int(counts[row])
                dealt = rounds[first // ranks.number : last // ranks.number]
                better = level(arranged, row, work[first:last], dealt - first, int(budgets[row]))
                if better is not None:
                    starts[first:last] = better[0] + row * length
                    dealt[:] = better[1] + first
            stops = np.append(starts[1:], windows * length)
        starts, stops = starts[rounds.reshape(-1)], stops[rounds.reshape(-1)]
    return Block(arranged.samples, flat, starts, stops, counts // ranks.number)


@_capped
def solve(
    rules: BatchRules,
    sizes: npt.NDArray[Any],
    ranks: Dealing = _ONE_RANK,
    key: WindowKey | None = None,
    *,
    labels: Labels = NO_LABELS,
    parts: int = 1,
) -> Block:
    """Cut windows into micro-batches, and give each rank its own.

    Args:
        rules: of a micro-batch.
        sizes: shape `(windows, S)` or `(windows, S, d)`; a single window if the rules pack or have
            shapes.
        ranks: that share each window.
        key: of the order of the micro-batches; `None`: the longest (for several ranks the
            costliest) first, and ranks are not rotated.
        labels: of the samples of a single window.
        parts: number of parts in which a single window is solved, one after the other, if each
            part can be dealt.

    Returns:
        The micro-batches. Only a sample (or unit) that exceeds the budget alone has a micro-batch
        over the budget.

    Raises:
        UnevenRanksError: a window cannot be split evenly over the ranks.
    """
    if parts > 1:
        with suppress(UnevenRanksError):
            part = partial(solve, rules, ranks=ranks, key=key)
            return _in_parts(part, sizes, labels, ranks.number, parts)
    packs = rules.packing is not None and labels.groups is None
    first = packs or (labels.units is not None and not labels.whole)
    block = None
    if first and ranks.together > 1:
        block = _dealt_first(rules, sizes, ranks, labels)
    if block is None:
        block = _cut_first(arranged_windows(sizes, rules, labels, ranks), ranks)
    if key is None:
        return block
    rounds = np.arange(len(block.starts)).reshape(-1, ranks.number)
    if ranks.number > 1:
        rounds = key.rotated(rounds, block.rounds)
    if key.shuffle:
        rounds = rounds[key.shuffled(block.rounds)]
    number = rounds.reshape(-1)
    return replace(block, starts=block.starts[number], stops=block.stops[number])


def _in_parts(
    part: Callable[..., Block], sizes: npt.NDArray[Any], labels: Labels, number: int, parts: int
) -> Block:
    """Solve one window part by part, in the order of its samples.

    Only the samples of the part that was begun need a second bit in a state: in a step of 131,072
    samples, a state after a change of the ranks has 21 KB; it has 31 KB if solved as a whole.

    Args:
        part: solves some of the samples, given their `sizes` and `labels`.
        sizes: sizes of the window, shape `(1, S)` or `(1, S, d)`.
        labels: labels of its samples.
        number: number of ranks.
        parts: the most parts.
    """
    every = np.arange(sizes.shape[1])
    items = every if labels.units is None else labels.units
    firsts = np.flatnonzero(np.diff(items, prepend=-1))
    # A multiple of the number of ranks splits evenly for all sizes; the last part has the rest.
    each = max(len(firsts) // parts // number, 1) * number
    blocks = []
    for at in np.split(every, firsts[each::each][: parts - 1]):
        one = part(sizes=sizes[:, at], labels=labels.take(at))
        places = (at[0] + places for places in (one.samples, one.starts, one.stops))
        blocks.append((*places, one.sizes, one.rounds))
    samples, starts, stops, dealt, rounds = map(np.concatenate, zip(*blocks, strict=True))
    return Block(samples, dealt, starts, stops, rounds.sum(keepdims=True))


def _dealt(work: IntArray, samples: IntArray, counts: IntArray, ranks: Dealing) -> IntArray:
    """Deal the micro-batches of each window: their numbers, shape `(rounds, ranks)`.

    Args:
        work: work of each micro-batch, window after window, shape `(micro-batches,)`.
        samples: number of samples in each, shape `(micro-batches,)`.
        counts: number of micro-batches in each window, shape `(windows,)`.
        ranks: ranks that share the windows.
    """
    real = np.arange(counts.max()) < counts[:, None]
    costs = np.full(real.shape, -1)
    costs[real] = work
    weights = costs
    if not ranks.even_sums:  # they wait every round: only what they see is left to be evened out
        weights = np.zeros_like(costs)
        weights[real] = samples
    rounds = deal_rounds(costs, weights, ranks.number)
    rounds += (np.cumsum(counts) - counts)[:, None, None]
    exists = np.arange(rounds.shape[1]) < (counts // ranks.number)[:, None]
    dealt: IntArray = rounds[exists]
    return dealt


def default_window(ranks: int, *, positions: float = math.inf, micro_batches: float = 1.0) -> int:
    """The default number of positions that are sorted and cut together.

    Padding falls as windows grow, and so does the unfilled part of their last micro-batches. But
    samples that share every window share their micro-batches in every epoch.

    Args:
        ranks: that share each window.
        positions: of a shuffled epoch.
        micro_batches: that a sample makes, on average.

    Returns:
        4,096 for each rank, or 32 micro-batches on each if that is more; at most a quarter of
        the epoch, unless that is less than 8 micro-batches on each rank. At least `ranks`.
    """
    fill = ranks / micro_batches
    window = min(max(4096 * ranks, 32 * fill), max(positions / 4, 8 * fill))
    return max(math.ceil(window), ranks)


def without_last(
    rules: BatchRules, sizes: npt.NDArray[Any], ranks: Dealing, *, labels: Labels = NO_LABELS
) -> npt.NDArray[np.bool_]:
    """Choose the samples that stay when the micro-batch that could still have taken one is dropped.

    If only some numbers of samples can be dealt evenly, the last samples in the order of the cut
    are dropped too, until a multiple of the ranks' number stays.

    Args:
        rules: of a micro-batch.
        sizes: of the window's samples, shape `(S,)` or `(S, d)`.
        ranks: that share the window.
        labels: see `solve`; without units.

    Returns:
        Shape `(S,)`.
    """
    windows = arranged_windows(sizes[None], rules, labels)
    starts = windows.cut(np.array([rules.lowered.amount]))[0]
    stops, own = np.append(starts[1:], len(sizes)), windows.sizes[0]
    # Each micro-batch is filled up to its multiple, with copies of the window's smallest sample.
    more = np.cumsum(rules.batch_size_multiple - (stops - starts) % rules.batch_size_multiple)
    added = np.repeat(stops, np.diff(more, prepend=0))
    grown = np.insert(own, added, sizes.min(axis=0), axis=0)
    block = Block(added, grown, starts + np.append(0, more[:-1]), stops + more, np.array([1]))
    fits = np.all([block.used(rules, one) <= one.amount for one in rules.limits], axis=0)
    stays = np.ones(len(sizes), np.bool_)
    if fits.any():
        costs = run_costs(own, starts, stops, rules, rules.cost)
        last = int(np.where(fits, costs, MAX_BYTES).argmin())
        stays[windows.samples[starts[last] : stops[last]]] = False
    largest = sizes.max(axis=0)
    if ranks.number > 1 and (rules.shapes or rules.alike(largest) < 2):
        still = windows.samples[stays[windows.samples]]
        stays[still[len(still) - len(still) % ranks.number :]] = False
    return stays
