"""The plan of every epoch: which samples form which micro-batch, on which rank, in which order.

A pass over the data is a sequence of positions, cut into windows of one length. A window is solved
by itself (`solve`), so that a run can begin in any of them. `Plan.micro_batches` is the one
generator of an epoch: each `MicroBatch` knows the place where the epoch stands after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import OptionError, UnevenRanksError
from torchbudget.plan.cursor import BoolArray, Cursor
from torchbudget.plan.dealing import Dealing
from torchbudget.plan.fingerprint import Plain, fingerprint, rules_identity
from torchbudget.plan.groups import NONE, Labels, Members
from torchbudget.plan.least_time import with_least_time
from torchbudget.plan.micro_batch import Draw, MicroBatch, Span, Window
from torchbudget.plan.order import Order
from torchbudget.plan.report import PlanReport, plan_report
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.plan.solver import (
    Block,
    WindowKey,
    best_strips,
    default_window,
    rounds_needed,
    run_costs,
    solve,
    without_last,
)

# Samples that one call plans: enough to hide the overhead of the call. Blocks of windows grow up to
# this, so the first micro-batch waits for one window only.
_BLOCK_SAMPLES: Final = 2**18
# Samples whose capacities are read to estimate the number of micro-batches in a window.
_SURVEY: Final = 4096
# Windows in which a cap on time is looked for, and the fewest samples in them. The best cap of four
# windows was within 0.01 of the time under the best cap of each.
_SURVEYED: Final = 4
_SURVEYED_SAMPLES: Final = 1024
# Most positions in a window: any number of samples without cost fits, but counts have 64 bits.
_MOST_POSITIONS: Final = 2**62
_ONE_RANK: Final = Dealing()
ALL_DROPPED: Final = (
    "drop_last=True drops all {}: they fill no step, or no micro-batch on each rank, or no group "
    "does; pass drop_last=False"
)


class Stretch(NamedTuple):
    """Positions of whole windows, and of the last window of a pass or of a group.

    The last window has the samples that make no whole one. It is joined to the window before it if
    it cannot be split evenly over the ranks. With `drop_last` its last micro-batch may be dropped.

    Attributes:
        start: position of the first whole window.
        tail: position of the last window.
        end: position after the last window.
        stays: true for the samples of the last window that are not dropped, shape
            `(end − tail,)`; `None`: all stay.
    """

    start: int
    tail: int
    end: int
    stays: BoolArray | None


class Plan:
    """Micro-batches of every epoch, as a function of (seed, epoch, position). Immutable.

    Nothing is kept per sample beside the sizes. The first micro-batch of an epoch, or after any
    position, comes after one window was planned.

    Args:
        sizes: of all samples.
        rules: what a micro-batch may be.
        order: which sample stands at which position.
        ranks: how windows are dealt; with `even_sums` a window is an optimizer step, otherwise
            every micro-batch is one.
        window: number of samples that are sorted and cut together; `None`: see `default_window`.
            Windows of units have about as many samples. `Plan.window` is the number of positions
            in each, at least one for every rank.
        drop_last: drop an incomplete last window (if a window is a step), or else the last
            micro-batch that could still have taken a sample; an endless order has neither.
        per_epoch: micro-batches of an epoch on each rank, or steps if a window is one. The data
            starts over where it ends, and the next epoch goes on in the order. `None`: an epoch is
            one pass.

    Attributes:
        uncapped: the rules as they were passed, without `most_time`.
        rules: the same with `strips`, and with `most_time` if a cap on the time is faster.

    Raises:
        OptionError: nothing would be left of an epoch.
    """

    def __init__(
        self,
        sizes: SizeTable,
        rules: BatchRules,
        order: Order,
        ranks: Dealing = _ONE_RANK,
        *,
        window: int | None = None,
        drop_last: bool = False,
        per_epoch: int | None = None,
    ) -> None:
        self.sizes = sizes
        self.uncapped = rules
        self.order = order
        self.ranks = ranks
        self.drop_last = drop_last and not order.endless
        self.per_epoch = per_epoch
        number = ranks.number
        # Sizes of up to about 4,096 samples, evenly spaced over the data set.
        survey = np.asarray(sizes.values[:: max(len(sizes) // _SURVEY, 1)])
        if window is None:
            each = float((1 / rules.alike(survey)).mean())
            # Epochs without shuffling are alike anyway, so no window is too wide for them.
            positions = order.samples if order.shuffle else 4 * order.samples
            window = default_window(number, positions=positions, micro_batches=each)
        self.window_samples = window
        window = min(window, _MOST_POSITIONS)
        if order.units is not None:
            window = max(round(window * len(order) / order.samples), 1)
        if window < number:
            name = "samples_per_step" if ranks.even_sums else "window"
            of = "" if order.units is None else f" units ({self.window_samples} samples)"
            raise OptionError(f"{name} must be at least the {number} ranks, got {window}{of}")
        # Any number of samples can be dealt evenly if every two of them fit together, since
        # micro-batches can then be split. Otherwise a multiple of the number of ranks can.
        is_free = order.units is None and not rules.shapes
        is_even = is_free and bool(rules.alike(sizes.largest) >= 2)
        self.window = window if ranks.even_sums or is_even else window - window % number
        self._last_is_even = number == 1 or (is_even and order.labels.groups is None)
        by_unit = order.units is not None and not order.labels.whole
        self._all_are_even = self._last_is_even or (self.window % number == 0 and not by_unit)
        # A pass has one section, or one section for each group.
        length = _MOST_POSITIONS if order.endless else len(order)
        self._sections = order.groups or Members(NONE, np.array([0, length]))
        several = order.groups is None and order.labels.groups is None and order.units is None
        several &= rules.packing is None and not rules.shapes and not ranks.repeats
        self._most_windows = max(_BLOCK_SAMPLES // self.window, 1) if several else 1
        self.rules = replace(rules, strips=best_strips(survey[: self.window], rules))
        if ranks.even_sums or ranks.repeats:  # the samples of a window, or of the pass, are given
            self.rules = with_least_time(self.rules, self._some_windows(), ranks)
        if self.rules.most_time is not None and self.window % ranks.together:
            # A window whose runs are too many to be dealt has no cap, and others keep theirs.
            self._most_windows = 1
        # The window whose rounds `left_of` asked for last, and the round of each of its samples: a
        # state takes 0.1 ms, and not 0.4 ms, 2 ms with two axes, or 3 ms packed.
        self._known_rounds: tuple[tuple[Any, ...], IntArray] | None = None

    def _some_windows(self) -> list[tuple[npt.NDArray[Any], Labels]]:
        """Sizes and labels of the samples of a few windows of the first epoch."""
        order, firsts = self.order, self._sections.firsts
        each = max(min(self.window, len(order), _BLOCK_SAMPLES), 1)
        number = min(max(_SURVEYED, _SURVEYED_SAMPLES // each), len(order) // each)
        found = []
        # Evenly spread: samples may be in order of their sizes.
        for start in np.linspace(0, len(order) - each, number).astype(int).tolist():
            end = min(start + each, int(firsts[self._sections.at(start) + 1]))
            indices = order.indices(Cursor(epoch=0).pass_key, start, end)
            found.append((self._sizes_at(indices), order.labels.take(indices)))
        return found

    def changed(
        self,
        *,
        rules: BatchRules | None = None,
        window: int | None = None,
        **ranks: Any,
    ) -> Plan:
        """The plan under other rules, or for other ranks.

        Args:
            rules: `None`: the same ones.
            window: for another number of ranks, which else have the same; `None`: the default one.
            ranks: attributes of `Dealing` that change.
        """
        return Plan(
            self.sizes,
            rules or self.uncapped,
            self.order,
            replace(self.ranks, **ranks),
            window=window if "number" in ranks else self.window_samples,
            drop_last=self.drop_last,
            per_epoch=self.per_epoch,
        )

    @cached_property
    def dealing(self) -> Plain:
        """The facts that must be the same for a window to be cut and dealt the same way."""
        return rules_identity(self.rules, self.sizes.largest) | {
            "window": self.window,
            "strips": self.rules.strips,
            "step_per_window": self.ranks.even_sums,
            "drop_last": self.drop_last,
            "ranks": self.ranks.number,
        }

    @cached_property
    def dealing_digest(self) -> str:
        """A digest of `dealing`: one value, so that all states have the same keys."""
        return fingerprint(repr(sorted(self.dealing.items())))

    # ------------------------------------------------------------------ an epoch

    def micro_batches(self, cursor: Cursor, *, rank: int) -> Iterator[MicroBatch]:
        """The micro-batches of one rank, from a cursor to the end of its epoch: see `windows`."""
        return chain.from_iterable(self.windows(cursor, rank=rank))

    def draws(self, cursor: Cursor, *, rank: int) -> Iterator[Draw]:
        """The same micro-batches, without a record of each: see `Window.draws`."""
        return chain.from_iterable(map(Window.draws, self.windows(cursor, rank=rank)))

    def windows(self, cursor: Cursor, *, rank: int) -> Iterator[Window]:
        """The windows of one rank with their micro-batches, from a cursor to its epoch's end.

        Raises:
            UnevenRanksError: the rest of the epoch cannot be split evenly. Before the first
                micro-batch, except where passes follow each other.
            OptionError: `drop_last` leaves nothing of the epoch; or the cost is that of
                alternatives, and no samples of steps are given.
        """
        cursor, left, step = cursor.dealt_by(self), self._left(cursor), cursor.steps
        ranks, done, begun = self.ranks.number, cursor.done, cursor.rounds
        for span in self.spans(cursor) if left != 0 else ():
            block = span.block
            # This rank's micro-batches; `first` is the place of the window's first one among them.
            starts, stops = block.starts[rank::ranks].tolist(), block.stops[rank::ranks].tolist()
            batches, first = len(starts), 0
            ends_pass = span.cursor.start + len(block.rounds) * span.length >= span.end
            for number, rounds in enumerate(block.rounds.tolist()):
                to, stop = rounds, first + rounds
                over = ends_pass and stop == batches
                if left is not None:
                    if not self.ranks.even_sums:
                        to = min(rounds, begun + left)
                    left -= 1 if self.ranks.even_sums else to - begun
                    over = not left
                here = slice(first + begun, first + to)
                yield Window(
                    span=span,
                    number=number,
                    first=first * ranks + rank,
                    rounds=range(begun, to),
                    starts=starts[here],
                    stops=stops[here],
                    done=done - begun,
                    step=step,
                    ends_epoch=over,
                )
                if over:
                    return
                first, done, begun, step = stop, done + to - begun, 0, step + 1

    def spans(self, cursor: Cursor) -> Iterator[Span]:
        """Solve the windows from a cursor to the end of its pass, blocks of windows at a time.

        The window that the cursor stands in comes whole. With `per_epoch` passes follow
        each other without an end. Errors are raised before the first window of a pass.

        Raises:
            UnevenRanksError: the rest of the pass cannot be split evenly.
            OptionError: `drop_last` leaves nothing of the pass.
        """
        if not (self.ranks.even_sums or self.ranks.repeats):
            self.rules.refuse_alternatives()
        yield from self._spans_of_pass(cursor)
        while self.per_epoch is not None and not self.order.endless:
            cursor = cursor.next_pass()
            yield from self._spans_of_pass(cursor)

    def _spans_of_pass(self, cursor: Cursor, most: int | None = None) -> Iterator[Span]:
        """Solve the windows of one pass; of an endless one, those of the epoch if they are steps.

        At most so many at once; `None`: as many as take little memory.

        If windows are of one group each, the group of the next window is drawn in proportion to the
        samples that are left of each group.
        """
        order = self.order
        cursor, begun, stretches = self._remaining(cursor)
        for stretch in stretches:
            self._check(cursor, stretch)
        firsts, apart = self._sections.firsts[:-1].tolist(), order.groups is not None
        done = [one.start - first for one, first in zip(stretches, firsts, strict=True)]
        ends = [one.end - first for one, first in zip(stretches, firsts, strict=True)]
        key = (order.seed, *cursor.pass_key) if order.shuffle else None
        turn = self._sections.turn(done, ends, key)
        if begun is not None:
            end = begun.cursor.start + begun.length
            yield replace(begun, end=end if turn is None and not order.endless else _MOST_POSITIONS)
        number = 1
        while turn is not None:
            here, at = stretches[turn], firsts[turn] + done[turn]
            before = replace(cursor, parts=1, groups=tuple(done) if apart else None)
            number = min(number, (here.tail - at) // self.window)
            length = self.window if number else here.end - here.tail
            done[turn] += max(number, 1) * length
            turn = self._sections.turn(done, ends, key)
            stop = at + max(number, 1) * length
            end = stop if turn is None and not order.endless else _MOST_POSITIONS
            stays = None if number else here.stays
            yield self._span(before, at, length, max(number, 1), stays, end=end)
            number = min(2 * max(number, 1), most or self._most_windows)

    def _begun(self, cursor: Cursor) -> tuple[Span | None, int]:
        """Solve the window that a cursor stands in; return it, and where the next one starts.

        There is none if the cursor stands between windows. If too few samples are left of the
        window for the present ranks, the windows after it join it; or, of an endless pass, as many
        positions as make it a multiple of the ranks' number, which can always be split evenly.
        """
        start, stop, left = cursor.start, cursor.stop, cursor.left
        if start == stop or (left is not None and not left.any()):
            return None, stop
        end, ranks = self._end(self._sections.at(start), stop), self.ranks.number
        while True:
            if 0 < end - stop < ranks:
                stop = end
            try:
                return self._span(cursor, start, stop - start, 1, left), stop
            except UnevenRanksError:
                done = 0 if left is None else len(left) - int(left.sum())
                more = -(stop - start - done) % ranks if self.order.endless else self.window
                if stop == end or not more:
                    raise
            stop += min(more, end - stop)

    def _span(
        self,
        cursor: Cursor,
        start: int,
        length: int,
        windows: int = 1,
        left: BoolArray | None = None,
        *,
        end: int = 0,
    ) -> Span:
        """Solve windows that begin at a position: the only call of `solve` for an epoch.

        Args:
            cursor: names the pass; and the groups and parts of the window, if it was begun.
            start: position of the first window.
            length: positions in each window.
            windows: number of windows.
            left: true for the samples of a single window that are left; `None`: all.
            end: position at which the pass ends.
        """
        order = self.order
        indices, sizes, left = self._samples(cursor, start, length, windows, left)
        # Windows are numbered over all passes: earlier passes, earlier windows of this one, these.
        each, done = self._sections.counts, np.array(cursor.groups or [start])
        whole, before = (int((-(-positions // self.window)).sum()) for positions in (each, done))
        earlier = 0 if order.endless else (cursor.first + cursor.number) * whole
        numbers = earlier + before + np.arange(windows)
        places = start + np.arange(windows) * length
        key = WindowKey(order.seed, cursor.pass_key, places, numbers, order.shuffle)
        labels = order.labels.take(indices)
        block = solve(self.rules, sizes, self.ranks, key, labels=labels, parts=cursor.parts)
        begins = replace(cursor, start=start, stop=start, left=left, rounds=0, plan=None)
        return Span(self, begins, length, end, indices.take(block.samples, mode="clip"), block)

    # ------------------------------------------------------------------ positions of windows

    def _end(self, section: int, start: int) -> int:
        """The end of the pass, or of a group, that continues at `start`.

        With `drop_last` an incomplete optimizer step at the end does not count.
        """
        end = int(self._sections.firsts[section + 1])
        if self.drop_last and self.ranks.even_sums:
            end -= (end - start) % self.window
        return end

    def _remaining(self, cursor: Cursor) -> tuple[Cursor, Span | None, list[Stretch]]:
        """The cursor under this plan, the window that it stands in, and stretches of later windows.

        There is one stretch for each group, or a single one. The turns of sources are those of the
        later windows.
        """
        sections, cursor = self._sections, cursor.dealt_by(self)
        begun, start = self._begun(cursor)
        starts = sections.firsts[:-1] + (0 if cursor.groups is None else np.array(cursor.groups))
        if self.order.groups is None:
            starts[0] = start
        elif cursor.start < cursor.stop:
            starts[sections.at(cursor.start)] = start
        begins = enumerate(starts.tolist())
        if self.order.endless:  # as many windows as the epoch may need, of a micro-batch at least
            left = (self._left(cursor) or 0) - (begun is not None)
            end = start + max(left, 0) * self.window
            stretches = [Stretch(start, end, end, None)]
        else:
            stretches = [self._stretch(cursor, at, self._end(number, at)) for number, at in begins]
        if self.order.sources is not None:
            cursor = replace(cursor, turns=self.order.sources.onward(cursor.turns, start))
        fresh = not cursor.stop and cursor.groups is None
        if fresh and not any(one.end > one.start for one in stretches):
            raise OptionError(ALL_DROPPED.format(f"{self.order.samples} samples of the epoch"))
        return cursor, begun, stretches

    def _check(self, cursor: Cursor, stretch: Stretch) -> None:
        """Raise an `UnevenRanksError` if a window cannot be split evenly over the ranks."""
        if self._last_is_even and not 0 < stretch.end - stretch.tail < self.ranks.number:
            return
        unsure = stretch._replace(start=stretch.tail) if self._all_are_even else stretch
        self._count(cursor, unsure)

    def _stretch(self, cursor: Cursor, start: int, end: int) -> Stretch:
        """The stretch from a position to the end of the pass, or of a group."""
        rest = (end - start) % self.window
        if not rest and (start == end or not self.drop_last or self.ranks.even_sums):
            return Stretch(start, end, end, None)
        tail = end - (rest or self.window)
        found = self._with_tail(cursor, start, tail, end)
        if tail - self.window < start:
            return found
        with suppress(UnevenRanksError):
            self._check(cursor, found._replace(start=found.tail))
            if end - tail >= self.ranks.number:  # fewer join a window that was begun, too
                return found
        return self._with_tail(cursor, start, tail - self.window, end)

    def _with_tail(self, cursor: Cursor, start: int, tail: int, end: int) -> Stretch:
        """The stretch whose last window begins at `tail`, without the samples that are dropped."""
        if not self.drop_last or self.ranks.even_sums:
            return Stretch(start, tail, end, None)
        sizes = self._sizes_at(self.order.indices(cursor.pass_key, tail, end))
        stays = without_last(self.rules, sizes, self.ranks)
        if stays.sum() < self.ranks.number:
            return Stretch(start, tail, tail, None)
        return Stretch(start, tail, end, None if stays.all() else stays)

    def _samples(
        self, cursor: Cursor, start: int, length: int, windows: int, left: BoolArray | None
    ) -> tuple[IntArray, npt.NDArray[Any], BoolArray | None]:
        """The indices of the samples of windows, their sizes, and `left`.

        Sizes have the shape `(windows, S)` or `(windows, S, d)`. If positions have joined the
        window since `left` was made, it gets longer: all of their samples are left.

        Raises:
            UnevenRanksError: there are fewer samples than ranks.
        """
        stop = start + windows * length
        indices = self.order.indices(cursor.pass_key, start, stop, cursor.turns)
        if left is not None:
            left = np.append(left, np.ones(len(indices) - len(left), np.bool_))
            indices = indices[left]
        number = self.ranks.number
        if self.ranks.repeats:  # a multiple of the ranks' number can always be split evenly
            indices = np.resize(indices, -(-len(indices) // number) * number)
        if len(indices) < number:
            again = "start the next epoch"
            if self._sections.counts[self._sections.at(start)] < number:  # it would be the same
                again = "add samples (merge small groups, or drop them by drop_last=True)"
            raise UnevenRanksError(
                f"{len(indices)} samples are left of epoch {cursor.epoch}, too few for {number} "
                f"ranks; use at most {len(indices)} ranks, or {again}"
            )
        sizes = self._sizes_at(indices)
        return indices, sizes.reshape(windows, -1, *sizes.shape[1:]), left

    def _sizes_at(self, indices: IntArray) -> npt.NDArray[Any]:
        values = self.sizes.values
        if not values.flags.c_contiguous:  # `take` would copy all of them
            return values[indices]
        # The indices are in range by construction: "clip" spares NumPy checking each of them. Rows
        # of several axes are picked in a tenth of the time of `values[indices]`.
        return values.take(indices, axis=0, mode="clip")

    # ------------------------------------------------------------------ samples and rounds left

    def left_of(self, cursor: Cursor) -> BoolArray | None:
        """The samples of the cursor's window that no batch has used yet; the cursor is this plan's.

        Shape `(samples of the window,)`; `None`: all. The first call for a window solves it again,
        O(its samples · log); later calls compare its rounds.
        """
        if not cursor.rounds:
            return cursor.left
        key = cursor.pass_key, cursor.start, cursor.stop, cursor.turns, cursor.left
        known = self._known_rounds  # read once: another thread may stand in another window
        if known is None or known[0][:4] != key[:4] or known[0][4] is not cursor.left:
            known = self._known_rounds = key, self._rounds_of(cursor)
        return known[1] >= cursor.rounds

    def _rounds_of(self, cursor: Cursor) -> IntArray:
        """The round of each sample of a window; −1 for samples that earlier plans have dealt."""
        length = cursor.stop - cursor.start
        block = self._span(cursor, cursor.start, length, 1, cursor.left).block
        rounds = np.empty(len(block.samples), np.int64)
        order, lengths = np.argsort(block.starts), block.stops - block.starts
        rounds[block.samples] = np.repeat(order // self.ranks.number, lengths[order])
        if cursor.left is None:
            return rounds
        spread = np.full(len(cursor.left), -1)
        spread[cursor.left] = rounds[: cursor.left.sum()]  # the rest are repeated
        return spread

    def batches_left(self, cursor: Cursor) -> int:
        """Micro-batches of each rank from a cursor to the end of its epoch.

        O(samples left), in a part of the time that planning them takes; O(1) if epochs have a given
        number of micro-batches, while those of a given number of steps are planned.
        """
        left = self._left(cursor)
        if left is not None and self.ranks.even_sums:
            return sum(len(window.rounds) for window in self.windows(cursor, rank=0))
        if left is not None:
            return left
        cursor, begun, stretches = self._remaining(cursor)
        rounds = 0 if begun is None else int(begun.block.rounds.sum()) - cursor.rounds
        return rounds + sum(self._count(cursor, one) for one in stretches)

    def _left(self, cursor: Cursor) -> int | None:
        """Micro-batches left of an epoch of a given length, or steps if windows are steps."""
        if self.per_epoch is None:
            return None
        return max(self.per_epoch - (cursor.steps if self.ranks.even_sums else cursor.done), 0)

    def next_epoch(self, cursor: Cursor) -> Cursor:
        """The epoch after a cursor's; one of a given length goes on at the cursor."""
        if self.per_epoch is None:
            return cursor.next_epoch()
        return replace(cursor, epoch=cursor.epoch + 1, done=0, steps=0)

    def windows_left(self, cursor: Cursor) -> int:
        """Count the steps from a cursor to the end of its epoch, if a window is one."""
        left = self._left(cursor)
        if left is not None:
            return left
        _, begun, stretches = self._remaining(cursor)
        whole = sum((one.tail - one.start) // self.window for one in stretches)
        return (begun is not None) + whole + sum(one.end > one.tail for one in stretches)

    def _count(self, cursor: Cursor, stretch: Stretch) -> int:
        """Count the micro-batches on each rank in the windows of a stretch.

        Raises:
            UnevenRanksError: a window cannot be split evenly; the message names its group.
        """
        start, tail, end, stays = stretch
        block = self._most_windows * self.window
        try:
            needed = self._needed(cursor, tail, end - tail, left=stays)
            for at in range(start, tail, block):
                windows = (min(tail, at + block) - at) // self.window
                needed += self._needed(cursor, at, self.window, windows)
        except UnevenRanksError as error:
            name = self.order.names[self._sections.at(start)]
            group = "" if self.order.groups is None else f"group {name!r}: "
            raise UnevenRanksError(f"{group}{error}") from None
        return needed

    def _needed(
        self,
        cursor: Cursor,
        start: int,
        length: int,
        windows: int = 1,
        left: BoolArray | None = None,
    ) -> int:
        """Count the micro-batches on each rank in windows; the arguments are those of `_span`."""
        if not length:
            return 0
        indices, sizes, _ = self._samples(cursor, start, length, windows, left)
        labels = self.order.labels.take(indices)
        rounds = rounds_needed(self.rules, sizes, self.ranks, labels=labels)
        return int(rounds.sum())

    # ------------------------------------------------------------------ contents of an epoch

    def batch_bytes(self, indices: IntArray) -> int:
        """Predicted bytes of a micro-batch of these samples."""
        starts, stops = np.array([0]), np.array([len(indices)])
        return int(
            run_costs(self._sizes_at(indices), starts, stops, self.rules, self.rules.chosen)[0]
        )

    def extremes(self, cursor: Cursor) -> dict[str, IntArray]:
        """The micro-batches of a pass that are likeliest to fail; O(samples).

        Returns:
            Indices in the data set of the "largest" micro-batch, whose cost is the highest; the
            "longest", whose single sample would cost the most; and the "shortest".
        """
        best: dict[str, tuple[int, IntArray]] = {}
        for span in self._spans_covered(cursor):
            block = span.block
            costs = block.costs(self.rules, self.rules.chosen)
            singles = self.rules.cost.batch_bytes(1, self.rules.padded(block.padded()))
            for name, values in (("largest", costs), ("longest", singles), ("shortest", -singles)):
                number = int(values.argmax())
                if name not in best or values[number] > best[name][0]:
                    indices = span.indices[block.starts[number] : block.stops[number]]
                    best[name] = int(values[number]), indices
        return {name: indices for name, (_, indices) in best.items()}

    def report(self, cursor: Cursor) -> PlanReport:
        """Plan a whole pass and sum up what it holds; O(samples).

        Of an endless order, the epoch from the cursor's window on.
        """
        order, sources, span = self.order, self.order.sources, None
        if not order.endless:
            cursor = Cursor(epoch=cursor.epoch, first=cursor.first, number=cursor.number)

        def blocks() -> Iterator[Block]:
            nonlocal span
            for span in self._spans_covered(cursor):
                yield span.block

        report = plan_report(blocks(), self.sizes, self.rules, self.ranks, order)
        if sources is None or span is None:
            return report
        stop = span.cursor.start + len(span.block.rounds) * span.length
        return replace(report, passes=sources.passes(span.cursor.turns, stop))

    def _spans_covered(self, cursor: Cursor) -> Iterator[Span]:
        """Solve what reports and extremes cover: a pass, or the rest of an endless one's epoch."""
        if self.ranks.even_sums or not self.order.endless:
            yield from self._spans_of_pass(cursor)
            return
        left = cursor.rounds + (self._left(cursor) or 0)
        for span in self._spans_of_pass(cursor, most=1):
            yield span
            left -= int(span.block.rounds.sum())
            if left <= 0:
                return
