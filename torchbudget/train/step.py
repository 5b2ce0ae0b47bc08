"""A step: when it is complete, and its numbers, pending on one rank, in total and as reported."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from torchbudget.checks import at_least_one, is_int, is_number, positive_number
from torchbudget.errors import OptionError, SampleTooLargeError, StateError
from torchbudget.plan.step_source import StepSource
from torchbudget.train.process_group import Ranks

_VERSION: Final = 1  # of the state


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step did, over all ranks.

    Attributes:
        number: of the step, from 1.
        loss: Σ loss / Σ weight.
        weight: Σ weight.
        gradient_norm: before clipping; `None` without `max_norm`.
        micro_batches: on all ranks.
        skipped: whether an optimizer did not step: the gradient scaler found a gradient that is not
            finite, or all weights were 0.
    """

    number: int
    loss: float
    weight: float
    gradient_norm: float | None
    micro_batches: int
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What was accumulated on this rank since the last step."""

    micro_batches: int = 0
    samples: float = 0
    weight: float = 0
    loss: Tensor | float = 0.0

    def encode(self, steps: int, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """It as plain types; the gradients of what is pending are copied.

        Args:
            steps: that were taken before.
            parameters: that have the gradients.
        """
        gradients = [p.grad for p in parameters] if self.micro_batches else []
        return {
            "version": _VERSION,
            "steps": steps,
            **asdict(replace(self, loss=float(self.loss))),
            "gradients": [None if g is None else g.detach().clone() for g in gradients],
        }

    @classmethod
    def load(cls, state: Mapping[str, Any], parameters: Sequence[Tensor]) -> Pending:
        """What was pending, after the parameters' gradients are set to those of the state.

        Raises:
            StateError: it is not the state of an accumulator, or of other parameters.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION:
            raise StateError("expected what GradAccumulator.state_dict() returned")
        gradients = state["gradients"] or [None] * len(parameters)
        if len(gradients) != len(parameters) or any(
            gradient is not None and gradient.shape != parameter.shape
            for gradient, parameter in zip(gradients, parameters, strict=True)
        ):
            raise StateError("the state's gradients are of other parameters")
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        return cls(**{field.name: state[field.name] for field in fields(cls)})


@dataclass(slots=True, kw_only=True)
class OpenMicroBatch:
    """What has come so far in a micro-batch that is not over."""

    weight: float
    backwards: int = 0
    loss: Tensor | float = 0.0

    @classmethod
    def of(cls, weight: float | Tensor) -> OpenMicroBatch:
        """One that begins.

        Raises:
            OptionError: the weight is no finite number of at least 0, nor a tensor of one.
        """
        value = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
        if not is_number(value) or not 0 <= value < math.inf:
            raise OptionError(f"weight must be a number of at least 0, got {weight!r}")
        return cls(weight=float(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A step's numbers over all ranks.

    Attributes:
        loss: Σ loss.
        weight: Σ weight.
        micro_batches: their number.
        done: every rank is at the end of its data.
        present: for each parameter, on how many ranks it has a gradient; empty on a single rank.
    """

    loss: float
    weight: float
    micro_batches: int
    done: bool
    present: Sequence[float]


def total_over_ranks(
    ranks: Ranks,
    pending: Pending,
    parameters: Sequence[Tensor],
    *,
    done: bool = False,
    failed: bool = False,
) -> Total:
    """Sum what all ranks have of this step; one collective.

    Args:
        ranks: that share the step.
        pending: what this rank has of it.
        parameters: of which some may have no gradient.
        done: this rank is at the end of its data.
        failed: this rank gives up.

    Raises:
        OptionError: a gradient is sparse, on any of several ranks.
        SampleTooLargeError: another rank gives up, and this one does not.
    """
    # On one rank without tensors: `measure_cost` may trace the step on fake ones.
    alone = len(ranks) == 1
    gradients = [] if alone else [parameter.grad for parameter in parameters]
    present = [float(gradient is not None) for gradient in gradients]
    sparse = any(g is not None and g.layout is not torch.strided for g in gradients)
    loss = float(pending.loss) if alone else 0.0
    numbers = [loss, pending.weight, pending.micro_batches, done, failed, sparse, *present]
    if not alone:
        mine = torch.tensor(numbers, dtype=torch.float64)
        mine[0] = pending.loss  # may be on another device
        numbers = ranks.sum(mine.to(ranks.device(parameters[0].device))).tolist()
    loss, weight, micro_batches, at_end, failures, sparse_ones, *present = numbers
    # Every rank raises, since every rank has the sum: none is left waiting in a collective.
    if sparse_ones:
        raise OptionError(
            "sparse gradients cannot be summed over ranks; make the embedding with sparse=False"
        )
    if failures and not failed:
        raise SampleTooLargeError(
            "out of memory with one sample on another rank, which has given up"
        )
    return Total(
        loss=loss,
        weight=weight,
        micro_batches=int(micro_batches),
        done=at_end == len(ranks),
        present=present,
    )


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
