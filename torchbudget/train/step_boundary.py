"""When an optimizer step is complete: the four rules, behind one question."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral, Real
from typing import Any, Protocol

from torchbudget.errors import OptionError


class StepBoundary(Protocol):
    """Says of each micro-batch whether the step ends with it."""

    def ends(self, micro_batches: int, samples: float, weight: float) -> bool:
        """Whether a step that holds this much is complete.

        Args:
            micro_batches: of the step on this rank, the coming one included.
            samples: likewise.
            weight: likewise.
        """
        ...

    def taken(self, micro_batches: int) -> None:
        """A step was taken that held so many micro-batches of this rank."""
        ...

    def restarted(self) -> bool:
        """Whether the data began anew, so that what the step holds is of an epoch gone by."""
        ...


class Never:
    """Only `GradAccumulator.step` and `flush` end a step."""

    def ends(self, micro_batches: int, samples: float, weight: float) -> bool:
        """See `StepBoundary.ends`."""
        return False

    def taken(self, micro_batches: int) -> None:
        """See `StepBoundary.taken`."""

    def restarted(self) -> bool:
        """See `StepBoundary.restarted`."""
        return False


class Every(Never):
    """Steps of a number of micro-batches."""

    def __init__(self, number: int) -> None:
        self._number = number

    def ends(self, micro_batches: int, samples: float, weight: float) -> bool:
        """See `StepBoundary.ends`."""
        return micro_batches >= self._number


class Reaching(Never):
    """Steps that hold at least a number of samples, or a weight, on this rank."""

    def __init__(self, samples: float | None, weight: float | None) -> None:
        self.samples = samples
        self._weight = weight

    def ends(self, micro_batches: int, samples: float, weight: float) -> bool:
        """See `StepBoundary.ends`."""
        if self.samples is not None:
            return samples >= self.samples
        return self._weight is not None and weight >= self._weight


class Planned:
    """The steps that a sampler has planned for the epoch that it draws.

    Args:
        source: with `steps`, an iterator over the numbers of micro-batches of the epoch's steps;
            and, if it can be drawn from anew, with `drawings`, how often it was.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._drawings: int | None = None
        self._steps: Iterator[int] = iter(())
        self._left: int | None = None  # micro-batches of the planned step

    def ends(self, micro_batches: int, samples: float, weight: float) -> bool:
        """See `StepBoundary.ends`."""
        if self._drawings != self._now:
            self._begin()
        if self._left is None:
            self._left = micro_batches - 1 + self._next()
        return micro_batches >= self._left

    def taken(self, micro_batches: int) -> None:
        """See `StepBoundary.taken`; one that was ended early leaves the rest to the next."""
        if self._left is not None:
            self._left = self._left - micro_batches if self._left > micro_batches else None

    def restarted(self) -> bool:
        """See `StepBoundary.restarted`."""
        return self._drawings not in (None, self._now)

    @property
    def _now(self) -> int:
        return getattr(self._source, "drawings", 0)

    def _begin(self) -> None:
        self._drawings = self._now
        self._left = None
        self._steps = iter(self._source.steps)

    def _next(self) -> int:
        number = next(self._steps, None)
        if number is None:  # a source that does not count its drawings goes on with the next one
            self._begin()
            number = next(self._steps, None)
        if number is None:
            raise OptionError(
                "a micro-batch came, but no step is planned: give the accumulator the sampler that "
                "the batches come from"
            )
        return number


def step_boundary_of(
    steps: Any, samples: int | None, weight: float | None, ranks: int
) -> StepBoundary:
    """The rule that the arguments of `GradAccumulator` name.

    Raises:
        OptionError: more than one of them, or one that is no positive number and no sampler.
    """
    given = {"steps": steps, "samples": samples, "weight": weight}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise OptionError(f"give one of steps, samples and weight, got {' and '.join(named)}")
    if steps is not None and hasattr(steps, "steps"):
        return Planned(steps)
    for name in named:
        value = given[name]
        whole = name != "weight"
        kind = Integral if whole else Real
        if isinstance(value, bool) or not isinstance(value, kind) or not float(value) > 0:
            raise OptionError(f"{name} must be a positive number, got {value!r}")
    if steps is not None:
        return Every(int(steps))
    if not named:
        return Never()
    return Reaching(
        None if samples is None else samples / ranks, None if weight is None else weight / ranks
    )
