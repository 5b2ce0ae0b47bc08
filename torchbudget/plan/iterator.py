"""An epoch that is being drawn: its micro-batches on one rank, and where it stands."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import OptionError
from torchbudget.plan.cursor import Cursor
from torchbudget.plan.plan import Plan
from torchbudget.plan.stretch import Stretch


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """Windows that were planned by one call.

    Attributes:
        first: number of the first of them in this iteration.
        stretch: where they are.
        plan: that cut and dealt them.
    """

    first: int
    stretch: Stretch
    plan: Plan


def _ignore(_: PlanIterator) -> None:
    """What is called where nobody asks to be."""


class PlanIterator(Iterator[list[int]]):
    """One iteration of an epoch, from a cursor to the end.

    Windows are planned when those before are drawn. A number is kept for each window that was
    drawn, so that the cursor after any batch can be found.

    Args:
        plan: of the epoch.
        began: where it begins.
        rank: whose micro-batches.
        when_asked: called with the iterator before each micro-batch that it is asked for.
        when_finished: likewise, when the last micro-batch is drawn.

    Attributes:
        noted: if set before the first micro-batch is drawn, each is noted in it: what it has on
            each axis, see `Block.amounts`, and its indices.
    """

    def __init__(
        self,
        plan: Plan,
        began: Cursor,
        *,
        rank: int,
        when_asked: Callable[[PlanIterator], None] = _ignore,
        when_finished: Callable[[PlanIterator], None] = _ignore,
    ) -> None:
        self.began = began
        self.noted: deque[tuple[list[int], IntArray]] | None = None
        self._plan = plan
        self._rank = rank
        self._when_asked = when_asked
        self._when_finished = when_finished
        self._spans = plan.spans(began)
        self._next: list[tuple[Plan, int]] = []  # plans to come, and after how many windows
        self._replanned = 0
        self._planned: list[_Planned] = []
        self._ends = array("q", [])  # micro-batches on this rank up to each window's end
        self._drawn = 0
        self._finished = False
        self._bounds: Iterator[tuple[int, int]] = iter(())
        self._indices: IntArray = np.empty(0, np.int64)
        self._amounts: Iterator[list[int]] = iter(())

    @property
    def drawn(self) -> int:
        """How many micro-batches were drawn."""
        return self._drawn

    @property
    def windows_begun(self) -> int:
        """In how many windows a micro-batch was drawn, at least 1."""
        return bisect_right(self._ends, self._drawn - 1) + 1

    def replan(self, plan: Plan, *, after: int) -> None:
        """Go on with another plan after that many windows, at least those begun."""
        self._replanned += 1
        self._next = [(one, place) for one, place in self._next if place < after]
        self._next.append((plan, after))
        self._forget_later_windows()

    def _forget_later_windows(self) -> None:
        """Forget windows that are planned, but are to be planned anew."""
        if not self._next or len(self._ends) <= self._next[0][1]:
            return
        del self._ends[self._next[0][1] :]
        self._bounds = islice(self._bounds, self._ends[-1] - self._drawn)

    def __next__(self) -> list[int]:
        self._when_asked(self)
        if self._drawn == (self._ends[-1] if self._ends else 0) and not self._finished:
            self._advance()
        bounds = next(self._bounds, None)
        if bounds is None:
            raise StopIteration
        self._drawn += 1
        start, stop = bounds
        indices = self._indices[start:stop]
        batch: list[int] = indices.tolist()
        if self.noted is not None:
            self.noted.append((next(self._amounts), indices))
        if self._drawn == self._ends[-1]:
            # Planned ahead by one, so that a loop that takes exactly `len` batches, and never asks
            # for one more, has finished its epoch.
            with suppress(Exception):  # the next call meets it: this batch must not be lost
                self._advance()
        return batch

    def _advance(self) -> None:
        """Plan the next windows, or find that there are none."""
        if self._next and self._next[0][1] == len(self._ends):
            self._plan, _ = self._next.pop(0)
            self._spans = self._plan.spans(self._planned_to)
        try:
            span = next(self._spans, None)
        except Exception:
            self._spans = self._plan.spans(self._planned_to)  # a generator that raised is over
            raise
        if span is None:
            self._finished = True
            self._when_finished(self)
            return
        done = 0 if self._ends else self.began.rounds
        before = self._ends[-1] if self._ends else -done
        block, ranks = span.block, self._plan.ranks.number
        self._planned.append(_Planned(len(self._ends), span.stretch, self._plan))
        self._ends.extend((before + np.cumsum(block.rounds)).tolist())
        mine = slice(done * ranks + self._rank, None, ranks)
        self._bounds = zip(block.starts[mine].tolist(), block.stops[mine].tolist(), strict=True)
        self._indices = span.indices
        if self.noted is not None:
            self._amounts = iter(block.amounts(self._plan.rules)[mine].tolist())
        self._forget_later_windows()

    @property
    def _planned_to(self) -> Cursor:
        """After the last window that was planned."""
        if not self._planned:
            return self.began
        last, windows = self._planned[-1], len(self._ends)
        done = self.began.done + self._ends[-1]
        cursor = last.stretch.after(self.began.epoch, windows - 1 - last.first, done)
        return cursor if last.plan is self._plan else cursor.dealt_anew(None)

    def steps(self) -> Iterator[int]:
        """Micro-batches of each optimizer step on each rank, from where this iteration began.

        Steps already drawn keep their plan; later ones are planned as they are read.
        """
        ahead: Iterator[int] | None = None
        window = read = replanned = 0
        while True:
            if window < len(self._ends):
                rounds, read = self._ends[window] - read, self._ends[window]
                ahead = None
            else:
                if ahead is None or replanned != self._replanned:
                    replanned, ahead = self._replanned, self._rounds_ahead(window)
                coming = next(ahead, None)
                if coming is None:
                    return
                rounds, read = coming, read + coming
            window += 1
            yield from self._plan.steps_of(rounds)

    def _rounds_ahead(self, window: int) -> Iterator[int]:
        """Rounds of the windows from that one on, which are not planned yet."""
        if self._finished:
            return iter(())
        cursor = self._planned_to
        rounds = (int(one) for span in self._plan.spans(cursor) for one in span.block.rounds)
        first = next(rounds, None)
        if first is None:
            return iter(())
        return islice(chain([first - cursor.rounds], rounds), window - len(self._ends), None)

    def after(self, batches: int | None) -> tuple[Plan, Cursor]:
        """Where the epoch stands after that many batches of this iteration, and by which plan.

        Args:
            batches: default: all that were drawn.

        Raises:
            OptionError: fewer were drawn.
        """
        done = self._drawn if batches is None else batches
        if done > self._drawn:
            raise OptionError(f"batches_done={done}, but only {self._drawn} were drawn")
        epoch = self.began.epoch
        if self._finished and done == self._drawn:
            return self._plan, Cursor(epoch=epoch + 1)
        if not done:
            return self._planned[0].plan if self._planned else self._plan, self.began
        window = bisect_right(self._ends, done - 1)
        number = bisect_right(self._planned, window, key=lambda planned: planned.first) - 1
        planned = self._planned[number]
        already = self._ends[window - 1] if window else -self.began.rounds
        place, total = window - planned.first, self.began.done + done
        if done == self._ends[window]:
            return planned.plan, planned.stretch.after(epoch, place, total)
        return planned.plan, planned.stretch.cursor(epoch, place, done - already, total)

    def coming(self, batches: int | None = None) -> Cursor:
        """Where an iteration after this one begins: over the next epoch, if this one is over.

        Args:
            batches: after that many of this iteration, as in `after`.
        """
        _, cursor = self.after(batches)
        return self.began if cursor.epoch == self.began.epoch else cursor
