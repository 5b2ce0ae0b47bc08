"""The plan of an epoch: which samples form which micro-batch, on which rank, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from torchbudget.cost.models.protocol import CostModel, IntArray
from torchbudget.errors import UnevenRanksError
from torchbudget.plan.cursor import BoolArray, Cursor
from torchbudget.plan.cut import arrange
from torchbudget.plan.fingerprint import Plain, cost_fingerprint, fingerprint
from torchbudget.plan.numbers import Allotment, spare_of
from torchbudget.plan.report import PlanReport, plan_report
from torchbudget.plan.solver import Reach, WindowKey, run_costs, solve
from torchbudget.plan.stretch import Span, Stretch
from torchbudget.plan.windows import EpochWindows

# What a plan is made of, beside the sizes.
_PARTS: Final = ("rules", "order", "ranks", "window", "drop_last", "numbers")


class Plan(EpochWindows):
    """Micro-batches of every epoch, as a function of (seed, epoch, position).

    Nothing is kept per sample beside the sizes. The first micro-batch of an epoch, or after any
    position, comes after planning one window; of an epoch that is to have a given number of
    micro-batches, after counting those that it needs, O(samples).

    It is made of what its windows are made of: see `EpochWindows`.
    """

    _turns: tuple[Cursor, IntArray] | None = None
    _positions: tuple[tuple[int, int, int, int], IntArray] | None = None

    def with_cost(self, cost: CostModel) -> Plan:
        """The same windows, cut by another cost; epochs have as many micro-batches if any do."""
        return self.changed(
            rules=replace(self.rules, cost=cost), counted_by=self._counted_by or self
        )

    def for_ranks(self, number: int, *, window: int | None) -> Plan:
        """The plan for other ranks, with windows of that length; `None`: the default one."""
        return self.changed(ranks=replace(self.ranks, number=number), window=window)

    def changed(self, **changes: Any) -> Plan:
        """The plan of other rules, ranks, numbers or windows, counted by itself."""
        kept = {name: getattr(self, name) for name in _PARTS}
        return Plan(self.sizes, **kept | changes)

    @cached_property
    def dealing(self) -> Plain:
        """What must be the same for a window to be cut and dealt the same way."""
        rules, largest = self.rules, self.sizes.largest
        balance, on_host = rules.balance, rules.host_batch_bytes
        host_batch = None
        if on_host is not None:
            host_batch = fingerprint(cost_fingerprint(on_host[0], largest), str(on_host[1]))
        return {
            "cost": cost_fingerprint(rules.cost, largest),
            "budget_bytes": rules.budget_bytes,
            "size_multiple": rules.size_multiple,
            "max_batch_size": rules.max_batch_size,
            "batch_size_multiple": rules.batch_size_multiple,
            "window": self.window,
            "step_per_window": self.ranks.even_sums,
            "drop_last": self.drop_last,
            "batches_per_epoch": self.numbers.per_epoch,
            "micro_batches_per_step": self.numbers.per_step,
            "ranks": self.ranks.number,
            "balance": None if balance is None else cost_fingerprint(balance, largest),
            "host_batch_bytes": host_batch,
        }

    def spans(self, cursor: Cursor) -> Iterator[Span]:
        """The windows from `cursor` on, the one that it stands in included (and whole).

        Raises:
            UnevenRanksError: what is left cannot be dealt evenly; before the first span.
            OptionError: `drop_last` leaves nothing of the epoch; or it cannot have the numbers of
                micro-batches that it is to have; before the first span.
        """
        epoch, allotment = cursor.epoch, self._allotment(cursor)
        first, start = self._begun(cursor, allotment)
        if cursor.least is None:
            allotment = self._first_allotment(cursor, start)
        tail, end = self._tail(epoch, start)
        if first is not None:
            yield first
        for begins, windows in self._whole(start, tail):
            yield self._span(epoch, begins, self.window, windows, allotment=allotment)
        last = self._last(epoch, tail, end, allotment)
        if last is not None:
            yield last

    def _first_allotment(self, cursor: Cursor, start: int) -> Allotment | None:
        """What the windows from `start` on get of an epoch whose micro-batches were not counted.

        If they may be impossible to deal, or are to have given numbers, they are counted: so what
        cannot be is found before the first micro-batch. An epoch that goes on by other rules than
        it began has no number of its own.
        """
        begins = not cursor.done
        if not self._all_are_even or self.numbers.per_step or (self.numbers and begins):
            least, most = self._count(cursor.epoch, start)
        elif not self._last_is_even:
            tail, end = self._tail(cursor.epoch, start)
            self._needed(cursor.epoch, tail, end - tail, left=self._stays(cursor.epoch, tail, end))
        if not self.numbers or not begins:
            return None
        number, epoch = self.batches_per_epoch or least, cursor.epoch
        spare = spare_of(number, least, most, epoch=epoch, ranks=self.ranks.number)
        return Allotment(least=least, most=most, spare=spare)

    def _allotment(self, cursor: Cursor) -> Allotment | None:
        """What the window gets that `cursor` stands in, and later ones, if they were counted."""
        if cursor.least is None:
            return None
        most = self._most(cursor.epoch, cursor.stop)
        if cursor.stop > cursor.start:
            samples = cursor.stop - cursor.start if cursor.left is None else int(cursor.left.sum())
            most += self.numbers.most(samples, self.ranks.number)
        return Allotment(least=cursor.least, most=most, spare=cursor.spare)

    def _last(
        self, epoch: int, tail: int, end: int, allotment: Allotment | None = None
    ) -> Span | None:
        """The last window, less what `drop_last` drops of it; `None` where there is none."""
        stays = self._stays(epoch, tail, end)
        if tail == end or (stays is not None and not stays.any()):
            return None
        return self._span(epoch, tail, end - tail, 1, stays, allotment)

    def _begun(self, cursor: Cursor, allotment: Allotment | None) -> tuple[Span | None, int]:
        """The window that `cursor` stands in, and where the next one starts.

        What is left of a window under another number of ranks may be too little to be dealt: then
        windows after it join it.
        """
        start, stop, left = cursor.start, cursor.stop, cursor.left
        end = self._end(stop)
        if start == stop or (left is not None and not left.any()):
            return None, stop
        while True:
            if 0 < end - stop < self.ranks.number:
                left, stop = _joined(left, stop - start, end - stop), end
            try:
                span = self._span(cursor.epoch, start, stop - start, 1, left, allotment)
            except UnevenRanksError:
                if stop == end:
                    raise
            else:
                return span, stop
            more = min(self.window, end - stop)
            left, stop = _joined(left, stop - start, more), stop + more

    def _span(
        self,
        epoch: int,
        start: int,
        length: int,
        windows: int = 1,
        left: BoolArray | None = None,
        allotment: Allotment | None = None,
    ) -> Span:
        """Solve windows: the function of (seed, epoch, position) that everything else asks."""
        order = self.order
        indices, sizes = self._samples(epoch, start, length, windows, left)
        places = start + np.arange(windows) * length
        numbers = epoch * -(-len(order) // self.window) + places // self.window
        key = WindowKey(
            seed=order.seed,
            path=(epoch,),
            places=places,
            numbers=numbers,
            shuffle=order.shuffle,
        )
        full = left is None and length >= self.window
        reach = self._reach(allotment, sizes.shape[1], numbers, full=full)
        block = solve(self.rules, sizes, self.ranks, key, strips=self._strips, reach=reach)
        counted = None if allotment is None else allotment.counted()
        stretch = Stretch(start, length, left, counted)
        return Span(stretch, indices.take(block.samples, mode="clip"), block)

    def _reach(
        self, allotment: Allotment | None, samples: int, numbers: IntArray, *, full: bool
    ) -> Reach | None:
        """From what windows of so many samples need to the micro-batches that they get."""
        if not self.numbers:
            return None

        def reach(needed: IntArray) -> IntArray:
            least = self.numbers.least(needed, full=full)
            if allotment is None:
                return least
            return allotment.give(least, self.numbers.most(samples, self.ranks.number), numbers)

        return reach

    def left_of(self, cursor: Cursor) -> BoolArray | None:
        """Which positions of the window that `cursor` stands in are still to come.

        Shape `(stop − start,)`; `None`: all. Plans that window once: O(its samples).
        """
        if not cursor.rounds:
            return cursor.left
        turns = self._turns  # read once: another thread may stand in another window
        if turns is None or not turns[0].same_window(cursor):
            turns = self._turns = cursor, self._rounds_of(cursor)
        return turns[1] >= cursor.rounds

    def _rounds_of(self, cursor: Cursor) -> IntArray:
        """The round in which each position of a window comes, −1 where none does."""
        start, stop = cursor.start, cursor.stop
        allotment = self._allotment(cursor)
        span = self._span(cursor.epoch, start, stop - start, 1, cursor.left, allotment)
        block = span.block
        rounds = np.empty(len(block.samples), np.int64)
        rounds[block.samples] = block.for_samples(np.arange(len(block.starts)) // self.ranks.number)
        if cursor.left is None:
            return rounds
        spread = np.full(stop - start, -1)
        spread[cursor.left] = rounds
        return spread

    @property
    def strips(self) -> int:
        """By which windows of several axes are cut: see `arrange`."""
        return self._strips

    def arranged(self, epoch: int, start: int, stop: int, strips: int) -> IntArray:
        """See `DealsWindows`; kept for the window that was asked for last."""
        place, known = (epoch, start, stop, strips), self._positions  # read once, as in `left_of`
        if known is None or known[0] != place:
            sizes = self._sizes_at(self._order_of(epoch).indices(start, stop))
            known = self._positions = place, arrange(sizes[None], strips)[0]
        return known[1]

    def micro_batches(self, cursor: Cursor) -> int:
        """Micro-batches of each rank from `cursor` to the end of its epoch.

        O(samples left), unless their number is given, or was counted.

        Raises:
            OptionError: the epoch cannot be split into the number that is given.
        """
        if cursor.least is not None:
            return cursor.least + cursor.spare - cursor.rounds
        number = None if cursor.done else self.batches_per_epoch
        if number is not None:
            if number > self._most(cursor.epoch, cursor.stop):
                self._first_allotment(cursor, cursor.stop)  # raises, and says how many would do
            return number
        first, start = self._begun(cursor, None)
        begun = 0 if first is None else int(first.block.rounds.sum())
        return begun - cursor.rounds + self._count(cursor.epoch, start)[0]

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

    def extremes(self, epoch: int) -> dict[str, IntArray]:
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
        """Plan a whole epoch and sum it up; O(samples)."""
        blocks = (span.block for span in self.spans(Cursor(epoch=epoch)))
        return plan_report(
            blocks, self.sizes, self.rules, self.ranks, self.order, window=self.window
        )


def _joined(left: BoolArray | None, length: int, more: int) -> BoolArray:
    """Which samples are left of a window that so many later ones join."""
    return np.append(np.ones(length, np.bool_) if left is None else left, np.ones(more, np.bool_))
