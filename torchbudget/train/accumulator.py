"""`GradAccumulator`: micro-batches become exactly the step of the one large batch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.errors import OptionError, SampleTooLargeError, StateError, StepError
from torchbudget.train.inputs import is_number, several, weight_of
from torchbudget.train.misuse import MisuseDetector
from torchbudget.train.process_group import Ranks
from torchbudget.train.retry import Attempt, Undo, halves, num_samples, ran_out
from torchbudget.train.step_boundary import Every, Reaching, step_boundary_of
from torchbudget.train.stepping import Step, Stepping
from torchbudget.train.totals import Pending, summed
from torchbudget.train.wrapping import Wrapping

T = TypeVar("T")


class GradAccumulator:
    """Beside the optimizer, makes of micro-batches the step of the one large batch.

    At each step the gradient is Σ loss / Σ weight over all its micro-batches and all ranks,
    whatever the cut: losses are summed, and divided once by what they weigh together. Gradients
    are summed over ranks once a step, behind the last backward; so ranks may have unequal numbers
    of micro-batches, or none.

    A step accumulates, sums over ranks, divides, unscales, clips, steps, updates the scale, sets
    gradients to `None`, and steps the schedulers unless the scaler skipped the step.

    Args:
        optimizer: one, or several that step together.
        module: what is trained, one or several; as it is called, so `DistributedDataParallel` or
            FSDP2's `fully_shard` included. Needed for those two, for `run_or_split`, and to notice
            batch normalisation.
        steps: when a step is complete: a `MemoryBudgetBatchSampler`, whose plan says it, or the
            number of micro-batches on each rank.
        samples: or, at least this many samples, over all ranks.
        weight: or, at least this weight, over all ranks. With none of the three, `step` ends it.
        mean: losses are means, to be multiplied by their weights.
        max_norm: gradients are clipped to this norm, over the parameters of all optimizers;
            infinity only measures it.
        scaler: of gradients, for half precision.
        scheduler: of learning rates, one or several.
        divisor: a constant that losses are divided by before backward, and gradients multiplied by
            after; near the weight of a step it keeps half-precision sums from overflowing. A power
            of 2 changes no bit.
        group: of processes. Default: all, where `torch.distributed` is initialized.

    Raises:
        OptionError: an argument that cannot hold.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> accumulator = GradAccumulator(optimizer, model, steps=2)
    >>> for x in torch.ones(5, 2).split([2, 2, 1]):
    ...     with accumulator.micro_batch(weight=len(x)):
    ...         accumulator.backward(model(x).sum())
    ...     if accumulator.stepped:
    ...         print(accumulator.last.weight)
    4.0
    >>> accumulator.flush()
    >>> accumulator.last.weight
    1.0
    """

    accumulates_gradients = True  # for `measure_cost`, which finds it in a step

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        module: nn.Module | Sequence[nn.Module] = (),
        *,
        steps: Any = None,
        samples: int | None = None,
        weight: float | None = None,
        mean: bool = False,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = (),
        divisor: float = 1.0,
        group: Any = None,
    ) -> None:
        optimizers = several("optimizer", optimizer, Optimizer)
        one = () if scheduler is None else [scheduler]
        schedulers = list(scheduler) if isinstance(scheduler, (list, tuple)) else list(one)
        self.modules = several("module", module, nn.Module)
        if not optimizers:
            raise OptionError("a GradAccumulator needs an optimizer")
        if any(isinstance(one, torch.optim.LBFGS) for one in optimizers):
            raise OptionError(
                "LBFGS evaluates the loss by itself, which micro-batches do not allow"
            )
        if any(isinstance(one, ReduceLROnPlateau) for one in schedulers):
            raise OptionError("ReduceLROnPlateau needs a metric: step it yourself, behind evaluate")
        for name, value in (("max_norm", max_norm), ("divisor", divisor)):
            if value is not None and not (is_number(value) and value > 0):
                raise OptionError(f"{name} must be a positive number, got {value!r}")
        self.mean = mean
        self.last: Step | None = None
        self.stepped = False
        self.out_of_memory = 0
        self._divisor = float(divisor)
        self._stepping = Stepping(
            optimizers=optimizers,
            schedulers=schedulers,
            scaler=scaler,
            max_norm=max_norm,
        )
        self.ranks = Ranks(group)
        self._ending = step_boundary_of(steps, samples, weight, len(self.ranks))
        self._wrapping = Wrapping(self.modules)
        self._pending = Pending()
        self._steps = 0
        self._inside: _MicroBatch | None = None
        self._attempt: Attempt | None = None  # of `run_or_split`
        self._parts_follow = False
        self._watch = MisuseDetector(optimizers, self.modules, self._wrapping.distributed)

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds shards of a module."""
        return self._wrapping.sharded

    @property
    def needs_samples(self) -> bool:
        """Whether steps end by their number of samples, so that each micro-batch must tell its."""
        return isinstance(self._ending, Reaching) and self._ending.samples is not None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Steps inside are of single micro-batches, and are forgotten at the end.

        `measure_cost` and `warm_up` use it where a step accumulates; what the optimizers do is
        theirs to put back.
        """
        names = ("_pending", "_ending", "_steps", "last", "stepped", "out_of_memory")
        before = {name: getattr(self, name) for name in names}
        self._pending, self._ending = Pending(), Every(1)
        try:
            with self._watch.quiet():
                yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    # ------------------------------------------------------------------ micro-batches

    @contextmanager
    def micro_batch(
        self, weight: float | Tensor, *, samples: int | None = None, last: bool = False
    ) -> Iterator[None]:
        """The forward and the backward of one micro-batch stand inside.

        The step is taken at the end, where it is complete. What raises inside is not counted, but
        its gradients may be there; `run_or_split` takes them back.

        Args:
            weight: what its loss is to be divided by, in a large batch of it alone: the number of
                samples, or of tokens that have a label.
            samples: in it; needed where steps end by `samples`.
            last: end the step with it, whatever is planned.

        Raises:
            OptionError: the weight is no number of at least 0; or micro-batches are nested.
            StepError: no `backward` stood inside.
        """
        if self._inside is not None:
            raise OptionError("micro_batch stands inside another one")
        counted = weight_of(weight)
        if samples is None and self.needs_samples:
            raise OptionError("steps end by samples: say micro_batch(…, samples=…)")
        self.stepped = False
        pending = replace(self._pending)
        first = not pending.micro_batches and not pending.weight
        self._watch.entering(self._ending.restarted(), self._stepping.each() if first else ())
        pending.micro_batches += not self._parts_follow
        pending.samples += samples or 0
        pending.weight += counted
        ends = not self._parts_follow and (
            self._ending.ends(pending.micro_batches, pending.samples, pending.weight) or last
        )
        self._inside = inside = _MicroBatch(weight=counted)
        try:
            with self._wrapping.accumulating(last=ends):
                yield
        except BaseException:
            if inside.backwards and self._attempt is None:
                self._watch.left_behind()
            raise
        finally:
            self._inside = None
            self._watch.outside()
        if not inside.backwards:
            raise StepError(
                "no accumulator.backward(loss) stood inside micro_batch: its gradients would be "
                "of another scale than the rest"
            )
        pending.loss = pending.loss + inside.loss
        self._pending = pending
        self._merge()
        self._watch.left(pending.micro_batches, self._stepping.each(), ends=ends)
        self.stepped = ends
        if ends:
            self._take()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward of a micro-batch's loss; several times where it has several losses.

        Args:
            loss: a scalar: the sum over the micro-batch, or its mean with `mean=True`.
            options: as `torch.Tensor.backward` takes them.

        Raises:
            OptionError: outside of `micro_batch`, or the loss is no scalar.
        """
        inside = self._inside
        if inside is None:
            raise OptionError("backward must stand inside accumulator.micro_batch(weight=…)")
        if loss.numel() != 1:
            raise OptionError(f"the loss must be a scalar, got the shape {tuple(loss.shape)}")
        self._watch.loss(loss, self.mean, inside.weight)
        inside.backwards += 1
        if self.mean and not inside.weight:  # a mean over nothing is no number
            if self.sharded:
                raise OptionError("a mean loss of weight 0, whose backward FSDP needs all the same")
            return
        inside.loss = inside.loss + loss.detach().double() * (inside.weight if self.mean else 1)
        factor = (inside.weight if self.mean else 1) / self._divisor
        scaled = loss if factor == 1 else loss * factor
        if self._stepping.scaler is not None:
            scaled = self._stepping.scaler.scale(scaled)
        torch.autograd.backward(scaled, **options)

    def run_or_split(
        self, function: Callable[[Any], object], batch: Any, *, cost: MeasuredCost | None = None
    ) -> None:
        """Run a micro-batch; where memory runs out, undo it and run its halves instead.

        Gradients, the modules' buffers, the random generators and what was counted are as before
        when the halves are run, each in a `micro_batch` of its own; to the plan, and to other
        ranks, they are one. Where memory suffices the arithmetic is that of a plain call, bit for
        bit, where a micro-batch has one backward. While it runs, a second set of gradients is held,
        and a third while parts are run; if a part fails for good, the whole batch is undone.

        Args:
            function: runs `micro_batch` and `backward` on a batch.
            batch: of a torchbudget collate, or tensors (nested too) whose first axis is the sample.
            cost: is told of what did not fit, for `MemoryBudgetBatchSampler.replan`.

        Raises:
            SampleTooLargeError: one sample does not fit; on every rank, at this step.
            OptionError: there are no modules whose buffers could be put back, or they are sharded:
                the forward of FSDP is a collective, which cannot be repeated on one rank.
        """
        if not self.modules or self._wrapping.sharded:
            raise OptionError(
                "run_or_split needs GradAccumulator(…, module=…), and no fully_shard: its forward "
                "is a collective, which one rank cannot repeat"
            )
        if cost is not None and not hasattr(batch, "padded_size"):
            raise OptionError("cost=… needs a batch that knows its padded_size: a PaddedBatch")
        num_samples(batch)  # to be refused now, rather than when memory is out
        parts = deque([batch])
        whole: Undo | None = None
        try:
            while parts:
                part = parts.popleft()
                self._parts_follow = bool(parts)
                before = replace(self._pending)
                self._watch.check()
                self._attempt = attempt = Attempt(self._stepping.parameters(), self.modules)
                failed = ran_out(function, part)
                if self._attempt_is_over() != (not failed):
                    raise (
                        SampleTooLargeError(
                            "out of memory in the optimizer's step, behind the batches"
                        )
                        if failed
                        else StepError("run_or_split's function opened no micro_batch")
                    )
                if not failed:
                    continue
                attempt.undo()
                self._pending = before
                self.out_of_memory += 1
                whole = whole or Undo(attempt, self._stepping.parameters(), before)
                n = num_samples(part)
                if cost is not None:
                    cost.observe(n, part.padded_size, None)
                if n == 1:
                    self._give_up()
                parts.extendleft(reversed(halves(part)))
        except BaseException:
            if self._attempt is not None:
                self._attempt.undo()
            if whole is not None:
                self._pending = whole.undo()
            raise
        finally:
            self._parts_follow = False
            self._attempt = None

    def _attempt_is_over(self) -> bool:
        return self._attempt is None

    def _merge(self) -> None:
        """Add the gradients of an attempt that succeeded to those of before."""
        if self._attempt is None:
            return
        for parameter, before in self._attempt.before:
            if before is not None:
                if parameter.grad is not None:
                    before.add_(parameter.grad)
                parameter.grad = before
        self._attempt = None

    def _give_up(self) -> NoReturn:
        """Tell the other ranks, in their next collective, which is this step's, and raise."""
        summed(self.ranks, self._pending, self._stepping.parameters(), failed=True)
        raise SampleTooLargeError(
            "out of memory with one sample; shorten it, or give it more memory"
        )

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """Take the step now, with what there is of it on this rank; nothing is fine.

        With several ranks it is a collective, and each of them must take it.
        """
        self._refuse_unsynchronized()
        self.stepped = False
        self._take()

    def flush(self, when_stepped: Callable[[Step], object] | None = None) -> None:
        """Take what is left of an incomplete step; at the end of the data, on every rank.

        With several ranks, those that are at their end join the steps of the others, without data,
        until all are.

        Args:
            when_stepped: called with each step that is taken here; if what it returns is true, no
                further one is joined.
        """
        self._refuse_unsynchronized()
        stepped, over = False, False
        while not over:
            self.stepped = False
            over = self._take(done=True)
            stepped |= self.stepped
            if self.stepped and when_stepped is not None and self.last is not None:
                over |= bool(when_stepped(self.last))
        self.stepped = stepped

    def _refuse_unsynchronized(self) -> None:
        if self._pending.micro_batches and self._wrapping.sharded:
            raise StepError(
                "FSDP reduces gradients in the backward, and none of this step's has: let steps "
                "come from the sampler's plan, or say micro_batch(…, last=True)"
            )

    def _take(self, *, done: bool = False) -> bool:
        """Take the step; whether every rank is at the end of its data."""
        pending, self._pending = self._pending, Pending()
        parameters = self._stepping.parameters()
        total = summed(self.ranks, pending, parameters, done=done)
        if total.failed:
            raise SampleTooLargeError(
                "out of memory with one sample on another rank, which has given up"
            )
        if not total.micro_batches:  # ranks at their end meet here once more
            return total.done
        self._ending.taken(pending.micro_batches)
        self._steps += 1
        self._wrapping.share_buffers()
        if len(self.ranks) > 1 and not self._wrapping.sharded:
            held = [p for p, there in zip(parameters, total.present, strict=True) if there]
            self.ranks.sum_gradients(held)
        norm, skipped = None, total.weight == 0
        self._watch.stepping(parameters)
        with self._watch.ours():
            if not skipped:
                # FSDP has taken the mean over ranks where the sum is meant.
                times = len(self.ranks) if self._wrapping.sharded else 1
                norm, skipped = self._stepping.step(self._divisor * times / total.weight)
            self._stepping.clear()
        if not skipped:
            self._stepping.schedule()
        self.stepped = True
        self.last = Step(
            number=self._steps,
            loss=total.loss / total.weight if total.weight else math.nan,
            weight=total.weight,
            gradient_norm=norm,
            micro_batches=total.micro_batches,
            skipped=skipped,
        )
        return total.done

    # ------------------------------------------------------------------ keeping it

    def state_dict(self) -> dict[str, Any]:
        """Where the accumulation stands; in the middle of a step with its gradients, copied."""
        pending = self._pending
        gradients = [p.grad for p in self._stepping.parameters()] if pending.micro_batches else []
        self._watch.saved()
        return {
            "version": 1,
            "steps": self._steps,
            "micro_batches": pending.micro_batches,
            "samples": pending.samples,
            "weight": pending.weight,
            "loss": float(pending.loss),
            "gradients": [None if g is None else g.detach().clone() for g in gradients],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where `state_dict` stood, beside model, optimizer and sampler of then.

        Raises:
            StateError: the state is no accumulator's, or of other parameters.
        """
        if not isinstance(state_dict, Mapping) or state_dict.get("version") != 1:
            raise StateError("expected what GradAccumulator.state_dict() gave")
        parameters, gradients = self._stepping.parameters(), state_dict["gradients"]
        shapes = [None if g is None else g.shape for g in gradients]
        fitting = zip(parameters, shapes, strict=False)
        if gradients and (
            len(gradients) != len(parameters) or any(s not in (None, p.shape) for p, s in fitting)
        ):
            raise StateError("the state's gradients are of other parameters")
        self._steps = state_dict["steps"]
        names = ("micro_batches", "samples", "weight", "loss")
        self._pending = Pending(**{name: state_dict[name] for name in names})
        for parameter, gradient in zip(
            parameters, gradients or [None] * len(parameters), strict=True
        ):
            parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
        self._watch.loaded(self._pending.micro_batches)

    def training_state(self) -> dict[str, Any]:
        """The states of this, of the optimizers, the schedulers and the scaler."""
        return {"accumulator": self.state_dict(), **self._stepping.state_dict()}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `training_state` gave."""
        self._stepping.load_state_dict(state)
        self.load_state_dict(state["accumulator"])


@dataclass(slots=True)
class _MicroBatch:
    """What came in the micro-batch that is open."""

    weight: float
    backwards: int = 0
    loss: Tensor | float = 0.0
