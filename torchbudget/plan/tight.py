"""One window of one axis: as few micro-batches as can be, and among those the least padding.

Sorted in descending order, the k-th cut may stand anywhere between where the cut from the longest
sample down reaches and where the cut from the shortest one up does: any cuts in between that fit
make as many micro-batches. Dynamic programming finds those with the fewest padded elements, up to
a bound on the pairs of cuts that are tried, beyond which they are nearly the fewest. Cuts are best
where the size changes, or as early as the next one can still be reached: only those places
are tried.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.plan.arrange import arrange
from torchbudget.plan.rules import BatchRules

# At most an eighth of a window is left for the next one: padding falls with the window's length.
_MOST: Final = 8
# Windows end that part of a micro-batch before the last one is full: without room no cut moves.
_ROOM: Final = 16
# Pairs of cuts that are tried in a window: some ten milliseconds.
_WORK: Final = 200_000


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
    fewest, more = len(sizes) - len(sizes) // _MOST, len(sizes)
    target = _count(most) - 1
    if not target or _count(most[order < fewest]) > target:
        return more
    while more - fewest > 1:  # fewer samples never need more micro-batches
        middle = (fewest + more) // 2
        if _count(most[order < middle]) <= target:
            fewest = middle
        else:
            more = middle
    return max(fewest - fewest // target // _ROOM, 1)


def tight_cut(sizes: npt.NDArray[Any], rules: BatchRules) -> list[IntArray]:
    """The samples of each micro-batch.

    Args:
        sizes: shape `(S,)`.
        rules: what a micro-batch may be: see `is_simple`.

    Returns:
        Places in `sizes`, from the longest micro-batch to the shortest one. O(S log S), and at most
        some 200,000 pairs of cuts; where there were more, not all are tried.
    """
    order = arrange(sizes[None], 1)[0]
    descending = sizes[order]
    padded = rules.padded(descending).astype(np.int64)
    cuts = _least_padding(padded, _capacities(descending, rules))
    return [order[start:stop] for start, stop in pairwise(cuts)]


def _capacities(descending: npt.NDArray[Any], rules: BatchRules) -> IntArray:
    table = rules.table(int(descending[0]))
    if table is not None:
        return table.take(descending)
    return rules.capacity(descending, rules.budget_bytes)


def _count(most: IntArray) -> int:
    """Micro-batches of samples in descending order, each as long as its first sample allows."""
    count = start = 0
    while start < len(most):
        start += most.item(start)
        count += 1
    return count


def _least_padding(padded: IntArray, most: IntArray) -> list[int]:
    """Where the micro-batches start, and S.

    Args:
        padded: sizes, descending, shape `(S,)`.
        most: how many samples a micro-batch may hold that starts there, ascending.
    """
    length = len(padded)
    latest = [0]
    while latest[-1] < length:
        latest.append(min(latest[-1] + most.item(latest[-1]), length))
    count = len(latest) - 1
    reach = (np.arange(length) + most).tolist()
    earliest = [length]
    for _ in range(count - 1):
        earliest.append(bisect_left(reach, earliest[-1]))
    earliest.reverse()
    places = _places(padded, reach, earliest, latest)
    # `best[place]`: the fewest padded elements before a cut there, and the cut before it.
    best: dict[int, tuple[int, int]] = {0: (0, 0)}
    ways = []
    for stops in places:
        following: dict[int, tuple[int, int]] = {}
        begun = [
            (start, reach[start], padded.item(start), elements)
            for start, (elements, _) in best.items()
        ]
        for stop in stops:
            found = [
                (elements + (stop - start) * size, start)
                for start, furthest, size, elements in begun
                if start < stop <= furthest
            ]
            if found:
                following[stop] = min(found)
        ways.append(following)
        best = following
    cuts = [length]
    for way in reversed(ways):
        cuts.append(way[cuts[-1]][1])
    return cuts[::-1]


def _places(
    padded: IntArray, reach: list[int], earliest: list[int], latest: list[int]
) -> list[set[int]]:
    """Where the best cuts are: each where the size changes, or as early as still reaches the next.

    Of two cuts within samples of one size the earlier one never pads more.
    """
    changes = np.flatnonzero(padded[1:] != padded[:-1]) + 1
    first = np.searchsorted(changes, earliest).tolist()
    last = np.searchsorted(changes, latest[1:], side="right").tolist()
    known = changes.tolist()
    following = {len(padded)}
    places = [following]
    most = max(int((_WORK / len(earliest)) ** 0.5), 8)
    for number in range(len(earliest) - 2, -1, -1):
        low, high = earliest[number], latest[number + 1]
        back = (bisect_left(reach, place) for place in following)
        within = {place for place in back if low <= place <= high}
        following = within.union(known[first[number] : last[number]])
        if len(following) > most:  # of so many nearly the best is good enough
            every = len(following) // most + 1
            following = {low, *sorted(following)[::every]}
        places.append(following)
    return places[::-1]
