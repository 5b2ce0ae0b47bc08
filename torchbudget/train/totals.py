"""The few numbers of a step: on this rank, and over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbudget.errors import OptionError
from torchbudget.train.process_group import Ranks


@dataclass(slots=True)
class Pending:
    """What the step in progress holds on this rank."""

    micro_batches: int = 0
    samples: float = 0
    weight: float = 0
    loss: Tensor | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """A step's numbers over all ranks.

    Attributes:
        loss: Σ loss.
        weight: Σ weight.
        micro_batches: of all.
        done: every rank is at the end of its data.
        failed: a rank gave up.
        present: of each parameter, on how many ranks it has a gradient; empty on a single one.
    """

    loss: float
    weight: float
    micro_batches: int
    done: bool
    failed: bool
    present: Sequence[float]


def summed(
    ranks: Ranks,
    pending: Pending,
    parameters: Sequence[Tensor],
    *,
    done: bool = False,
    failed: bool = False,
) -> Total:
    """What all ranks have of this step; one collective.

    Args:
        ranks: that share it.
        pending: what this one has.
        parameters: whose gradients may be there or not.
        done: this rank is at the end of its data.
        failed: this rank gives up.

    Raises:
        OptionError: a gradient is sparse, on any of several ranks.
    """
    if len(ranks) == 1:
        return Total(
            loss=float(pending.loss),
            weight=pending.weight,
            micro_batches=pending.micro_batches,
            done=done,
            failed=failed,
            present=(),
        )
    present = [float(parameter.grad is not None) for parameter in parameters]
    sparse = any(p.grad is not None and p.grad.layout is not torch.strided for p in parameters)
    numbers = torch.tensor(
        [0.0, pending.weight, pending.micro_batches, done, failed, sparse, *present],
        dtype=torch.float64,
    )
    numbers[0] = pending.loss
    device = ranks.device(parameters[0].device)
    numbers = ranks.summed(numbers.to(device))
    loss, weight, micro_batches, at_end, failures, sparse_ones, *present = numbers.tolist()
    if sparse_ones:
        raise OptionError(
            "sparse gradients cannot be summed over ranks; make the embedding with sparse=False"
        )
    return Total(
        loss=loss,
        weight=weight,
        micro_batches=int(micro_batches),
        done=at_end == len(ranks),
        failed=failures > 0,
        present=present,
    )
