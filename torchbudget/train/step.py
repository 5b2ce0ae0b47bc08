"""The numbers of a step: pending on one rank, in total over all ranks, and as reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbudget.errors import OptionError, SampleTooLargeError
from torchbudget.train.process_group import Ranks


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


@dataclass(slots=True, kw_only=True)
class OpenMicroBatch:
    """What has come so far in a micro-batch that is not over."""

    weight: float
    backwards: int = 0
    loss: Tensor | float = 0.0


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
