"""One window of one axis: as few micro-batches as can be, and among those the least padding.

Sorted in descending order, the k-th cut may stand anywhere between where the cut from the longest
sample down reaches and where the cut from the shortest one up does: any cuts in between that fit
make as many micro-batches. Dynamic programming finds those with the fewest padded elements. Cuts
are best where the size changes, or as early as the next one can still be reached: only those places
are tried.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.plan.arrange import arrange
from torchbudget.plan.rules import BatchRules

# At most an eighth of a window, and the room, is left for the next one: padding falls with the
# window's length.
_MOST: Final = 8
# Windows end that part of a micro-batch before the last one is full: without room no cut moves.
_ROOM: Final = 16


def is_simple(sizes: npt.NDArray[Any], rules: BatchRules) -> bool:
    """Whether the rules let every cut stand anywhere."""
    return sizes.ndim == 1 and rules.packing is None and rules.batch_size_multiple == 1


def reserve(window: int) -> int:
    """The most samples that `filled` leaves of a window, or one more."""
    return 2 * (window // _MOST) + 1


def filled(sizes: npt.NDArray[Any], rules: BatchRules) -> int:
    """How many of the first samples fill their micro-batches.

    A window's last micro-batch is incomplete; with somewhat fewer samples it is not there.

    Args:
        sizes: in the order in which they came, shape `(S,)`.
        rules: what a micro-batch may be: see `is_simple`.

    Returns:
        At least 3/4 of S. O(S log S).
    """
    order = arrange(sizes[None], 1)[0]
    most = _capacities(sizes[order], rules)
    target, more = _count(most) - 1, len(sizes)
    if not target:
        return more
    # Two micro-batches fewer are enough where samples come in no order.
    for share in (target // 2, _MOST):
        if share >= _MOST and _count(most[order < more - more // share]) <= target:
            fewest = more - more // share
            break
    else:
        return more
    room = fewest // target // _ROOM
    while more - fewest > max(room, 1):  # fewer samples never need more micro-batches
        middle = (fewest + more) // 2
        if _count(most[order < middle]) <= target:
            fewest = middle
        else:
            more = middle
    return max(fewest - room, 1)


def tight_cut(sizes: npt.NDArray[Any], rules: BatchRules) -> tuple[IntArray, list[int]]:
    """An order of the samples, and where it is cut into micro-batches.

    Args:
        sizes: shape `(S,)`, S ≥ 1.
        rules: what a micro-batch may be: see `is_simple`.

    Returns:
        Places in `sizes`, descending by size, shape `(S,)`; and where each micro-batch begins
        there, and S. O(S log S).
    """
    order = arrange(sizes[None], 1)[0]
    descending = sizes[order]
    padded = rules.padded(descending)
    starts = np.append(0, np.flatnonzero(padded[1:] != padded[:-1]) + 1)
    most = _capacities(descending[starts], rules).tolist()
    cuts = _least_padding(padded[starts].tolist(), starts.tolist(), most, len(sizes))
    return order, cuts


def _capacities(sizes: npt.NDArray[Any], rules: BatchRules) -> IntArray:
    table = rules.table(int(sizes[0]))
    if table is not None:
        return table.take(sizes)
    return rules.capacity(sizes, rules.budget_bytes)


def _count(most: IntArray) -> int:
    """Micro-batches of samples in descending order, each as long as its first sample allows."""
    count = start = 0
    length, at = len(most), most.data  # whose items come in half the time
    while start < length:
        start += at[start]
        count += 1
    return count


def _least_padding(sizes: list[int], starts: list[int], most: list[int], length: int) -> list[int]:
    """Where the micro-batches start, and S.

    Of a micro-batch from one cut to the next the padded elements are a line over the size at the
    cut, whose slope is the next cut: the lower hull of those lines gives the best next cut of every
    place, from the longest sizes to the shortest ones (Brucker, "Efficient algorithms for some path
    partitioning problems", 1995). O(S), since the places of different cuts never overlap.

    Args:
        sizes: that differ, padded, descending, shape `(D,)`.
        starts: where the samples of each begin, among all in descending order.
        most: how many samples a micro-batch may hold whose largest has that size, ascending.
        length: S.
    """
    starts = [*starts, length]
    # Places of cuts, from the last cut to the first one; the fewest padded elements from there on,
    # and which place is the next cut's. Those of the cut that was dealt with begin at `first`.
    place, elements, follows = [length], [0], [0]
    first = 0
    run = len(most) - 1
    hull: list[int] = []
    for furthest in reversed(_latest(starts, most)):
        end = len(place)
        while run and starts[run] - 1 + most[run - 1] >= place[first]:  # the size before reaches it
            run -= 1
        here = place[first] - most[run]
        if here < starts[run]:
            here = starts[run]
        if here == furthest and end - first == 1:  # nothing to be chosen
            place.append(here)
            elements.append(0)
            follows.append(first)
            first = end
            continue
        tried, runs = _places(here, run, place[first + 1 :], furthest, starts, most)
        hull.clear()
        best = floor = bound = 0
        met = first
        for here, at in zip(tried, runs, strict=True):
            size, until = sizes[at], here + most[at]
            while met < end and place[met] <= until:
                while len(hull) > best + 1 and _is_over(hull[-2], hull[-1], met, place, elements):
                    hull.pop()
                hull.append(met)
                met += 1
            chosen = hull[best]
            least = elements[chosen] + place[chosen] * size
            while best + 1 < len(hull):
                other = hull[best + 1]
                padded = elements[other] + place[other] * size
                if padded > least:
                    break
                best += 1
                chosen, least = other, padded
            padded = least - here * size
            # All that precede are at least as long as the place before: is this one ever better?
            if len(place) == end or padded + here * floor < bound:
                place.append(here)
                elements.append(padded)
                follows.append(chosen)
                floor, bound = size, least
        first = end
    cuts = []
    while first:
        cuts.append(place[first])
        first = follows[first]
    return [*cuts, length]


def _places(
    first: int, run: int, stops: list[int], furthest: int, starts: list[int], most: list[int]
) -> tuple[list[int], list[int]]:
    """Where a cut may stand: where the size changes, or as early as one of the stops is reached.

    Args:
        first: the earliest place.
        run: which size stands there.
        stops: where the next cut may stand, but for the earliest one, ascending.
        furthest: the last place.
        starts: where each size begins, and S.
        most: samples of a micro-batch of each size.

    Returns:
        The places, ascending, and which size stands at each.
    """
    places, runs = [first], [run]
    for stop in stops:
        while starts[run + 1] - 1 + most[run] < stop:
            run += 1
            places.append(starts[run])
            runs.append(run)
        place = stop - most[run]
        if place > places[-1]:
            places.append(place)
            runs.append(run)
    while starts[run + 1] <= furthest:
        run += 1
        places.append(starts[run])
        runs.append(run)
    return places, runs


def _is_over(left: int, middle: int, right: int, slope: list[int], base: list[int]) -> bool:
    """Whether the middle one of three lines of rising slopes is nowhere the lowest."""
    beside = (base[left] - base[right]) * (slope[middle] - slope[left])
    return beside >= (base[left] - base[middle]) * (slope[right] - slope[left])


def _latest(starts: list[int], most: list[int]) -> list[int]:
    """Where micro-batches begin that are each as long as their first sample allows."""
    latest: list[int] = []
    run = place = 0
    while place < starts[-1]:
        latest.append(place)
        while starts[run + 1] <= place:
            run += 1
        place += most[run]
    return latest
