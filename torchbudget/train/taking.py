"""Taking a step: its numbers and gradients over all ranks, and then the optimizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchbudget.errors import OptionError, SampleTooLargeError
from torchbudget.train.gradient_sums import GradientSums
from torchbudget.train.misuse import MisuseDetector
from torchbudget.train.optimizers import SPARSE, Optimizers
from torchbudget.train.process_group import Ranks
from torchbudget.train.retry import ran_out_of_memory
from torchbudget.train.step import (
    Pending,
    Step,
    checked_late_weight,
    float64_device,
    read_at_once,
)
from torchbudget.train.wrappers import DistributedModules


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaker:
    """Takes the step of what is pending on the ranks that share it.

    What decides about the step is summed on the host. Only weights on a device and what a scaler
    decides are read from one, both in one read before the optimizers are enqueued.

    Attributes:
        ranks: that share the step.
        distributed: the modules that reduce gradients by themselves.
        optimizers: that step.
        detector: of misuse.
        divisor: that losses were divided by.
        keeps_gradients: gradients stay allocated after a step, as between micro-batches of one.
    """

    ranks: Ranks
    distributed: DistributedModules
    optimizers: Optimizers
    detector: MisuseDetector
    divisor: float
    keeps_gradients: bool = False

    def take(
        self, pending: Pending, number: int, *, done: bool, failure: str | None
    ) -> tuple[Step | None, bool]:
        """Take a step, or give it up on every rank.

        If anything raises, its gradients are cleared, since the weights are forgotten.

        Args:
            pending: on this rank.
            number: of the step.
            done: this rank is at the end of its data.
            failure: why this rank gives up: memory has run out.

        Returns:
            The step, `None` where no rank has any micro-batch; and whether every rank is at the end
            of its data.

        Raises:
            OptionError: a gradient is sparse, or a weight is no number of at least 0.
            SampleTooLargeError: this rank gives up, or another one.
        """
        try:
            return self._take(pending, number, done=done, failure=failure)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Clear the gradients of a step that is not taken."""
        self.optimizers.clear()
        self.distributed.clear()
        self.detector.step_abandoned()

    def _take(
        self, pending: Pending, number: int, *, done: bool, failure: str | None
    ) -> tuple[Step | None, bool]:
        parameters = self.optimizers.parameters()
        device = float64_device(parameters[0].device)
        zero = torch.zeros((), dtype=torch.float64, device=device)
        numbers = [
            # A loss or a weight may be on another device than the first parameter.
            (zero + (one.to(device) if isinstance(one, torch.Tensor) else one)).reshape(())
            for one in (pending.loss, pending.late_weight())
        ]
        sums = GradientSums(
            self.ranks,
            self.distributed.summed(parameters),
            torch.stack(numbers),
        )
        if failure is None and ran_out_of_memory(sums.allocate):
            failure = "out of memory where gradients are summed over ranks"
        weight, unread, micro_batches, is_over, present = self._totals(
            pending, sums, done=done, failure=failure
        )
        if not micro_batches:  # in `flush`, ranks at their end meet here once more
            sums.drop(present)
            return None, is_over
        self.distributed.broadcast_buffers()
        loss, late = sums.sum(present).unbind()
        with self.optimizers.unscaled() as largest:
            late_weight, largest_gradient = read_at_once([late if unread else None, largest])
            weight += checked_late_weight(late_weight or 0)
            norm, skipped = None, weight == 0
            with self.detector.own_step(parameters, has_weight=not skipped):
                if not skipped:
                    divisors = self.distributed.divisors()
                    factor = self.divisor / weight
                    norm, skipped = self.optimizers.step(factor, divisors, largest_gradient)
                    # Of the weights before it: an autocast that is open around steps keeps its
                    # casts.
                    torch.clear_autocast_cache()
                else:
                    self.optimizers.leave_unscaled()
                if self.keeps_gradients:
                    self.optimizers.zero()
                else:
                    self.optimizers.clear()
        if not skipped:
            self.optimizers.schedule()
        step = Step(
            number=number,
            loss=loss / weight if weight else math.nan,
            weight=weight,
            gradient_norm=norm,
            micro_batches=micro_batches,
            skipped=skipped,
        )
        return step, is_over

    def _totals(
        self, pending: Pending, sums: GradientSums, *, done: bool, failure: str | None
    ) -> tuple[float, bool, int, bool, Sequence[float]]:
        """What all ranks have of a step; one collective on the host.

        Args:
            pending: what this rank has of it.
            sums: of gradients, which are allocated.
            done: this rank is at the end of its data.
            failure: why this rank gives up: memory has run out.

        Returns:
            Σ weight, as far as it is known; whether any rank has weights on a device; the
            micro-batches; whether every rank is at the end of its data; and for each parameter
            that is summed, on how many ranks it has a gradient.

        Raises:
            OptionError: a gradient is sparse, on any of several ranks.
            SampleTooLargeError: this rank gives up, or another one.
        """
        numbers = [pending.weight, pending.unread is not None, pending.micro_batches]
        numbers += [done, failure is not None, sums.sparse]
        sums_of = self.ranks.sum_on_host([*numbers, *sums.present])
        weight, unread, micro_batches, at_end, failures, sparse, *present = sums_of
        # Every rank raises, since every rank has the sum: none is left waiting in a collective.
        if sparse:
            raise OptionError(SPARSE)
        if failures:
            raise SampleTooLargeError(
                failure
                or "out of memory on another rank, which has given up, see its error; the step "
                "is abandoned on every rank"
            )
        return weight, unread > 0, int(micro_batches), at_end == len(self.ranks), present
