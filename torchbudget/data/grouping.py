"""How the samples of a stream's window are put into micro-batches, and dealt to ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OversizeError, UnevenRanksError
from torchbudget.plan.arrange import arrange
from torchbudget.plan.block import best_strips, solve
from torchbudget.plan.drop import without_last
from torchbudget.plan.oversize import Oversize
from torchbudget.plan.permutation import shuffled_keys
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.tight import filled, is_simple, tight_cut
from torchbudget.units import format_bytes

_ROUND_STREAM: Final = 6
_SURVEY: Final = 512
_TILE: Final = 8  # samples of several axes that lie together, where nobody says what is best
_log: Final = logging.getLogger("torchbudget")


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
    ) -> list[list[list[int]]]:
        """Places of the samples in each round's micro-batches, one for each rank.

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
        fits = rules.cost.capacity(rules.padded(sizes), rules.budget_bytes) >= 1
        over = np.flatnonzero(~fits)
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
    ) -> list[list[list[int]]]:
        """See `Grouping`."""
        if sizes is None:
            raise TypeError("a cost needs sizes")
        if self.ranks == 1 and is_simple(sizes, self.rules) and not drop_last and len(sizes):
            batches = [[batch.tolist()] for batch in tight_cut(sizes, self.rules)]
            return _shuffled(batches, key)
        places = np.arange(len(sizes))
        survey = sizes[:: max(len(sizes) // _SURVEY, 1)]
        strips = best_strips(survey, self.rules)
        if drop_last and len(sizes):
            stays = without_last(
                sizes, self.rules, strips=strips, multiple_of=self.ranks if self.ranks > 1 else 1
            )
            places, sizes = places[stays], sizes[stays]
        if not len(sizes):
            return []
        if len(sizes) < self.ranks:
            raise UnevenRanksError(f"{len(sizes)} samples for {self.ranks} ranks")
        block = solve(
            sizes[None],
            self.rules,
            strips=strips,
            ranks=self.ranks,
            keys=None if key is None else lambda rounds: _words(key, rounds)[None],
        )
        order = places[block.samples].tolist()
        bounds = zip(block.starts.tolist(), block.stops.tolist(), strict=True)
        batches = [order[start:stop] for start, stop in bounds]
        return [batches[i : i + self.ranks] for i in range(0, len(batches), self.ranks)]


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
    ) -> list[list[list[int]]]:
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
        rounds = [batches[i : i + self.ranks] for i in range(0, len(batches), self.ranks)]
        return _shuffled(rounds, key)


def _shuffled(rounds: list[list[list[int]]], key: tuple[int, ...] | None) -> list[list[list[int]]]:
    if key is None or not rounds:
        return rounds
    return [rounds[i] for i in np.argsort(_words(key, len(rounds)), kind="stable")]


def _words(key: tuple[int, ...], count: int) -> npt.NDArray[np.uint64]:
    seed, *rest = key
    return shuffled_keys(seed, *rest, _ROUND_STREAM, numbers=np.arange(count))
