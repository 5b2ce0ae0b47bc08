"""How the samples of a stream's window are put into micro-batches, and dealt to ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import OversizeError, UnevenRanksError
from torchbudget.plan.arrange import arrange
from torchbudget.plan.drop import without_last
from torchbudget.plan.oversize import Oversize
from torchbudget.plan.permutation import shuffled_keys
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import best_strips, solve
from torchbudget.plan.tight import filled, is_simple, tight_cut
from torchbudget.units import format_bytes

_ROUND_STREAM: Final = 6
_SURVEY: Final = 512
_TILE: Final = 8  # samples of several axes that lie together, where nobody says what is best
_log: Final = logging.getLogger("torchbudget")


class Rounds(NamedTuple):
    """How a window is cut: rounds of one micro-batch for each rank, one after the other.

    Attributes:
        places: of the samples, shape `(S,)`.
        starts: where each micro-batch begins among them.
        stops: where it ends.
    """

    places: IntArray
    starts: list[int]
    stops: list[int]


_NONE: Final = Rounds(np.empty(0, np.int64), [], [])


class Grouping(Protocol):
    """Cuts a window into rounds: one micro-batch for each rank."""

    def over(self, sizes: npt.NDArray[Any], first: int) -> IntArray:
        """Places of the samples that are to be skipped; raises where that is the policy."""
        ...

    def filled(self, sizes: npt.NDArray[Any]) -> int:
        """How many of the first samples fill their micro-batches."""
        ...

    def rounds(
        self,
        samples: Sequence[Any],
        sizes: npt.NDArray[Any] | None,
        *,
        key: tuple[int, ...] | None,
        drop_last: bool,
    ) -> Rounds:
        """The order of the samples, and where it is cut.

        Args:
            samples: of the window.
            sizes: theirs.
            key: of the order of the rounds; `None`: the longest first.
            drop_last: leave out the micro-batch that could still have taken a sample.

        Raises:
            UnevenRanksError: they cannot be dealt evenly.
        """
        ...


@dataclass(frozen=True, slots=True)
class ByCost:
    """Micro-batches that fit the budget, as the sampler's do.

    Attributes:
        rules: what a micro-batch may be.
        oversize: what becomes of a sample that alone is over the budget.
        ranks: that share each window.
    """

    rules: BatchRules
    oversize: Oversize
    ranks: int

    def over(self, sizes: npt.NDArray[Any], first: int) -> IntArray:
        """See `Grouping`."""
        rules = self.rules
        if sizes.ndim == 1 and self._fit(sizes.max(keepdims=True)).all():
            return np.empty(0, np.int64)  # the cost is monotone
        over = np.flatnonzero(~self._fit(sizes))
        if not over.size or self.oversize == "alone":
            return over[:0]
        worst = sizes[over[0]]
        told = (
            f"a sample of size {worst.tolist()}, near number {first + over[0]}, alone is over "
            f"the budget of {format_bytes(rules.budget_bytes)}"
        )
        if self.oversize == "raise":
            raise OversizeError(
                f"{told}; raise the budget, shorten such samples, or choose oversize='skip' or "
                "'alone'"
            )
        _log.warning("%s; it is skipped", told)
        return over

    def _fit(self, sizes: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        rules = self.rules
        return rules.cost.capacity(rules.padded(sizes), rules.budget_bytes) >= 1

    def filled(self, sizes: npt.NDArray[Any]) -> int:
        """See `Grouping`."""
        simple = self.ranks == 1 and is_simple(sizes, self.rules)
        return filled(sizes, self.rules) if simple and len(sizes) else len(sizes)

    def rounds(
        self,
        samples: Sequence[Any],  # noqa: ARG002  (the sizes decide)
        sizes: npt.NDArray[Any] | None,
        *,
        key: tuple[int, ...] | None,
        drop_last: bool,
    ) -> Rounds:
        """See `Grouping`."""
        if sizes is None:
            raise TypeError("a cost needs sizes")
        if self.ranks == 1 and is_simple(sizes, self.rules) and not drop_last and len(sizes):
            return _rounds(*tight_cut(sizes, self.rules), 1, key)
        places = np.arange(len(sizes))
        survey = sizes[:: max(len(sizes) // _SURVEY, 1)]
        strips = best_strips(survey, self.rules)
        if drop_last and len(sizes):
            stays = without_last(
                sizes, self.rules, strips=strips, multiple_of=self.ranks if self.ranks > 1 else 1
            )
            places, sizes = places[stays], sizes[stays]
        if not len(sizes):
            return _NONE
        if len(sizes) < self.ranks:
            raise UnevenRanksError(f"{len(sizes)} samples for {self.ranks} ranks")
        block = solve(
            sizes[None],
            self.rules,
            strips=strips,
            ranks=self.ranks,
            keys=None if key is None else lambda rounds: _words(key, rounds)[None],
        )
        return Rounds(places[block.samples], block.starts.tolist(), block.stops.tolist())


@dataclass(frozen=True, slots=True)
class ByPredicate:
    """Micro-batches that grow as long as a function says so.

    Attributes:
        should_add: `should_add(batch, sample)`, of a batch that holds at least one sample.
        ranks: that share each window.
    """

    should_add: Callable[[list[Any], Any], bool]
    ranks: int

    def over(self, sizes: npt.NDArray[Any], first: int) -> IntArray:  # noqa: ARG002  (none is)
        """See `Grouping`."""
        return np.empty(0, np.int64)

    def filled(self, sizes: npt.NDArray[Any]) -> int:
        """All: what a predicate wants is not known before it is asked."""
        return len(sizes)

    def rounds(
        self,
        samples: Sequence[Any],
        sizes: npt.NDArray[Any] | None,
        *,
        key: tuple[int, ...] | None,
        drop_last: bool,
    ) -> Rounds:
        """See `Grouping`: in the order of sizes where there are some, else as they come."""
        order = list(range(len(samples)))
        if sizes is not None and len(sizes):
            axes = sizes.shape[1] if sizes.ndim == 2 else 1
            strips = max(round((len(sizes) / _TILE) ** (1 / axes)), 1)
            order = arrange(sizes[None], strips)[0].tolist()
        batches: list[list[int]] = []
        held: list[Any] = []
        for place in order:
            if batches and self.should_add(held, samples[place]):
                batches[-1].append(place)
                held.append(samples[place])
            else:
                batches.append([place])
                held = [samples[place]]
        if drop_last and batches:
            batches.pop()
        while len(batches) % self.ranks:
            longest = max(range(len(batches)), key=lambda i: len(batches[i]))
            batch = batches[longest]
            if len(batch) == 1:
                raise UnevenRanksError(f"{len(batches)} single samples for {self.ranks} ranks")
            batches[longest : longest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        places = np.array([place for batch in batches for place in batch], np.int64)
        cuts = [0, *accumulate(map(len, batches))]
        return _rounds(places, cuts, self.ranks, key)


def _rounds(
    places: IntArray, cuts: Sequence[int], ranks: int, key: tuple[int, ...] | None
) -> Rounds:
    """Rounds of consecutive micro-batches, in an order that is drawn where there is a key."""
    bounds = np.array(cuts)
    starts, stops = bounds[:-1].reshape(-1, ranks), bounds[1:].reshape(-1, ranks)
    if key is not None and len(starts):
        order = np.argsort(_words(key, len(starts)), kind="stable")
        starts, stops = starts[order], stops[order]
    return Rounds(places, starts.ravel().tolist(), stops.ravel().tolist())


def _words(key: tuple[int, ...], count: int) -> npt.NDArray[np.uint64]:
    seed, *rest = key
    return shuffled_keys(seed, *rest, _ROUND_STREAM, numbers=np.arange(count))
