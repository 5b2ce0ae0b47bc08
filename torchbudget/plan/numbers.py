"""Numbers of micro-batches that every epoch or step is to have on each rank, by splitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from torchbudget.checks import optional
from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import OptionError

PerEpoch: TypeAlias = int | Literal["auto"] | None

# Epochs that are counted to find a number for all: as many as have so many samples.
_COUNTED_SAMPLES: Final = 3 * 10**7
_LEAST_EPOCHS: Final = 10
_MOST_EPOCHS: Final = 100
# The fraction of the golden ratio, by whose multiples numbers are rounded up or down: the windows
# that get one more are then spread evenly, whatever share of them that is (Weyl's sequence).
_GOLDEN: Final = 0x9E3779B97F4A7C15
_BITS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Micro-batches that each rank is to have; `None`: those that it needs.

    Attributes:
        per_epoch: in every epoch; "auto": see `number_for_all`.
        per_step: in every full window, which is a step; a smaller last one has at most as many.
    """

    per_epoch: PerEpoch = None
    per_step: int | None = None

    @classmethod
    def of(cls, per_epoch: Any, per_step: Any, *, samples_per_step: int | None) -> Numbers:
        """The numbers as users give them.

        Raises:
            OptionError: one is no number, or `per_step` is given where windows are no steps.
        """
        if isinstance(per_epoch, str) and per_epoch != "auto":
            raise OptionError(f'batches_per_epoch must be an int or "auto", got {per_epoch!r}')
        if per_epoch != "auto":
            per_epoch = optional("batches_per_epoch", per_epoch)
        per_step = optional("micro_batches_per_step", per_step)
        if per_step is not None and samples_per_step is None:
            raise OptionError(
                f"micro_batches_per_step={per_step} is a number of each step: it needs "
                "samples_per_step"
            )
        return cls(per_epoch=per_epoch, per_step=per_step)

    def __bool__(self) -> bool:
        """Whether any is given."""
        return self != Numbers()

    def least(self, needed: IntArray, *, full: bool) -> IntArray:
        """Those that windows get at the least that need so many, shape `(windows,)`."""
        if self.per_step is None or not full:
            return needed
        return np.full_like(needed, self.per_step)

    def most(self, samples: int, ranks: int) -> int:
        """Those that a window of so many samples can be split to."""
        most = samples // ranks
        return most if self.per_step is None else min(most, self.per_step)

    def check_step(self, samples: int, ranks: int) -> None:
        """Raise an `OptionError` where a step has fewer samples than micro-batches."""
        if self.per_step is not None and samples < self.per_step * ranks:
            raise OptionError(
                f"micro_batches_per_step={self.per_step} on each of {ranks} ranks are more than "
                f"the samples of a step: samples_per_step must be at least "
                f"{self.per_step * ranks}, got {samples}"
            )

    def check_needed(self, epoch: int, needed: int, ranks: int) -> None:
        """Raise an `OptionError` where a step needs more micro-batches than it is to have."""
        if self.per_step is not None and needed > self.per_step:
            raise OptionError(
                f"a step of epoch {epoch} needs {needed} micro-batches on each of {ranks} ranks, "
                f"and micro_batches_per_step={self.per_step}: give at least {needed}, or fewer "
                "samples_per_step, or a larger budget"
            )


class Allotment:
    """The micro-batches that the coming windows of an epoch get on each rank.

    Each gets those that it needs, and its share of those that the epoch has to spare, as far as its
    samples, and those of later windows, allow.

    Args:
        least: that the coming windows need together.
        most: that they can be split to.
        spare: that they get beyond the least, at most `most - least`.
    """

    def __init__(self, *, least: int, most: int, spare: int) -> None:
        self._counted = [(least, spare)]
        self._most = most

    def give(self, least: IntArray, most: int, numbers: IntArray) -> IntArray:
        """Those of the next windows, shape `(windows,)`; O(windows) in Python.

        Args:
            least: that they need, likewise.
            most: that each of them can be split to.
            numbers: of the windows, likewise: they decide what is rounded up.
        """
        given = []
        for low, number in zip(least.tolist(), numbers.tolist(), strict=True):
            left, spare = self._counted[-1]
            self._most -= most
            share = (spare * low << _BITS) // left + number * _GOLDEN % 2**_BITS >> _BITS
            beyond = spare - (self._most - (left - low))  # what later windows have no samples for
            share = min(max(share, beyond), most - low)
            self._counted.append((left - low, spare - share))
            given.append(low + share)
        return np.array(given)

    def counted(self) -> IntArray:
        """What was left to need, and to spare: before each window since the last call, and now.

        Shape `(windows + 1, 2)`.
        """
        counted = np.array(self._counted)
        del self._counted[:-1]
        return counted


def spare_of(number: int, least: int, most: int, *, epoch: int, ranks: int) -> int:
    """Those of an epoch's micro-batches that are more than it needs.

    Args:
        number: that each rank is to have.
        least: that it needs.
        most: that the epoch can be split to.
        epoch: its number.
        ranks: that share it.

    Raises:
        OptionError: the number is below the least, or above the most.
    """
    if number < least:
        raise OptionError(
            f"epoch {epoch} needs {least:,} micro-batches on each of {ranks} ranks, and "
            f"batches_per_epoch={number}: give at least {least}, with some to spare for later "
            "epochs, or a larger budget"
        )
    if number > most:
        raise OptionError(
            f"epoch {epoch} can be split into {most:,} micro-batches on each of {ranks} ranks at "
            f"the most, and batches_per_epoch={number}: give between {least} and {most}"
        )
    return number - least


def epochs_to_count(positions: int, *, shuffle: bool) -> range:
    """The epochs that tell how many micro-batches any needs: all are alike if none is shuffled."""
    epochs = min(max(_COUNTED_SAMPLES // positions, _LEAST_EPOCHS), _MOST_EPOCHS)
    return range(epochs if shuffle else 1)


def number_for_all(least: Sequence[int], most: int) -> int:
    """A number of micro-batches that hardly any epoch exceeds, if several need so many.

    It is the largest, and half of what they differ by. Of 30 normally distributed numbers that is
    about 4 standard deviations above their mean.

    Args:
        least: that each of them needs.
        most: that all can be split to.
    """
    beyond = max(-(-(max(least) - min(least)) // 2), 1) if len(least) > 1 else 0
    return min(max(least) + beyond, most)
