"""`Mixture`: sources of samples in stated shares, and the order in which they take turns."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from torchbudget.checks import is_int, is_number
from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OptionError
from torchbudget.plan.groups import Members, numbered
from torchbudget.plan.permutation import Permutation
from torchbudget.plan.size_table import SizeTable

# Parts of draws are in units of 2⁻³⁶: a window's positions, of 27 bits, times a part fit in 64.
_BITS: Final = 36
_MOST_IN_WINDOW: Final = 2**27
_ONE: Final = 1 << _BITS
# The largest weight of a source; those of the others are rounded relative to it.
_LARGEST_WEIGHT: Final = 2**40


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """Sources of samples in stated shares: pass it as `weights=` to `MemoryBudgetBatchSampler`.

    After every window the number of samples of each source is less than two away from its share,
    counted from where these shares began. No sample comes twice before every other one of its
    source has come. Shares of sizes are exact where every source completes whole passes; before
    that they are met in expectation.

    Args:
        sources: one label for each sample, ints or text, shape `(N,)`.
        shares: the share of each label, at least 0, relative to their sum. 0 leaves a source out.
        by: what they are shares of: `"size"`, the sum of the samples' sizes, such as tokens; an
            axis, an int, where sizes have several; or `"samples"`.

    Raises:
        OptionError: a share that is no number of at least 0, or none above 0. Labels, shares and
            `by` that do not go with the data set are errors of the sampler.

    >>> import numpy as np
    >>> import torchbudget as tb
    >>> sources = np.repeat(["web", "code"], [600, 300])
    >>> mixture = tb.Mixture(sources, {"web": 3, "code": 1}, by="samples")
    >>> sizes, tokens = np.full(900, 50), tb.PaddedCost(unit_bytes=1, unit="tokens")
    >>> sampler = tb.MemoryBudgetBatchSampler(
    ...     sizes, tokens, 400, weights=mixture, samples_per_step=8, steps_per_epoch=100
    ... )
    >>> [sum(sources[batch] == "code").item() for batch in sampler][:3]
    [2, 2, 2]
    """

    sources: npt.ArrayLike
    shares: Mapping[Any, float]
    by: Literal["size", "samples"] | int = "size"

    def __post_init__(self) -> None:
        given: Any = self.shares
        shares = [*given.values()] if isinstance(given, Mapping) else []
        most = sys.float_info.max
        are_numbers = all(is_number(one) and 0 <= one <= most for one in shares)
        if not are_numbers or not any(shares):
            raise OptionError(
                "shares must map each label to a number of at least 0, one of them above 0, got "
                f"{given!r}"
            )


@dataclass(frozen=True)  # without slots, for the cached property
class Turns:
    """Which source each position draws from, and which of its draws that is.

    At each node of a tree of the sources the draws are split in two by rounding, and those parts
    are split on. So from one position to the next exactly one source has one draw more, and sources
    are less than two draws away from their shares: for 3·10¹⁰ draws, from where on the rounding of
    parts to 2⁻³⁶ shows. The tree is that of Huffman ("A method for the construction of
    minimum-redundancy codes", 1952): its paths are the shortest on average.

    Attributes:
        drawn: draws of each source before these turns begin, at the position that is their sum.
        weights: relative numbers of draws, at most 2⁴⁰.
    """

    drawn: tuple[int, ...]
    weights: tuple[int, ...]

    @cached_property
    def _paths(self) -> list[list[tuple[int, int]]]:
        """For each source its nodes from the root on: its part of the draws, and the rounding.

        Of n draws of a node, one side has ⌊(n·part + rounding) / 2³⁶⌋. The roundings of both sides
        make their sum n.
        """
        paths: list[list[tuple[int, int]]] = [[] for _ in self.weights]
        heap = [(weight, [source]) for source, weight in enumerate(self.weights) if weight]
        heapq.heapify(heap)
        while len(heap) > 1:
            (light, few), (heavy, many) = heapq.heappop(heap), heapq.heappop(heap)
            part = min(max((light << _BITS) // (light + heavy), 1), _ONE - 1)
            half = _ONE // 2
            for sources, node in ((few, (part, half)), (many, (_ONE - part, half - 1))):
                for source in sources:
                    paths[source].insert(0, node)
            heapq.heappush(heap, (light + heavy, few + many))
        return paths

    def before(self, position: int) -> list[int]:
        """Draws of each source before a position, at or after the first of these turns."""
        begun = position - sum(self.drawn)
        counts = [_down(begun, path)[-1] for path in self._paths]
        drawn = zip(self.drawn, counts, self.weights, strict=True)
        return [before + count if weight else before for before, count, weight in drawn]

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, IntArray]]:
        """The draws at positions `start … stop`, at most 2²⁷ of them, source by source.

        Yields:
            The source, its draws before `start`, and the places of its next draws, from `start` on.

        Raises:
            OptionError: there are more positions.
        """
        if stop - start > _MOST_IN_WINDOW:
            raise OptionError(f"a window of a mixture has at most 2**27 samples: {stop - start:,}")
        first, ends = start - sum(self.drawn), self.before(stop)
        for source, (draw, path) in enumerate(zip(self.before(start), self._paths, strict=True)):
            places, nodes = np.arange(ends[source] - draw), _down(first, path)
            # Draw j of a side is the last draw n of its node with (n·part + rounding) / 2³⁶ below
            # j + 1. Both count from their first ones here, so that products fit in 64 bits.
            for (part, rounding), (above, at) in [*zip(path, pairwise(nodes), strict=True)][::-1]:
                places <<= _BITS
                places += (at + 1 << _BITS) - rounding - 1 - above * part
                places //= part
            yield source, draw, places


def _down(draws: int, path: Sequence[tuple[int, int]]) -> list[int]:
    """The draws of a tree's root, and what each node on a path has of them."""
    return [*accumulate(path, lambda n, node: n * node[0] + node[1] >> _BITS, initial=draws)]


@dataclass(frozen=True, slots=True, eq=False)
class Sources:
    """The sources of a mixture: their samples, and how they take turns.

    Draw j of a source of n samples is in its pass j // n; each pass has an order of its own.

    Attributes:
        members: the samples of each source.
        names: labels of the sources.
        turns: from the beginning on.
    """

    members: Members
    names: list[Any]
    turns: Turns
    # Windows follow each other, so that each source needs the permutation of one pass.
    _permutations: dict[int, tuple[tuple[int, ...], Permutation]] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(cls, mixture: Mixture, table: SizeTable, skipped: IntArray) -> Sources:
        """The sources of a data set, without samples that are skipped.

        Raises:
            OptionError: labels and shares do not belong together, a source with a share has no
                samples or only samples of size 0, or the axis does not exist.
        """
        labels, codes = numbered("the sources of a mixture", mixture.sources, len(table))
        names, shares = labels.tolist(), mixture.shares
        axis: Any = mixture.by
        if axis == "size" and table.axes == 1:
            axis = 0
        if axis != "samples" and not (is_int(axis) and 0 <= axis < table.axes):
            raise OptionError(
                f"by must be 'samples', 'size' of one axis, or an axis below {table.axes}: {axis!r}"
            )
        members = Members.of(codes, skipped).members
        counts = sums = np.bincount(codes[members], minlength=len(names))
        if axis != "samples":
            values = table.values.reshape(len(table), -1)[members, axis]
            sums = np.bincount(codes[members], values, minlength=len(names))
        has = dict(zip(names, sums.tolist(), strict=True))
        unknown = [name for name in names if name not in shares]
        empty = [name for name, share in shares.items() if share and not has.get(name)]
        if unknown or empty:
            raise OptionError(
                "each source needs a share (0 leaves it out), and a share above 0 needs samples "
                f"that fit and have a size: no share of {unknown}, no samples of {empty}"
            )
        wanted = np.array([shares[name] for name in names], np.float64)
        draws = wanted / wanted.max() * counts / np.maximum(sums, 1)
        weights = np.ceil(draws / draws.max() * _LARGEST_WEIGHT).astype(np.int64)
        turns = Turns((0,) * len(names), tuple(weights.tolist()))
        return cls(Members(members, np.append(0, np.cumsum(counts))), names, turns)

    def onward(self, turns: Turns | None, position: int) -> Turns:
        """The turns from a position on, where a window begins, by the present shares.

        Args:
            turns: up to there, which may be of other shares; `None`: nothing was drawn.
            position: of the window.
        """
        if turns is None or turns.weights == self.turns.weights:
            return turns or self.turns
        return Turns(tuple(turns.before(position)), self.turns.weights)

    def passes(self, turns: Turns | None, position: int) -> dict[Any, float]:
        """How often each source was passed over before a position."""
        drawn = (turns or self.turns).before(position) / np.maximum(self.members.counts, 1)
        return dict(zip(self.names, drawn.tolist(), strict=True))

    def indices(self, turns: Turns | None, start: int, stop: int, *key: int) -> IntArray:
        """The samples at positions `start … stop`, shape `(stop − start,)`.

        Args:
            turns: `None`: those from the beginning on.
            start: first position.
            stop: the position after the last.
            key: seed and path of the passes; none: each is in the data set's order.
        """
        found = np.empty(stop - start, np.int64)
        for source, draw, places in (turns or self.turns).within(start, stop):
            before, end = self.members.firsts[source : source + 2].tolist()
            members, done, length = self.members.members[before:end], 0, end - before
            # Without this, sources of a ConcatDataset took 1.31 times a plan without, not 1.09.
            in_turn = length and members[-1] - members[0] == length - 1
            while done < len(places):
                number, first = divmod(draw + done, length)
                last = min(first + len(places) - done, length)
                drawn = members[first:last]
                if key:
                    of_pass = self._permutation(source, length, *key, number, source)
                    drawn = of_pass.stretch(first, last)
                    # The indices are in range: "clip" spares NumPy checking each of them.
                    drawn = drawn + members[0] if in_turn else members.take(drawn, mode="clip")
                found[places[done : done + last - first]] = drawn
                done += last - first
        return found

    def _permutation(self, source: int, length: int, *key: int) -> Permutation:
        known = self._permutations.get(source)
        if known is None or known[0] != key:
            known = self._permutations[source] = key, Permutation(length, *key)
        return known[1]
