"""The windows of an epoch: where they begin and end, and how many micro-batches they need."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cursor import BoolArray
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.numbers import Numbers, epochs_to_count, number_for_all
from torchbudget.plan.order import EpochOrder, Order
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import best_strips, default_window, rounds_needed, without_last

# Samples that are planned by one call: enough to drown the calls' own time.
# Blocks grow up to it, so that the first micro-batch waits for one window only.
_BLOCK_SAMPLES: Final = 2**18
# Cutting along several axes makes more calls per window.
_WIDE_BLOCK_SAMPLES: Final = 2**19
# Samples whose capacities tell how many micro-batches a window will have.
_SURVEY: Final = 4096
# Of a window: samples that cost nothing fit in any number, and 64 bits count the positions.
_MOST_POSITIONS: Final = 2**62
_ONE_RANK: Final = Ranks()
_AS_NEEDED: Final = Numbers()


class EpochWindows:
    """The windows of every epoch, as a function of (seed, epoch, position).

    Args:
        sizes: of all samples.
        rules: what a micro-batch may be.
        order: which sample stands at which position.
        ranks: that share each window; with `even_sums` a window is an optimizer step, otherwise
            every micro-batch is one.
        window: positions that are sorted and cut together, at least as many as there are ranks;
            `None`: see `default_window`.
        drop_last: drop an incomplete last window (where a window is a step), or else the last
            micro-batch that could still have taken a sample.
        numbers: of micro-batches that each rank is to have.
        counted_by: the windows whose epochs decide which number "auto" is; `None`: these.

    Raises:
        UnevenRanksError: fewer samples than ranks.
        OptionError: nothing would be left of an epoch; or a step has fewer samples than it is to
            have micro-batches.
    """

    def __init__(
        self,
        sizes: SizeTable,
        rules: BatchRules,
        order: Order,
        ranks: Ranks = _ONE_RANK,
        *,
        window: int | None = None,
        drop_last: bool = False,
        numbers: Numbers = _AS_NEEDED,
        counted_by: EpochWindows | None = None,
    ) -> None:
        self.sizes = sizes
        self.rules = rules
        self.order = order
        self.ranks = ranks
        self.drop_last = drop_last
        self.numbers = numbers
        self._counted_by = counted_by
        number = ranks.number
        if len(order) < number:
            raise UnevenRanksError(
                f"{len(order)} samples cannot be dealt to {number} ranks: every rank needs at "
                "least one; use fewer ranks"
            )
        # Sizes of up to about 4,096 samples, evenly spaced over the data set.
        survey = np.asarray(sizes.values[:: max(len(sizes) // _SURVEY, 1)])
        if window is None:
            each = float((1 / rules.capacity(survey, rules.budget_bytes)).mean())
            # Epochs that are not shuffled are alike anyway: there, no window is too wide.
            positions = len(order) if order.shuffle else 4 * len(order)
            window = default_window(number, positions=positions, micro_batches=each)
        window = min(window, _MOST_POSITIONS)
        if window < number:
            name = "samples_per_step" if ranks.even_sums else "window"
            raise OptionError(f"{name}={window} is below the number of ranks, {number}")
        if ranks.even_sums and drop_last and len(order) < window:
            raise OptionError(
                f"drop_last=True leaves nothing: {len(order)} samples do not fill one step of "
                f"{window}"
            )
        numbers.check_step(window, number)
        # Only samples that no other fits beside can make a window impossible to deal evenly, and
        # none of a multiple of the ranks' number.
        pairs = bool(rules.capacity(sizes.largest, rules.budget_bytes) >= 2)
        self.window = window if ranks.even_sums or pairs else window - window % number
        self._last_is_even = number == 1 or pairs
        self._all_are_even = self._last_is_even or self.window % number == 0
        self._strips = best_strips(survey[: self.window], rules)
        self._epoch_order: tuple[int, EpochOrder] | None = None
        self._epoch_count: tuple[int, tuple[int, int]] | None = None

    @cached_property
    def batches_per_epoch(self) -> int | None:
        """Micro-batches of every epoch on each rank; `None`: as many as it needs.

        For "auto" 10 to 100 epochs are counted, once: up to 30 million samples, or ten epochs.
        """
        if self._counted_by is not None:
            return self._counted_by.batches_per_epoch
        if self.numbers.per_epoch != "auto":
            return self.numbers.per_epoch
        epochs = epochs_to_count(len(self.order), shuffle=self.order.shuffle)
        least, most = zip(*(self._count(epoch, 0) for epoch in epochs), strict=True)
        return number_for_all(least, min(most))

    def _count(self, epoch: int, start: int) -> tuple[int, int]:
        """Micro-batches on each rank that the windows from `start` on need, and can be split to.

        Takes O(samples) from there on, in a part of the time that planning them takes.

        Raises:
            UnevenRanksError: a window cannot be dealt evenly.
            OptionError: a step needs more micro-batches than it is to have.
        """
        counted = self._epoch_count  # read once: another thread may count another epoch
        if start == 0 and counted is not None and counted[0] == epoch:
            return counted[1]
        tail, end = self._tail(epoch, start)
        blocks = self._whole(start, tail)
        needed = [self._needed(epoch, begins, self.window, number) for begins, number in blocks]
        whole = np.concatenate([np.empty(0, np.int64), *needed])
        last = self._needed(epoch, tail, end - tail, left=self._stays(epoch, tail, end))
        largest = max(int(whole.max(initial=0)), int(last.max(initial=0)))
        self.numbers.check_needed(epoch, largest, self.ranks.number)
        least = int(self.numbers.least(whole, full=True).sum())
        least += int(self.numbers.least(last, full=end - tail >= self.window).sum())
        found = least, self._most(epoch, start)
        if start == 0:
            self._epoch_count = epoch, found
        return found

    def _needed(
        self, epoch: int, start: int, length: int, windows: int = 1, left: BoolArray | None = None
    ) -> IntArray:
        """Micro-batches that each rank needs of windows, shape `(windows,)`; `(0,)` of nothing."""
        if not length or (left is not None and not left.any()):
            return np.empty(0, np.int64)
        sizes = self._samples(epoch, start, length, windows, left)[1]
        return rounds_needed(self.rules, sizes, self.ranks, strips=self._strips)

    def _most(self, epoch: int, start: int) -> int:
        """Micro-batches that each rank can have of the windows from `start` on."""
        tail, end = self._tail(epoch, start)
        stays = self._stays(epoch, tail, end)
        last = end - tail if stays is None else int(stays.sum())
        whole, ranks = (tail - start) // self.window, self.ranks.number
        return whole * self.numbers.most(self.window, ranks) + self.numbers.most(last, ranks)

    def _whole(self, start: int, tail: int) -> Iterator[tuple[int, int]]:
        """Where whole windows from `start` to `tail` begin, and how many are planned in one call.

        More and more of them.
        """
        samples = _WIDE_BLOCK_SAMPLES if self.sizes.axes > 1 else _BLOCK_SAMPLES
        most = 1 if self.rules.packing is not None else max(samples // self.window, 1)
        windows = 1
        while start < tail:
            windows = min(windows, (tail - start) // self.window)
            yield start, windows
            start += windows * self.window
            windows = min(2 * windows, most)

    def _end(self, start: int) -> int:
        """Where the epoch ends that goes on at `start`, less an incomplete step that is dropped."""
        total = len(self.order)
        if self.drop_last and self.ranks.even_sums:
            return total - (total - start) % self.window
        return total

    def _tail(self, epoch: int, start: int) -> tuple[int, int]:
        """Where the last window starts and ends.

        It is the incomplete one, joined by the one before where it cannot be dealt evenly alone.
        With `drop_last` it is also the one whose last micro-batch may be dropped.
        """
        end = self._end(start)
        rest = (end - start) % self.window
        if not rest and (start == end or not self.drop_last or self.ranks.even_sums):
            return end, end
        tail = end - (rest or self.window)
        joined = tail - self.window
        return (joined if joined >= start and not self._dealable(epoch, tail, end) else tail), end

    def _dealable(self, epoch: int, tail: int, end: int) -> bool:
        if end - tail < self.ranks.number:
            return False
        if self._last_is_even:
            return True
        try:
            self._needed(epoch, tail, end - tail, left=self._stays(epoch, tail, end))
        except UnevenRanksError:
            return False
        return True

    def _stays(self, epoch: int, tail: int, end: int) -> BoolArray | None:
        """Which samples of the last window stay, shape `(end − tail,)`; `None`: all."""
        if tail == end or not self.drop_last or self.ranks.even_sums:
            return None
        sizes = self._sizes_at(self._order_of(epoch).indices(tail, end))
        stays = without_last(self.rules, sizes, self.ranks, strips=self._strips)
        if stays.sum() < self.ranks.number:
            if not tail:
                raise OptionError(
                    f"drop_last=True leaves nothing of the epoch's {end} samples: they do not "
                    "fill one micro-batch on each rank"
                )
            stays[:] = False
        return None if stays.all() else stays

    def _samples(
        self, epoch: int, start: int, length: int, windows: int = 1, left: BoolArray | None = None
    ) -> tuple[IntArray, npt.NDArray[Any]]:
        """The indices of windows' samples, and their sizes, shape `(windows, S)` or with `d`.

        Raises:
            UnevenRanksError: there are fewer than ranks.
        """
        indices = self._order_of(epoch).indices(start, start + windows * length)
        if left is not None:
            indices = indices[left]
        if len(indices) < self.ranks.number:
            raise UnevenRanksError(
                f"{len(indices)} samples are left of epoch {epoch}, too few for "
                f"{self.ranks.number} ranks; use at most {len(indices)}, or start the next epoch"
            )
        sizes = self._sizes_at(indices)
        return indices, sizes.reshape(windows, len(indices) // windows, *sizes.shape[1:])

    def _sizes_at(self, indices: IntArray) -> npt.NDArray[Any]:
        # The indices are in range by construction: "clip" spares NumPy checking each of them.
        return self.sizes.values.take(indices, axis=0, mode="clip")

    def _order_of(self, epoch: int) -> EpochOrder:
        known = self._epoch_order  # read once: another thread may read another epoch
        if known is None or known[0] != epoch:
            known = self._epoch_order = epoch, self.order.epoch(epoch)
        return known[1]
