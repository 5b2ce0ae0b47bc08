"""The plan of an epoch: which samples form which micro-batch, on which rank, in which order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import CostModel, IntArray
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cursor import BoolArray, Position
from torchbudget.plan.drop import without_last
from torchbudget.plan.fingerprint import Plain, cost_fingerprint
from torchbudget.plan.order import EpochOrder, Order
from torchbudget.plan.permutation import WordArray, shuffled_keys
from torchbudget.plan.report import PlanReport, ReportBuilder
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import Block, best_strips, run_costs, solve

# Samples that are planned by one call: enough to drown the calls' own time.
# Blocks grow up to it, so that the first micro-batch waits for one window only.
_BLOCK_SAMPLES: Final = 2**18
# Evening out ranks and cutting along several axes make more calls per window.
_WIDE_BLOCK_SAMPLES: Final = 2**19
# Samples whose capacities tell how many micro-batches a window will have.
_SURVEY: Final = 4096
_ROUND_STREAM: Final = 3

Keys: TypeAlias = Callable[[int], WordArray]


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Consecutive windows of one length.

    Attributes:
        start: position of the first window's first sample.
        length: positions in each window.
        left: which positions of the one window were dealt, shape `(length,)`; `None`: all.
    """

    start: int
    length: int
    left: BoolArray | None

    def position(self, epoch: int, window: int, rounds: int) -> Position:
        """The position behind `rounds` rounds of window number `window`."""
        start = self.start + window * self.length
        return Position(
            epoch=epoch, start=start, stop=start + self.length, left=self.left, rounds=rounds
        )


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The solution of a stretch.

    Attributes:
        stretch: where it is.
        indices: indices in the data set grouped by micro-batch, shape `(windows·S,)`.
        block: the micro-batches.
    """

    stretch: Stretch
    indices: IntArray
    block: Block


def default_window(positions: int, ranks: int, micro_batches: float) -> int:
    """How many shuffled positions are sorted and cut together where nobody says.

    Padding falls as windows grow, and so does what their last micro-batches leave unfilled. But
    samples that share every window share their micro-batches in every epoch.

    Args:
        positions: of an epoch.
        ranks: how many ranks share each window.
        micro_batches: that a sample makes, on average.

    Returns:
        4,096 for each rank, or 32 micro-batches on each where that is more; at most a quarter of
        the epoch, unless that is less than 8 micro-batches on each rank. At least `ranks`.
    """
    fill = ranks / micro_batches
    window = min(max(4096 * ranks, 32 * fill), max(positions / 4, 8 * fill))
    return max(math.ceil(window), ranks)


class Plan:
    """Micro-batches of every epoch, as a function of (seed, epoch, position).

    Nothing is kept per sample beside the sizes. The first micro-batch of an epoch, or after any
    position, comes after planning one window.

    Args:
        sizes: of all samples.
        rules: what a micro-batch may be.
        order: which sample stands at which position.
        window: positions that are sorted and cut together, at least `ranks`; `None`: see
            `default_window`.
        step_per_window: a window is an optimizer step, so that ranks wait for each other once per
            window; otherwise every micro-batch is a step.
        drop_last: drop an incomplete last window (with `step_per_window`), or else the last
            micro-batch that could still have taken a sample.
        ranks: how many ranks share each window.

    Raises:
        UnevenRanksError: fewer samples than ranks.
        OptionError: nothing would be left of an epoch.
    """

    def __init__(
        self,
        sizes: SizeTable,
        rules: BatchRules,
        order: Order,
        *,
        window: int | None = None,
        step_per_window: bool = False,
        drop_last: bool = False,
        ranks: int = 1,
    ) -> None:
        self.sizes = sizes
        self.rules = rules
        self.order = order
        self.step_per_window = step_per_window
        self.drop_last = drop_last
        self.ranks = ranks
        if len(order) < ranks:
            raise UnevenRanksError(
                f"{len(order)} samples cannot be dealt to {ranks} ranks: every rank needs at least "
                "one; use fewer ranks"
            )
        survey = self._survey()
        if window is None:
            each = float((1 / rules.capacity(survey, rules.budget_bytes)).mean())
            # Epochs that are not shuffled are alike anyway: there, no window is too wide.
            positions = len(order) if order.shuffle else 4 * len(order)
            window = default_window(positions, ranks, each)
        if window < ranks:
            name = "samples_per_step" if step_per_window else "window"
            raise OptionError(f"{name}={window} is below the number of ranks, {ranks}")
        if step_per_window and drop_last and len(order) < window:
            raise OptionError(
                f"drop_last=True leaves nothing: {len(order)} samples do not fill one step of "
                f"{window}"
            )
        # Only samples that no other fits beside can make a window impossible to deal evenly, and
        # none of a multiple of the ranks' number.
        pairs = bool(rules.capacity(self._largest, rules.budget_bytes) >= 2)
        self.window = window if step_per_window or pairs else window - window % ranks
        self._always_even = ranks == 1 or pairs
        self._strips = best_strips(survey[: self.window], rules)
        self._epoch_order: tuple[int, EpochOrder] | None = None
        self._turns: tuple[Position, IntArray] | None = None

    @property
    def _largest(self) -> npt.NDArray[Any]:
        return self.sizes.largest if self.sizes.axes > 1 else self.sizes.largest[0]

    def _survey(self) -> npt.NDArray[Any]:
        """Sizes of up to about 4,096 samples, evenly spaced over the data set."""
        every = max(len(self.sizes) // _SURVEY, 1)
        return np.asarray(self.sizes.values[::every])

    def with_cost(self, cost: CostModel) -> Plan:
        """The same windows, cut by another cost."""
        return Plan(
            self.sizes,
            replace(self.rules, cost=cost),
            self.order,
            window=self.window,
            step_per_window=self.step_per_window,
            drop_last=self.drop_last,
            ranks=self.ranks,
        )

    @cached_property
    def dealing(self) -> Plain:
        """What must be the same for a window to be cut and dealt the same way."""
        rules, largest = self.rules, self.sizes.largest
        balance = rules.balance
        return {
            "cost": cost_fingerprint(rules.cost, largest),
            "budget_bytes": rules.budget_bytes,
            "size_multiple": rules.size_multiple,
            "max_batch_size": rules.max_batch_size,
            "batch_size_multiple": rules.batch_size_multiple,
            "window": self.window,
            "step_per_window": self.step_per_window,
            "drop_last": self.drop_last,
            "ranks": self.ranks,
            "balance": None if balance is None else cost_fingerprint(balance, largest),
        }

    # ------------------------------------------------------------------ walking an epoch

    def spans(self, position: Position) -> Iterator[Span]:
        """The windows from `position` on, the one that it stands in included (and whole).

        Raises:
            UnevenRanksError: what is left cannot be dealt evenly; before the first span.
            OptionError: `drop_last` leaves nothing of the epoch.
        """
        first, start = self._first(position)
        tail, end = self._tail(position.epoch, start)
        if not self._always_even:
            # Some window may be impossible to deal: find out before the first micro-batch.
            if self.window % self.ranks:
                for _ in self._regular(position.epoch, start, tail, end):
                    pass
            elif tail < end:
                self._last(position.epoch, tail)
        if first is not None:
            yield first
        yield from self._regular(position.epoch, start, tail, end)

    def _regular(self, epoch: int, start: int, tail: int, end: int) -> Iterator[Span]:
        """Whole windows from `start` to `tail`, and the last one from there to `end`."""
        wide = self.ranks > 1 or self.sizes.axes > 1
        most = max((_WIDE_BLOCK_SAMPLES if wide else _BLOCK_SAMPLES) // self.window, 1)
        if self.rules.packing is not None:
            most = 1
        windows = 1
        while start < tail:
            windows = min(windows, (tail - start) // self.window)
            yield self._span(epoch, start, self.window, windows)
            start += windows * self.window
            windows = min(2 * windows, most)
        if tail < end:
            last = self._last(epoch, tail)
            if last is not None:
                yield last

    def _tail(self, epoch: int, start: int) -> tuple[int, int]:
        """Where the last window starts and ends.

        It is the incomplete one, joined by the one before where it cannot be dealt evenly alone.
        With `drop_last` it is also the one whose last micro-batch may be dropped.
        """
        total = len(self.order)
        rest = (total - start) % self.window
        if self.drop_last and self.step_per_window:
            return total - rest, total - rest
        if not rest and not (self.drop_last and start < total):
            return total, total
        tail = total - (rest or self.window)
        joined = tail - self.window
        if joined >= start and not self._dealable(epoch, tail):
            tail = joined
        return tail, total

    def _dealable(self, epoch: int, tail: int) -> bool:
        if len(self.order) - tail < self.ranks:
            return False
        if self._always_even:
            return True
        try:
            self._last(epoch, tail)
        except UnevenRanksError:
            return False
        return True

    def _last(self, epoch: int, tail: int) -> Span | None:
        """The last window, less what `drop_last` drops of it."""
        total = len(self.order)
        if not self.drop_last or self.step_per_window:
            return self._span(epoch, tail, total - tail)
        sizes = self._sizes_at(self._order_of(epoch).indices(tail, total))
        stays = without_last(
            sizes,
            self.rules,
            strips=self._strips,
            # Of samples that stand alone, only a multiple of the ranks' number can be dealt.
            multiple_of=1 if self._always_even else self.ranks,
        )
        if stays.sum() < self.ranks:
            if not tail:
                raise OptionError(
                    f"drop_last=True leaves nothing of the epoch's {total} samples: they do not "
                    "fill one micro-batch on each rank"
                )
            return None
        return self._span(epoch, tail, total - tail, 1, None if stays.all() else stays)

    def _first(self, position: Position) -> tuple[Span | None, int]:
        """The window that `position` stands in, and where the next one starts.

        What is left of a window under another number of ranks may be too little to be dealt: then
        windows behind it join it.
        """
        total = len(self.order)
        start, stop = position.start, position.stop
        left = np.ones(stop - start, np.bool_) if position.left is None else position.left
        if not left.any():
            return None, stop
        while True:
            if 0 < total - stop < self.ranks:
                left = np.append(left, np.ones(total - stop, np.bool_))
                stop = total
            try:
                return self._span(position.epoch, start, stop - start, 1, left), stop
            except UnevenRanksError:
                if stop == total:
                    raise
            more = min(self.window, total - stop)
            left = np.append(left, np.ones(more, np.bool_))
            stop += more

    # ------------------------------------------------------------------ solving windows

    def _span(
        self,
        epoch: int,
        start: int,
        length: int,
        windows: int = 1,
        left: BoolArray | None = None,
    ) -> Span:
        indices = self._order_of(epoch).indices(start, start + windows * length)
        if left is not None:
            indices = indices[left]
        if len(indices) < self.ranks:
            raise UnevenRanksError(
                f"{len(indices)} samples are left of epoch {epoch}, too few for {self.ranks} "
                f"ranks; use at most {len(indices)}, or start the next epoch"
            )
        sizes = self._sizes_at(indices)
        each = len(indices) // windows
        block = solve(
            sizes.reshape(windows, each, *sizes.shape[1:]),
            self.rules,
            strips=self._strips,
            ranks=self.ranks,
            even_sums=self.step_per_window,
            keys=self._keys(epoch, start, windows, length),
        )
        return Span(Stretch(start, length, left), indices.take(block.samples, mode="clip"), block)

    def _sizes_at(self, indices: IntArray) -> npt.NDArray[Any]:
        # The indices are in range by construction: "clip" spares NumPy checking each of them.
        return self.sizes.values.take(indices, axis=0, mode="clip")

    def _keys(self, epoch: int, start: int, windows: int, length: int) -> Keys | None:
        """Words that shuffle the rounds of each window: a function of the window's place alone."""
        if not self.order.shuffle:
            return None
        places = start + np.arange(windows)[:, None] * length

        def keys(rounds: int) -> WordArray:
            numbers = places + np.arange(rounds)
            return shuffled_keys(self.order.seed, epoch, _ROUND_STREAM, numbers=numbers)

        return keys

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = epoch, self.order.epoch(epoch)
        return self._epoch_order[1]

    # ------------------------------------------------------------------ questions

    def left_of(self, position: Position) -> BoolArray | None:
        """Which positions of the window that `position` stands in are still to come.

        Shape `(stop − start,)`; `None`: all. Plans that window once: O(its samples).
        """
        if not position.rounds:
            return position.left
        if self._turns is None or not self._turns[0].same_window(position):
            self._turns = position, self._turns_of(position)
        return self._turns[1] >= position.rounds

    def _turns_of(self, position: Position) -> IntArray:
        """The round in which each position of a window comes, −1 where none does."""
        start, stop = position.start, position.stop
        block = self._span(position.epoch, start, stop - start, 1, position.left).block
        ascending = np.argsort(block.starts)
        rounds = ascending // self.ranks
        turns = np.empty(len(block.samples), np.int64)
        turns[block.samples] = np.repeat(rounds, (block.stops - block.starts)[ascending])
        if position.left is None:
            return turns
        spread = np.full(stop - start, -1)
        spread[position.left] = turns
        return spread

    def micro_batches(self, position: Position) -> int:
        """Micro-batches of each rank from `position` to the end of its epoch; O(samples left)."""
        rounds = sum(int(span.block.rounds.sum()) for span in self.spans(position))
        return rounds - position.rounds

    def steps(self, position: Position) -> Iterator[int]:
        """How many micro-batches each optimizer step takes on each rank, from `position` on."""
        done = position.rounds
        for span in self.spans(position):
            for rounds in span.block.rounds.tolist():
                yield from [rounds - done] if self.step_per_window else [1] * (rounds - done)
                done = 0

    def batch_bytes(self, indices: IntArray) -> int:
        """Predicted bytes of a micro-batch of these samples."""
        sizes = self._sizes_at(indices)
        ends = np.array([0]), np.array([len(sizes)])
        return int(run_costs(sizes, *ends, self.rules)[0])

    def extremes(self, epoch: int = 0) -> dict[str, IntArray]:
        """The micro-batches of an epoch that are likeliest to fail; O(samples).

        Returns:
            Indices in the data set of the "largest" micro-batch, whose cost is the highest; the
            "longest", of which a single sample would cost the most; and the "shortest".
        """
        best: dict[str, tuple[int, IntArray]] = {}
        for span in self.spans(Position(epoch=epoch)):
            block = span.block
            costs = block.costs(self.rules)
            singles = self.rules.cost.batch_bytes(1, self.rules.padded(block.padded()))
            for name, values in (("largest", costs), ("longest", singles), ("shortest", -singles)):
                number = int(values.argmax())
                if name not in best or values[number] > best[name][0]:
                    held = span.indices[block.starts[number] : block.stops[number]]
                    best[name] = int(values[number]), held
        return {name: indices for name, (_, indices) in best.items()}

    def report(self, epoch: int = 0) -> PlanReport:
        """Plan a whole epoch and sum up what it holds; O(samples)."""
        builder = ReportBuilder(self.sizes, self.rules, self.ranks, self.step_per_window)
        for span in self.spans(Position(epoch=epoch)):
            builder.add(span.block)
        return builder.report(len(self.order), self._order_of(epoch), len(self.order.skipped))
