"""An epoch that is being drawn: its micro-batches on one rank, and what was drawn so far."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from torchbudget.errors import OptionError
from torchbudget.plan.cursor import Position
from torchbudget.plan.plan import Plan, Stretch


@dataclass(frozen=True, slots=True, eq=False)
class _Walked:
    """Windows that were planned by one call.

    Attributes:
        first: number of the first of them in this drawing.
        stretch: where they are.
        plan: that cut and dealt them.
    """

    first: int
    stretch: Stretch
    plan: Plan


class PlanIterator(Iterator[list[int]]):
    """One drawing of an epoch, from a position to the end.

    Windows are planned in stretches, each when the one before is drawn. What was drawn is kept as a
    number for each window, so that any position up to here can be told.

    Args:
        plan: of the epoch.
        began: where it begins.
        rank: whose micro-batches.
        when_finished: called with the drawing when the last micro-batch is drawn.
    """

    def __init__(
        self,
        plan: Plan,
        began: Position,
        *,
        rank: int,
        when_finished: Callable[[PlanIterator], None],
    ) -> None:
        self.began = began
        self._plan = plan
        self._rank = rank
        self._when_finished = when_finished
        self._spans = plan.spans(began)
        self._next: list[tuple[Plan, int]] = []  # plans to come, and behind how many windows
        self._corrections = 0
        self._walked: list[_Walked] = []
        self._ends = array("q", [])  # micro-batches on this rank up to each window's end
        self._drawn = 0
        self._finished = False
        self._bounds: Iterator[tuple[int, int]] = iter(())
        self._indices: npt.NDArray[np.int64] = np.empty(0, np.int64)

    @property
    def windows_begun(self) -> int:
        """In how many windows a micro-batch was drawn, at least 1."""
        return bisect_right(self._ends, self._drawn - 1) + 1

    def go_on_with(self, plan: Plan, *, behind: int) -> None:
        """Plan with another one what comes behind that many windows, at least those begun."""
        self._corrections += 1
        self._next = [(one, place) for one, place in self._next if place < behind]
        self._next.append((plan, behind))
        self._cut()
        if self._drawn and self._drawn == self._ends[-1] and not self._finished:
            self._advance()

    def _cut(self) -> None:
        """Forget windows that are planned, but are to be planned anew."""
        if not self._next or len(self._ends) <= self._next[0][1]:
            return
        del self._ends[self._next[0][1] :]
        left = self._ends[-1] - self._drawn
        self._bounds = islice(self._bounds, left)

    def __next__(self) -> list[int]:
        if not self._ends:
            self._advance()
        bounds = next(self._bounds, None)
        if bounds is None:
            raise StopIteration
        self._drawn += 1
        start, stop = bounds
        batch: list[int] = self._indices[start:stop].tolist()
        if self._drawn == self._ends[-1]:
            # Planned ahead by one, so that a loop that takes exactly `len` batches, and never asks
            # for one more, has finished its epoch.
            self._advance()
        return batch

    def _advance(self) -> None:
        """Plan the next windows, or find that there are none."""
        if self._next and self._next[0][1] == len(self._ends):
            self._plan, _ = self._next.pop(0)
            self._spans = self._plan.spans(self._planned_to)
        span = next(self._spans, None)
        if span is None:
            self._finished = True
            self._when_finished(self)
            return
        done = 0 if self._ends else self.began.rounds
        before = self._ends[-1] if self._ends else -done
        block, ranks = span.block, self._plan.ranks
        self._walked.append(_Walked(len(self._ends), span.stretch, self._plan))
        self._ends.extend((before + np.cumsum(block.rounds)).tolist())
        mine = slice(done * ranks + self._rank, None, ranks)
        self._bounds = zip(block.starts[mine].tolist(), block.stops[mine].tolist(), strict=True)
        self._indices = span.indices
        self._cut()

    @property
    def _planned_to(self) -> Position:
        """Behind the last window that was planned."""
        if not self._walked:
            return self.began
        last = self._walked[-1]
        stop = last.stretch.position(self.began.epoch, len(self._ends) - 1 - last.first, 0).stop
        return Position(epoch=self.began.epoch, start=stop, stop=stop)

    def steps(self) -> Iterator[int]:
        """Micro-batches of each optimizer step on each rank: of what was drawn, then to come."""
        ahead: Iterator[int] | None = None
        window = read = corrections = 0
        while True:
            if window < len(self._ends):
                rounds, read = self._ends[window] - read, self._ends[window]
                ahead = None
            else:
                if ahead is None or corrections != self._corrections:
                    corrections, ahead = self._corrections, self._rounds_ahead(window)
                coming = next(ahead, None)
                if coming is None:
                    return
                rounds, read = coming, read + coming
            window += 1
            yield from [rounds] if self._plan.step_per_window else [1] * rounds

    def _rounds_ahead(self, window: int) -> Iterator[int]:
        """Rounds of the windows from that one on, which are not planned yet."""
        if self._finished:
            return iter(())
        position = self._planned_to
        spans = self._plan.spans(position)
        rounds = (int(one) for span in spans for one in span.block.rounds)
        first = next(rounds, None)
        if first is None:
            return iter(())
        return islice(chain([first - position.rounds], rounds), window - len(self._ends), None)

    def after(self, batches: int | None) -> tuple[Plan, Position]:
        """Where the epoch stands after that many batches of this drawing, and whose plan that is.

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
            return self._plan, Position(epoch=epoch + 1)
        if not done:
            return self._walked[0].plan if self._walked else self._plan, self.began
        window = bisect_right(self._ends, done - 1)
        number = bisect_right(self._walked, window, key=lambda walked: walked.first) - 1
        walked = self._walked[number]
        already = self._ends[window - 1] if window else -self.began.rounds
        position = walked.stretch.position(epoch, window - walked.first, done - already)
        if done == self._ends[window]:
            position = Position(epoch=epoch, start=position.stop, stop=position.stop)
        return walked.plan, position
