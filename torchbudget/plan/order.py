"""Which sample stands at which position of an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import OptionError
from torchbudget.plan.permutation import Permutation, Stream, WordArray, random_words, scale

FloatArray = npt.NDArray[np.float64]

_permutation = lru_cache(maxsize=4)(Permutation)  # windows of one pass follow each other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Order:
    """The order of an epoch: a function of (seed, epoch, position) alone.

    Attributes:
        dataset_length: samples in the data set.
        skipped: sorted indices that never appear, shape `(k,)`.
        num_samples: positions in an epoch; `None`: as many as there are samples to draw from.
            Without replacement and past that number, the samples come in several passes, as in
            `torch.utils.data.RandomSampler`.
        shuffle: draw at random; otherwise the order of the data set.
        replacement: each position draws independently.
        weights: relative frequencies of the samples, shape `(dataset_length,)`. Without replacement
            a position draws among the samples that are left, in proportion to their weights.
        seed: of all randomness.

    Raises:
        OptionError: options that cannot hold together.
    """

    dataset_length: int
    skipped: IntArray
    num_samples: int | None = None
    shuffle: bool = True
    replacement: bool = False
    weights: FloatArray | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.shuffle and (self.replacement or self.weights is not None):
            raise OptionError(
                "replacement and weights draw at random: they need shuffle=True, got shuffle=False"
            )
        if self.num_samples is None:
            object.__setattr__(self, "num_samples", self.available)
        if self.weights is not None:
            self._check_weights(self.weights)

    def _check_weights(self, weights: FloatArray) -> None:
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
        positive = int(np.count_nonzero(self._kept(weights)))
        wanted = 1 if self.replacement else len(self)
        if positive < wanted:
            raise OptionError(
                f"only {positive} samples have a weight above 0; drawing {len(self)} of them needs "
                "replacement=True" + ("" if positive else " and a positive weight")
            )

    def __len__(self) -> int:
        """Positions in an epoch."""
        assert self.num_samples is not None  # noqa: S101  (set in __post_init__)
        return self.num_samples

    @property
    def available(self) -> int:
        """Samples to draw from."""
        return self.dataset_length - len(self.skipped)

    def check_length(self, dataset_length: int) -> None:
        """Raise an `OptionError` where a data set has not one sample for each size."""
        if dataset_length != self.dataset_length:
            raise OptionError(
                f"the sampler has {self.dataset_length:,} sizes, but the data set has "
                f"{dataset_length:,} samples: pass one size for each sample"
            )

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch."""
        return EpochOrder(self, epoch)

    def _kept(self, values: FloatArray) -> FloatArray:
        return np.delete(values, self.skipped) if len(self.skipped) else values

    def to_index(self, ranks: IntArray) -> IntArray:
        """The index in the data set of the kept sample number `ranks`; O(log skipped) each."""
        if not len(self.skipped):
            return ranks
        kept_before = self.skipped - np.arange(len(self.skipped))
        index: IntArray = ranks + np.searchsorted(kept_before, ranks, side="right")
        return index


class EpochOrder:
    """One epoch's order, evaluated over ranges of positions."""

    __slots__ = ("_cumulative", "_drawn", "_epoch", "_order")

    def __init__(self, order: Order, epoch: int) -> None:
        self._order = order
        self._epoch = epoch
        self._cumulative: FloatArray | None = None
        self._drawn: IntArray | None = None
        if order.weights is not None:
            weights = order._kept(order.weights)
            if order.replacement:
                # Weights are relative: their sum must not overflow.
                self._cumulative = np.cumsum(weights / weights.max())
            else:
                self._drawn = self._weighted_without_replacement(weights)

    def _weighted_without_replacement(self, weights: FloatArray) -> IntArray:
        """The first `num_samples` of Efraimidis and Spirakis' order (2006).

        Each sample waits for a time drawn from the exponential distribution of its weight; the
        order of those times is the order of successive weighted draws. O(N log N).
        """
        words = random_words(self._order.seed, self._epoch, Stream.WAIT, count=len(weights))
        # Compared by their logarithms, in which no weight above 0 waits as long as one of 0.
        with np.errstate(divide="ignore", invalid="ignore"):
            waiting = np.log(-np.log1p(-_uniform(words))) - np.log(weights)
        return np.argsort(waiting, kind="stable")[: len(self._order)]

    def indices(self, start: int, stop: int) -> IntArray:
        """The indices of the samples at positions `start … stop`, int64, shape `(stop − start,)`.

        O(stop − start) anywhere in the epoch (times log N with weights).
        """
        order = self._order
        if self._drawn is not None:
            ranks = self._drawn[start:stop]
        elif order.replacement:
            key, count = (self._epoch, Stream.DRAW), stop - start
            words = random_words(order.seed, *key, start=start, count=count)
            ranks = self._draw(words)
        else:
            ranks = self._without_replacement(start, stop)
        return order.to_index(ranks)

    def _draw(self, words: WordArray) -> IntArray:
        if self._cumulative is None:
            n = self._order.available
            if n <= 2**32:
                return scale(words, n)
            return np.minimum((_uniform(words) * n).astype(np.int64), n - 1)
        total = self._cumulative[-1]
        drawn = np.searchsorted(self._cumulative, _uniform(words) * total, side="right")
        # Rounding may carry a draw onto the total itself: the last sample of a positive weight.
        last = np.searchsorted(self._cumulative, total, side="left")
        indices: IntArray = np.minimum(drawn, last).astype(np.int64)
        return indices

    def _without_replacement(self, start: int, stop: int) -> IntArray:
        n = self._order.available
        parts = []
        while start < stop:
            number, first = divmod(start, n)
            count = min(stop - start, n - first)
            if self._order.shuffle:
                key = (self._epoch, Stream.PASS, number)
                permutation = _permutation(n, self._order.seed, *key)
                parts.append(permutation.stretch(first, first + count))
            else:
                parts.append(np.arange(first, first + count))
            start += count
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])


def _uniform(words: WordArray) -> FloatArray:
    """Words as floats in [0, 1), by their upper 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def weights_of(weights: npt.ArrayLike | None) -> FloatArray | None:
    """Relative frequencies that a user gives, as an array of their own.

    What they may be is `Order`'s to check.

    Raises:
        OptionError: they are no numbers, or some are masked.
    """
    if np.ma.is_masked(weights):  # an array would have what is under the mask
        raise OptionError("weights must be numbers, and some are masked: fill them, with 0 perhaps")
    try:
        return None if weights is None else np.asarray(weights, np.float64).copy()
    except (TypeError, ValueError, RuntimeError) as error:  # the last of a tensor's graph
        raise OptionError(f"weights must be numbers: {error}") from error
