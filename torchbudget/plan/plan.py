"""The plan of an epoch: which samples form which micro-batch, on which rank, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import CostModel, IntArray
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cursor import BoolArray, Cursor
from torchbudget.plan.dealing import Ranks
from torchbudget.plan.fingerprint import Plain, cost_fingerprint
from torchbudget.plan.order import EpochOrder, Order
from torchbudget.plan.report import PlanReport, plan_report
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import (
    Block,
    WindowKey,
    best_strips,
    default_window,
    run_costs,
    solve,
    without_last,
)

# Samples that are planned by one call: enough to drown the calls' own time.
# Blocks grow up to it, so that the first micro-batch waits for one window only.
_BLOCK_SAMPLES: Final = 2**18
# Cutting along several axes makes more calls per window.
_WIDE_BLOCK_SAMPLES: Final = 2**19
# Samples whose capacities tell how many micro-batches a window will have.
_SURVEY: Final = 4096
_ONE_RANK: Final = Ranks()


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

    def cursor(self, epoch: int, window: int, rounds: int) -> Cursor:
        """Where the epoch stands after `rounds` rounds of window number `window`."""
        start = self.start + window * self.length
        return Cursor(
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


class Plan:
    """Micro-batches of every epoch, as a function of (seed, epoch, position).

    Nothing is kept per sample beside the sizes. The first micro-batch of an epoch, or after any
    position, comes after planning one window.

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

    Raises:
        UnevenRanksError: fewer samples than ranks.
        OptionError: nothing would be left of an epoch.
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
    ) -> None:
        self.sizes = sizes
        self.rules = rules
        self.order = order
        self.ranks = ranks
        self.drop_last = drop_last
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
        if window < number:
            name = "samples_per_step" if ranks.even_sums else "window"
            raise OptionError(f"{name}={window} is below the number of ranks, {number}")
        if ranks.even_sums and drop_last and len(order) < window:
            raise OptionError(
                f"drop_last=True leaves nothing: {len(order)} samples do not fill one step of "
                f"{window}"
            )
        # Only samples that no other fits beside can make a window impossible to deal evenly, and
        # none of a multiple of the ranks' number.
        pairs = bool(rules.capacity(sizes.largest, rules.budget_bytes) >= 2)
        self.window = window if ranks.even_sums or pairs else window - window % number
        self._always_even = number == 1 or pairs
        self._strips = best_strips(survey[: self.window], rules)
        self._epoch_order: tuple[int, EpochOrder] | None = None
        self._turns: tuple[Cursor, IntArray] | None = None

    def with_cost(self, cost: CostModel) -> Plan:
        """The same windows, cut by another cost."""
        rules = replace(self.rules, cost=cost)
        return Plan(
            self.sizes, rules, self.order, self.ranks, window=self.window, drop_last=self.drop_last
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
            "step_per_window": self.ranks.even_sums,
            "drop_last": self.drop_last,
            "ranks": self.ranks.number,
            "balance": None if balance is None else cost_fingerprint(balance, largest),
        }

    def spans(self, cursor: Cursor) -> Iterator[Span]:
        """The windows from `cursor` on, the one that it stands in included (and whole).

        Raises:
            UnevenRanksError: what is left cannot be dealt evenly; before the first span.
            OptionError: `drop_last` leaves nothing of the epoch.
        """
        epoch = cursor.epoch
        first, start = self._begun(cursor)
        tail, end = self._tail(epoch, start)
        if not self._always_even:
            # Some window may be impossible to deal: find out before the first micro-batch.
            if self.window % self.ranks.number:
                for _ in self._whole(epoch, start, tail):
                    pass
            self._last(epoch, tail, end)
        if first is not None:
            yield first
        yield from self._whole(epoch, start, tail)
        last = self._last(epoch, tail, end)
        if last is not None:
            yield last

    def _whole(self, epoch: int, start: int, tail: int) -> Iterator[Span]:
        """Whole windows from `start` to `tail`, more and more of them in one call."""
        samples = _WIDE_BLOCK_SAMPLES if self.sizes.axes > 1 else _BLOCK_SAMPLES
        most = 1 if self.rules.packing is not None else max(samples // self.window, 1)
        windows = 1
        while start < tail:
            windows = min(windows, (tail - start) // self.window)
            yield self._span(epoch, start, self.window, windows)
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
        if self._always_even:
            return True
        try:
            self._last(epoch, tail, end)
        except UnevenRanksError:
            return False
        return True

    def _last(self, epoch: int, tail: int, end: int) -> Span | None:
        """The last window, less what `drop_last` drops of it; `None` where there is none."""
        if tail == end:
            return None
        if not self.drop_last or self.ranks.even_sums:
            return self._span(epoch, tail, end - tail)
        sizes = self._sizes_at(self._order_of(epoch).indices(tail, end))
        stays = without_last(self.rules, sizes, self.ranks, strips=self._strips)
        if stays.sum() < self.ranks.number:
            if not tail:
                raise OptionError(
                    f"drop_last=True leaves nothing of the epoch's {end} samples: they do not "
                    "fill one micro-batch on each rank"
                )
            return None
        return self._span(epoch, tail, end - tail, 1, None if stays.all() else stays)

    def _begun(self, cursor: Cursor) -> tuple[Span | None, int]:
        """The window that `cursor` stands in, and where the next one starts.

        What is left of a window under another number of ranks may be too little to be dealt: then
        windows after it join it.
        """
        start, stop = cursor.start, cursor.stop
        end = self._end(stop)
        left = np.ones(stop - start, np.bool_) if cursor.left is None else cursor.left
        if not left.any():
            return None, stop
        while True:
            if 0 < end - stop < self.ranks.number:
                left = np.append(left, np.ones(end - stop, np.bool_))
                stop = end
            try:
                return self._span(cursor.epoch, start, stop - start, 1, left), stop
            except UnevenRanksError:
                if stop == end:
                    raise
            more = min(self.window, end - stop)
            left = np.append(left, np.ones(more, np.bool_))
            stop += more

    def _span(
        self,
        epoch: int,
        start: int,
        length: int,
        windows: int = 1,
        left: BoolArray | None = None,
    ) -> Span:
        """Solve windows: the function of (seed, epoch, position) that everything else asks."""
        order = self.order
        indices = self._order_of(epoch).indices(start, start + windows * length)
        if left is not None:
            indices = indices[left]
        if len(indices) < self.ranks.number:
            raise UnevenRanksError(
                f"{len(indices)} samples are left of epoch {epoch}, too few for "
                f"{self.ranks.number} ranks; use at most {len(indices)}, or start the next epoch"
            )
        sizes = self._sizes_at(indices)
        places = start + np.arange(windows) * length
        key = WindowKey(
            seed=order.seed,
            path=(epoch,),
            places=places,
            numbers=epoch * -(-len(order) // self.window) + places // self.window,
            shuffle=order.shuffle,
        )
        shape = (windows, len(indices) // windows, *sizes.shape[1:])
        block = solve(self.rules, sizes.reshape(shape), self.ranks, key, strips=self._strips)
        return Span(Stretch(start, length, left), indices.take(block.samples, mode="clip"), block)

    def _sizes_at(self, indices: IntArray) -> npt.NDArray[Any]:
        # The indices are in range by construction: "clip" spares NumPy checking each of them.
        return self.sizes.values.take(indices, axis=0, mode="clip")

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            self._epoch_order = epoch, self.order.epoch(epoch)
        return self._epoch_order[1]

    def left_of(self, cursor: Cursor) -> BoolArray | None:
        """Which positions of the window that `cursor` stands in are still to come.

        Shape `(stop − start,)`; `None`: all. Plans that window once: O(its samples).
        """
        if not cursor.rounds:
            return cursor.left
        if self._turns is None or not self._turns[0].same_window(cursor):
            self._turns = cursor, self._rounds_of(cursor)
        return self._turns[1] >= cursor.rounds

    def _rounds_of(self, cursor: Cursor) -> IntArray:
        """The round in which each position of a window comes, −1 where none does."""
        start, stop = cursor.start, cursor.stop
        block = self._span(cursor.epoch, start, stop - start, 1, cursor.left).block
        ascending = np.argsort(block.starts)
        rounds = np.empty(len(block.samples), np.int64)
        lengths = (block.stops - block.starts)[ascending]
        rounds[block.samples] = np.repeat(ascending // self.ranks.number, lengths)
        if cursor.left is None:
            return rounds
        spread = np.full(stop - start, -1)
        spread[cursor.left] = rounds
        return spread

    def micro_batches(self, cursor: Cursor) -> int:
        """Micro-batches of each rank from `cursor` to the end of its epoch; O(samples left)."""
        rounds = sum(int(span.block.rounds.sum()) for span in self.spans(cursor))
        return rounds - cursor.rounds

    def steps(self, cursor: Cursor) -> Iterator[int]:
        """How many micro-batches each optimizer step takes on each rank, from `cursor` on."""
        done = cursor.rounds
        for span in self.spans(cursor):
            for rounds in span.block.rounds.tolist():
                yield from self.steps_of(rounds - done)
                done = 0

    def steps_of(self, rounds: int) -> list[int]:
        """The optimizer steps that a window's rounds make: one, or one each."""
        return [rounds] if self.ranks.even_sums else [1] * rounds

    def batch_bytes(self, indices: IntArray) -> int:
        """Predicted bytes of a micro-batch of these samples."""
        starts, stops = np.array([0]), np.array([len(indices)])
        return int(
            run_costs(self._sizes_at(indices), starts, stops, self.rules, self.rules.cost)[0]
        )

    def padded_size(self, indices: IntArray) -> list[int]:
        """The padded size of a micro-batch of these samples, one number for each axis."""
        size = self.rules.padded(self._sizes_at(indices).max(axis=0))
        return size.reshape(-1).tolist()

    def extremes(self, epoch: int = 0) -> dict[str, IntArray]:
        """The micro-batches of an epoch that are likeliest to fail; O(samples).

        Returns:
            Indices in the data set of the "largest" micro-batch, whose cost is the highest; the
            "longest", of which a single sample would cost the most; and the "shortest".
        """
        best: dict[str, tuple[int, IntArray]] = {}
        for span in self.spans(Cursor(epoch=epoch)):
            block = span.block
            costs = block.costs(self.rules, self.rules.cost)
            singles = self.rules.cost.batch_bytes(1, self.rules.padded(block.padded()))
            for name, values in (("largest", costs), ("longest", singles), ("shortest", -singles)):
                number = int(values.argmax())
                if name not in best or values[number] > best[name][0]:
                    indices = span.indices[block.starts[number] : block.stops[number]]
                    best[name] = int(values[number]), indices
        return {name: indices for name, (_, indices) in best.items()}

    def report(self, epoch: int = 0) -> PlanReport:
        """Plan a whole epoch and sum up what it holds; O(samples)."""
        blocks = (span.block for span in self.spans(Cursor(epoch=epoch)))
        return plan_report(blocks, self.sizes, self.rules, self.ranks, self.order, epoch)
