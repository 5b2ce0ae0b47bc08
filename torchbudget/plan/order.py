"""The order of the samples: which one stands at which position of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OptionError
from torchbudget.plan.groups import NO_LABELS, NONE, Labels, Members, numbered, unit_labels
from torchbudget.plan.mixture import Mixture, Sources, Turns
from torchbudget.plan.oversize import Oversize, skipped_samples
from torchbudget.plan.permutation import Permutation, Purpose, random_words
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable

_permutation = lru_cache(maxsize=4)(Permutation)  # windows of one pass follow each other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """The order of a pass over the data: a function of (seed, pass, position) alone.

    Attributes:
        dataset_length: samples in the data set.
        skipped: sorted indices that never appear, shape `(k,)`.
        shuffle: draw at random; otherwise the order of the data set.
        weights: relative frequencies of the samples, shape `(dataset_length,)`, copied: each
            position draws independently, with replacement. `None`: a pass has every sample once.
        sources: of a mixture.
        seed: of all randomness.
        groups: if each window has one group; positions are those of `Members.members`, each
            group in an order of its own.
        names: of these groups, for messages.
        units: samples that stay together. Positions are those of the units.
        labels: groups of the samples, if windows mix them, and their units.

    Raises:
        OptionError: options that cannot hold together.
    """

    dataset_length: int
    skipped: IntArray
    shuffle: bool = True
    weights: Any = None
    sources: Sources | None = None
    seed: int = 0
    groups: Members | None = None
    names: Sequence[Any] = (None,)
    units: Members | None = None
    labels: Labels = NO_LABELS
    _cumulative: npt.NDArray[np.float64] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(
        cls,
        table: SizeTable,
        rules: BatchRules,
        oversize: Oversize,
        *,
        apart: bool,
        groups: npt.ArrayLike | None,
        units: Any,
        weights: npt.ArrayLike | Mixture | None = None,
        **options: Any,
    ) -> Order:
        """The order of a data set, with labels as users give them.

        Args:
            table: sizes of the samples.
            rules: of a micro-batch, for the samples that are skipped.
            oversize: see `oversized`.
            apart: windows are of one group each.
            groups: see `numbered`.
            units: see `unit_labels`.
            weights: as attribute, or a mixture.
            options: further attributes.
        """
        labels, whole = unit_labels(units)
        of_unit = None if units is None else numbered("units", labels, len(table))[1]
        if whole and rules.batch_size_multiple > 1:
            raise OptionError(
                "units that stay in one micro-batch set its number of samples: leave "
                f"batch_size_multiple at 1, got {rules.batch_size_multiple}"
            )
        in_one = None if of_unit is None or not whole else Members.of(of_unit)
        skipped = skipped_samples(table, rules, oversize, in_one)
        together = None if of_unit is None else Members.of(of_unit, skipped)
        found, names, of_group = None, [None], None
        if groups is not None:
            every, of_group = numbered("groups", groups, len(table))
            of_item = of_group
            if together is not None:
                of_item, each = of_group[together.leaders], of_group[together.members]
                mixed = np.flatnonzero(each != np.repeat(of_item, together.counts))
                if mixed.size:
                    raise OptionError(
                        "the samples of a unit must have one group: sample "
                        f"{together.members[mixed[0]]} has another group than the first of its unit"
                    )
            if apart:
                found = Members.of(of_item, skipped if together is None else NONE)
                names, of_group = every[of_item[found.leaders]].tolist(), None
        sources = None
        if isinstance(weights, Mixture):
            sources, weights = Sources.of(weights, table, skipped), None
        return cls(
            dataset_length=len(table),
            skipped=skipped,
            weights=weights,
            sources=sources,
            groups=found,
            names=names,
            units=together,
            labels=Labels(of_group, of_unit, whole),
            **options,
        )

    def __post_init__(self) -> None:
        if self.endless and (self.groups is not None or self.units is not None):
            raise OptionError(
                "weights draw single samples: leave out units; and groups, unless samples_per_step "
                "is given, so that a window mixes them"
            )
        if self.weights is None:
            return
        if not self.shuffle:
            raise OptionError("weights draw at random: they need shuffle=True, got shuffle=False")
        if np.ma.is_masked(self.weights):  # asarray would read the values under the mask
            raise OptionError("weights must be numbers, but some are masked: fill them first")
        try:
            weights = np.asarray(self.weights, np.float64).copy()
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: it has a graph
            raise OptionError(f"weights must be numbers: {error}") from error
        object.__setattr__(self, "weights", weights)
        if weights.shape != (self.dataset_length,):
            raise OptionError(
                f"expected one weight per sample, shape ({self.dataset_length},), "
                f"got {weights.shape}"
            )
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            raise OptionError(
                f"weights must be finite and at least 0; weight {bad[0]} is {weights[bad[0]]}"
            )
        weights = np.delete(weights, self.skipped)
        if not weights.any():
            raise OptionError("at least one sample that fits must have a weight above 0")
        # Weights are relative: their sum must not overflow.
        object.__setattr__(self, "_cumulative", np.cumsum(weights / weights.max()))

    def __len__(self) -> int:
        """Positions in a pass: samples to draw from, or units."""
        return self.samples if self.units is None else len(self.units)

    @property
    def endless(self) -> bool:
        """Whether samples are drawn without an end, so that the first pass never ends."""
        return self.weights is not None or self.sources is not None

    @property
    def samples(self) -> int:
        """Samples to draw from."""
        return self.dataset_length - len(self.skipped)

    def indices(
        self, key: tuple[int, int], start: int, stop: int, turns: Turns | None = None
    ) -> IntArray:
        """The indices of the samples at positions `start … stop` of a pass, int64.

        Shape `(stop − start,)`, or more for units, one after the other. O(stop − start) anywhere in
        the pass, times log N with weights; of a mixture times the depth of its tree, and as much
        for each source. Where windows are of one group each, the positions must be of one group.

        Args:
            key: of the pass: the epoch that passes are counted from, and its number from there.
            start: first position.
            stop: the position after the last.
            turns: of a mixture's sources; `None`: those from the beginning on.
        """
        if self.sources is not None:
            path = (self.seed, key[0], Purpose.SOURCES) if self.shuffle else ()
            return self.sources.indices(turns, start, stop, *path)
        found = self._items(*key, start, stop)
        return found if self.units is None else self.units.samples(found)

    def _items(self, first: int, number: int, start: int, stop: int) -> IntArray:
        groups, key = self.groups, (first, Purpose.PASS, number)
        places = np.arange(start, stop)
        if self._cumulative is not None:
            words = random_words(
                self.seed, first, Purpose.DRAW, number, start=start, count=len(places)
            )
            total = self._cumulative[-1]
            # Words as floats in [0, 1), by their upper 53 bits.
            uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
            drawn = np.searchsorted(self._cumulative, uniform * total, side="right")
            # Rounding may move a draw to the total itself: take the last positive weight.
            last = np.searchsorted(self._cumulative, total, side="left")
            places = np.minimum(drawn, last).astype(np.int64)
        elif self.shuffle and groups is None:
            places = _permutation(len(self), self.seed, *key).stretch(start, stop)
        elif self.shuffle and groups is not None:
            group = groups.at(start)
            before, end = groups.firsts[group : group + 2].tolist()
            permutation = _permutation(end - before, self.seed, *key, group)
            places = permutation.stretch(start - before, stop - before) + before
        if groups is not None:
            return groups.members[places].astype(np.int64)
        if self.units is None and len(self.skipped):  # from the number of a kept sample
            kept_before = self.skipped - np.arange(len(self.skipped))
            places = places + np.searchsorted(kept_before, places, side="right")
        return places
