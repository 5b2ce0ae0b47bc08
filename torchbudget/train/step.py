"""A step: when it is complete, what is pending of it on one rank, and what it did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from torchbudget.checks import at_least_one, is_int, is_number, natural, positive_number
from torchbudget.errors import OptionError
from torchbudget.protocols import StepSource

Number = TypeVar("Number")


class _Unread(Generic[Number]):
    """A field whose number may still be on a device; all of an object are read together."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, one: Any, owner: type | None = None) -> Number:
        if one is None:
            raise AttributeError(self._name)  # so that the field has no default
        values = vars(one)
        unread = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        values.update(zip(unread, read_at_once([*unread.values()]), strict=True))
        return cast("Number", values[self._name])

    def __set__(self, one: Any, value: Tensor | Number) -> None:
        vars(one)[self._name] = value


@dataclass(frozen=True, kw_only=True)  # without slots, since `_Unread` keeps values in `vars`
class Step:
    """Figures of one optimizer step, over all ranks.

    The first access to `loss` or `gradient_norm` reads both from the device, and waits for the step
    to end there.

    Attributes:
        number: number of the step, from 1.
        loss: Σ loss / Σ weight.
        weight: Σ weight.
        gradient_norm: norm of the gradient before clipping; `None` without `max_norm`.
        micro_batches: number of micro-batches on all ranks.
        skipped: true if no optimizer stepped, since a gradient was not finite and the accumulator
            has a scaler or `skip_nonfinite`, or since all weights were 0.
    """

    number: int
    loss: _Unread[float] = _Unread()
    weight: float
    gradient_norm: _Unread[float | None] = _Unread()
    micro_batches: int
    skipped: bool

    def loss_sum(self) -> Tensor | float:
        """Σ loss, which is not read here."""
        loss: Tensor | float = vars(self)["_loss"]
        return loss * self.weight


def read_at_once(tensors: Sequence[Tensor | None]) -> list[float | None]:
    """The numbers of tensors of one element; waits for devices once, if there are any."""
    given = [in_float64(one).reshape(()) for one in tensors if one is not None]
    numbers = torch.stack([one.to(given[0].device) for one in given]).tolist() if given else []
    return [None if one is None else numbers.pop(0) for one in tensors]


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """Sums of this rank: of the open micro-batch, or since the last step.

    Attributes:
        micro_batches: parts of a micro-batch that was split count once.
        samples: in them.
        weight: Σ weight, if it is known.
        unread: Σ weight of the tensors on a device, which are read at the step; NaN where one of
            them is below 0.
        loss: Σ loss, in float64.
        backwards: number of backward calls.
    """

    micro_batches: int = 0
    samples: float = 0
    weight: float = 0.0
    unread: Tensor | None = None
    loss: Tensor | float = 0.0
    backwards: int = 0

    @classmethod
    def of(cls, weight: float | Tensor, samples: int = 0, *, read: bool) -> Pending:
        """A micro-batch that begins.

        Args:
            weight: a number, or a tensor of one.
            samples: in it.
            read: whether a tensor on a device must be read now.

        Raises:
            OptionError: the weight is no finite number of at least 0, nor a tensor of one; or
                `samples` is no int of at least 0.
        """
        weight, samples = _as_number(weight), _as_number(samples)
        pending = cls(micro_batches=1, samples=natural("samples", samples))
        if isinstance(weight, Tensor) and weight.numel() == 1 and not read and waits(weight):
            unread = in_float64(weight)
            pending.unread = torch.where(unread >= 0, unread, math.nan)
        else:
            pending.weight = checked_weight(weight)
        return pending

    def __add__(self, other: Pending) -> Pending:
        unread = [one for one in (self.unread, other.unread) if one is not None]
        return Pending(
            micro_batches=self.micro_batches + other.micro_batches,
            samples=self.samples + other.samples,
            weight=self.weight + other.weight,
            unread=sum(unread[1:], unread[0]) if unread else None,
            loss=self.loss + other.loss,
            backwards=self.backwards + other.backwards,
        )

    def total_weight(self) -> float:
        """Σ weight; waits for the device if there are tensors of weights on it.

        Raises:
            OptionError: it is no finite number of at least 0.
        """
        return self.weight + (0.0 if self.unread is None else checked_weight(self.unread))


