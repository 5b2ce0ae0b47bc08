"""The numbers of a step: pending on one rank, saved, in total over all ranks, and as reported."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import torch
from torch import Tensor

from torchbudget.checks import is_number
from torchbudget.errors import OptionError, SampleTooLargeError, StateError
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
    if len(ranks) == 1:  # without tensors: `measure_cost` may trace the step on fake ones
        return Total(
            loss=float(pending.loss),
            weight=pending.weight,
            micro_batches=pending.micro_batches,
            done=done,
            present=(),
        )
    present = [float(parameter.grad is not None) for parameter in parameters]
    sparse = any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters)
    numbers = torch.tensor(
        [0.0, pending.weight, pending.micro_batches, done, failed, sparse, *present],
        dtype=torch.float64,
    )
    numbers[0] = pending.loss  # may be on another device
    numbers = ranks.sum(numbers.to(ranks.device(parameters[0].device)))
    loss, weight, micro_batches, at_end, failures, sparse_ones, *present = numbers.tolist()
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
