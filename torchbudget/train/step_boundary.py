"""When an optimizer step is complete: after micro-batches, samples or a weight, or as planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from torchbudget.checks import at_least_one, is_int, positive_number
from torchbudget.errors import OptionError
from torchbudget.plan.step_source import StepSource
from torchbudget.train.step import Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaching:
    """Steps of at least so many micro-batches or samples, or of at least a weight, on each rank.

    Attributes:
        amount: what is compared: "micro_batches", "samples" or "weight".
        least: at which a step ends; if infinite, only `step` and `flush` end one.
    """

    amount: str
    least: float

    def ends(self, pending: Pending) -> bool:
        """Whether a step that has this much on this rank, the coming micro-batch included, ends."""
        return bool(getattr(pending, self.amount) >= self.least)

    def taken(self, micro_batches: int) -> None:
        """Take note of a step that had so many micro-batches of this rank."""

    def restarted(self) -> bool:
        """Whether the data began again, so that what is pending is of an earlier epoch."""
        return False


class Planned:
    """The steps that a sampler has planned for the epoch that it is iterating over."""

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._iteration: int | None = None  # that the numbers are of
        self._numbers: Iterator[int] = iter(())  # micro-batches of the iteration's further steps
        self._end: int | None = None  # micro-batches at which the present step ends

    def ends(self, pending: Pending) -> bool:
        """See `Reaching.ends`.

        Raises:
            OptionError: the source plans no further step in this iteration.
        """
        if self._iteration != self._source.iterations:
            self._iteration = self._source.iterations
            self._numbers = iter(self._source.steps)
            self._end = None
        if self._end is None:
            number = next(self._numbers, None)
            if number is None:
                raise OptionError(
                    "a micro-batch came, but no further step is planned: give the accumulator the "
                    "sampler that the batches come from, and take each of its batches once"
                )
            # What is pending from an epoch without flush() goes into this step.
            self._end = pending.micro_batches - 1 + number
        return pending.micro_batches >= self._end

    def taken(self, micro_batches: int) -> None:
        """See `Reaching.taken`; what a step that was ended early lacks is the next step."""
        if self._end is not None:
            self._end = self._end - micro_batches if self._end > micro_batches else None

    def restarted(self) -> bool:
        """See `Reaching.restarted`."""
        return self._iteration not in (None, self._source.iterations)


StepBoundary: TypeAlias = Reaching | Planned


def step_boundary_of(
    steps: StepSource | int | None, samples: int | None, weight: float | None, ranks: int
) -> StepBoundary:
    """The rule that the arguments of `GradAccumulator` name.

    Raises:
        OptionError: more than one of them, or one of a wrong type or sign.
    """
    given = {"steps": steps, "samples": samples, "weight": weight}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise OptionError(f"give one of steps, samples and weight, got {' and '.join(named)}")
    if isinstance(steps, StepSource):
        return Planned(steps)
    if steps is not None:
        if not is_int(steps) or steps < 1:
            raise OptionError(
                "steps must be an int of at least 1, or a sampler that has `steps` and "
                f"`iterations`, such as a MemoryBudgetBatchSampler; got {steps!r}"
            )
        return Reaching(amount="micro_batches", least=int(steps))
    if samples is not None:
        return Reaching(amount="samples", least=at_least_one("samples", samples) / ranks)
    if weight is not None:
        return Reaching(amount="weight", least=positive_number("weight", weight) / ranks)
    return Reaching(amount="micro_batches", least=math.inf)