def _as_number(given: Any) -> Any:
    """The argument, or 2 in place of a symbol: a trace needs no value, and reading one fixes it."""
    return 2 if isinstance(given, (torch.SymInt, torch.SymFloat)) else given


def checked_weight(weight: float | Tensor | None) -> float:
    """The weight of a micro-batch or a step as a number; reading it may wait for a device.

    Raises:
        OptionError: it is no finite number of at least 0, nor a tensor of one.
    """
    value = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if not is_number(value) or not 0 <= value < math.inf:
        raise OptionError(
            f"weight must be a number of at least 0, got {weight!r} (for weights on a device: "
            "their sum over the step, NaN if one was below 0)"
        )
    return float(value)


def check_scalar(loss: object) -> None:
    """Raise an `OptionError` if a loss is not a tensor of one number."""
    if not isinstance(loss, Tensor):
        raise OptionError(
            f"the loss must be a scalar tensor with its graph, got {type(loss).__name__}: pass the "
            "tensor itself, not its item(), nor a tuple or an output that contains it"
        )
    if loss.numel() != 1:
        raise OptionError(f"the loss must be a scalar, got the shape {tuple(loss.shape)}")


def waits(tensor: Tensor) -> bool:
    """Whether reading the tensor's values waits for a device."""
    return tensor.device.type != "cpu"


def in_float64(tensor: Tensor) -> Tensor:
    """A copy of a tensor in float64, without its graph."""
    return tensor.detach().to(torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaching:
    """Steps of at least a number of micro-batches or samples, or a weight, on each rank.

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
        """Note the number of this rank's micro-batches in a step."""

    def restarted(self) -> bool:
        """Whether the data began again, so that what is pending is of an earlier epoch."""
        return False

    def has_several(self) -> bool:
        """Whether steps may have several micro-batches."""
        return self.amount != "micro_batches" or self.least > 1


class Planned:
    """The steps that a sampler has planned for the epoch that it is iterating over."""

    def __init__(self, source: StepSource) -> None:
        self._source = source
        self._steps: Sequence[int] | None = None  # those of the iteration
        self._begun = 0  # steps of the iteration that were begun
        self._end: int | None = None  # micro-batches at which the present step ends

    def ends(self, pending: Pending) -> bool:
        """See `Reaching.ends`.

        Raises:
            OptionError: the source has planned no further step in this iteration.
        """
        steps = self._source.steps
        if steps is not self._steps:
            self._steps, self._begun, self._end = steps, 0, None
        if self._end is None:
            if self._begun == len(steps):
                raise OptionError(
                    "a micro-batch began, but no further step is planned: pass the sampler of "
                    "these batches to the accumulator as steps=, and use each batch once"
                )
            # Micro-batches pending from an epoch without flush() go into this step.
            self._end = pending.micro_batches - 1 + steps[self._begun]
            self._begun += 1
        return pending.micro_batches >= self._end

    def taken(self, micro_batches: int) -> None:
        """See `Reaching.taken`; micro-batches that an early end leaves out are the next step."""
        if self._end is not None:
            self._end = self._end - micro_batches if self._end > micro_batches else None

    def restarted(self) -> bool:
        """See `Reaching.restarted`."""
        return self._steps is not None and self._steps is not self._source.steps

    def has_several(self) -> bool:
        """See `Reaching.has_several`; judged by the first steps."""
        return self._source.accumulates()


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
        raise OptionError(f"pass only one of steps, samples and weight, got {' and '.join(named)}")
    if isinstance(steps, StepSource):
        return Planned(steps)
    if steps is not None:
        if not is_int(steps) or steps < 1:
            raise OptionError(
                "steps must be an int of at least 1, or a sampler that has `steps` and "
                f"`accumulates`, such as a MemoryBudgetBatchSampler; got {steps!r}"
            )
        return Reaching(amount="micro_batches", least=int(steps))
    if samples is not None:
        return Reaching(amount="samples", least=at_least_one("samples", samples) / ranks)
    if weight is not None:
        return Reaching(amount="weight", least=positive_number("weight", weight) / ranks)
    return Reaching(amount="micro_batches", least=math.inf)
