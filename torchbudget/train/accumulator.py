"""`GradAccumulator`: micro-batches become exactly the step of the one large batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbudget.checks import check_flags, positive_number, several
from torchbudget.cost.measured import MeasuredCost
from torchbudget.distributed import Ranks
from torchbudget.errors import (
    OptionError,
    SampleTooLargeError,
    StateError,
    StepError,
    TorchBudgetError,
)
from torchbudget.machine.out_of_memory import ran_out_of_memory
from torchbudget.protocols import SplittablePaddedBatch, StepSource
from torchbudget.restoring import AccumulatesGradients
from torchbudget.train.batches import check_splittable, cuts_units, num_samples
from torchbudget.train.gradients import GradientSums
from torchbudget.train.misuse import MisuseDetector
from torchbudget.train.optimizers import SPARSE, Optimizers
from torchbudget.train.retry import SplitRun
from torchbudget.train.step import (
    Pending,
    Step,
    checked_weight,
    in_float64,
    read_at_once,
    step_boundary_of,
)
from torchbudget.train.wrappers import DistributedModules

_VERSION: Final = 4  # of the state
_HALF: Final = (torch.float16, torch.bfloat16)

_ONE_SAMPLE: Final = "out of memory with one sample; shorten it, or give it more memory"


class GradAccumulator(AccumulatesGradients):
    """Accumulates micro-batches into optimizer steps that equal those of one large batch.

    The gradient of a step is that of Σ loss / Σ weight over its micro-batches and all ranks,
    however the batch is cut: losses are summed, and divided once by the sum of their weights.
    Gradients are summed over ranks once for each step, after the last backward, so ranks may have
    unequal numbers of micro-batches, or none.

    At the end of a step it sums gradients over ranks, unscales them, divides, clips, steps the
    optimizers, updates the scale, sets gradients to `None`, and steps the schedulers unless the
    step was skipped.

    Args:
        optimizer: one optimizer, or several that step together.
        module: the module that is trained, or several, as you call them: under
            `DistributedDataParallel` or `fully_shard`, if you use these. Needed for these two, for
            `run_or_split`, and for warnings of batch normalisation.
        steps: a `MemoryBudgetBatchSampler` (or another `torchbudget.protocols.StepSource`), which
            plans the ends of steps; or the number of micro-batches in a step on each rank.
        samples: end a step after at least this many samples, over all ranks.
        weight: end a step after at least this weight, over all ranks. Without `steps`, `samples`
            and `weight`, call `step` yourself.
        mean: losses are means; the accumulator multiplies them by their weights.
        max_norm: norm to which the gradients of all parameters together are clipped; infinity only
            measures their norm.
        scaler: a `torch.amp.GradScaler`, for half precision.
        skip_nonfinite: skip a step whose gradient is not finite, on all ranks. This reads one
            number from the device at each step.
        scheduler: learning rate scheduler, or several.
        divisor: a constant by which losses are divided before the backward, and gradients
            multiplied after it. Near the weight of a step it keeps half-precision sums from
            overflowing. A power of 2 changes no bit; a loss in half precision needs one.
        group: the process group of the ranks that share steps, the modules' own. Default: all
            ranks, if `torch.distributed` is initialized. With tensor parallelism, the ranks that
            have the same part of the parameters.

    Attributes:
        last: the latest `Step`, `None` before the first.
        stepped: whether the latest call took a step.
        optimizers: the optimizers that step together.
        out_of_memory: number of times that memory ran out in `run_or_split`.
        needs_samples: whether each micro-batch must state its samples, since steps end by them.
        ranks: the ranks that share the steps.
        sharded: whether FSDP shards a module.

    Raises:
        OptionError: an argument of a wrong type or value, or a module or an optimizer that reduces
            gradients or steps in a way that cannot be exact.

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

    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        module: nn.Module | Sequence[nn.Module] = (),
        *,
        steps: StepSource | int | None = None,
        samples: int | None = None,
        weight: float | None = None,
        mean: bool = False,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        skip_nonfinite: bool = False,
        scheduler: Any = (),
        divisor: float = 1.0,
        group: Any = None,
    ) -> None:
        check_flags(mean=mean, skip_nonfinite=skip_nonfinite)
        self.modules = several("module", module, nn.Module)
        self.mean = mean
        self.last: Step | None = None
        self.stepped = False
        self.out_of_memory = 0
        self.needs_samples = samples is not None
        self._divisor = positive_number("divisor", divisor)
        self.optimizers = Optimizers(
            optimizers=several("optimizer", optimizer, Optimizer),
            schedulers=several("scheduler", scheduler, object),
            scaler=scaler,
            max_norm=max_norm,
            skip_nonfinite=skip_nonfinite,
        )
        self._distributed = DistributedModules(self.modules)
        self.sharded = self._distributed.sharded
        self.ranks = Ranks(group)
        self._distributed.check_group(group)
        self._distributed.check_meshes(self.optimizers.parameters(), group)
        if self.sharded and (samples or weight):
            raise OptionError(
                "with fully_shard every rank must know the step's last micro-batch in advance: "
                "instead of samples= or weight=, pass steps=, or say micro_batch(…, last=True)"
            )
        self._boundary = step_boundary_of(steps, samples, weight, len(self.ranks))
        self._source = steps  # of batches, if it is no number
        self._reads_weights = mean or weight is not None
        self._pending = Pending()
        self._steps = 0
        self._is_first_step = True  # micro-batches are checked in this object's first step only
        self._open: Pending | None = None  # the micro-batch
        self._run: SplitRun | None = None  # of `run_or_split`
        self._detector = MisuseDetector(self.optimizers, self.modules, self._distributed.modules)

    @property
    def pending(self) -> int:
        """Number of micro-batches on this rank that no step has taken."""
        return self._pending.micro_batches

    @contextmanager
    def measured(self, *, steps: bool) -> Iterator[None]:
        """Make each micro-batch inside a step of its own, or let none end a step; forget all."""
        before = vars(self).copy()
        self._pending = Pending()
        self._boundary = step_boundary_of(1 if steps else None, None, None, ranks=1)
        try:
            with self._detector.muted():
                yield
        finally:
            vars(self).update(before)

    def has_several(self) -> bool:
        """Return whether steps have several micro-batches."""
        return self._boundary.has_several()

    # ------------------------------------------------------------------ micro-batches

    @contextmanager
    def micro_batch(
        self, weight: float | Tensor, *, samples: int | None = None, last: bool = False
    ) -> Iterator[None]:
        """Accumulate the forward and the backward inside; take the step if it is complete.

        If the code inside raises an error, the micro-batch does not count. If that happens after
        its backward, the earlier micro-batches of the step do not count either, since their
        gradients are mixed with its own (`run_or_split` keeps them).

        Args:
            weight: the number by which you would divide the loss if this were the whole batch: the
                number of samples, or of tokens with a label. A tensor on a device is read at the
                step, or at once with `mean=True` or `weight=`, which waits for the device.
            samples: number of samples; needed if steps end by `samples`.
            last: end the step with this micro-batch.

        Raises:
            OptionError: the weight is no number of at least 0, or `samples` no int of at least 0;
                or micro-batches are nested.
            StepError: there was no `backward` inside.
        """
        if self._open is not None:
            raise OptionError("micro_batch must not be inside another one")
        if samples is None and self.needs_samples:
            raise OptionError("samples= ends steps: say micro_batch(…, samples=…)")
        opened = Pending.of(weight, 0 if samples is None else samples, read=self._reads_weights)
        self.stepped = False
        before, run = self._pending, self._run
        # For the plan and for other ranks, the parts of a split batch are one micro-batch.
        parts_follow = run is not None and run.parts_follow
        if run is not None and run.attempt is None:
            raise StepError("run_or_split's function opened a second micro_batch: it must open one")
        opened.micro_batches = int(not parts_follow)
        restarted = self._boundary.restarted()
        ends = not parts_follow and (self._boundary.ends(before + opened) or last)
        self._open = opened
        try:
            with ExitStack() as stack:
                if self._is_first_step:
                    self._distributed.check_options()  # a hook may have been registered since
                    stack.enter_context(
                        self._distributed.others_refused(self.optimizers.parameters())
                    )
                is_later = before.backwards > 0
                stack.enter_context(
                    self._detector.micro_batch(restarted=restarted, is_later=is_later)
                )
                stack.enter_context(self._distributed.accumulating(last=ends))
                yield
        except BaseException:
            if opened.backwards and run is None:  # run_or_split undoes its own gradients
                self._pending = Pending()
                self._boundary.taken(before.micro_batches)
                self._abandon()
                self._detector.micro_batch_failed()
            raise
        finally:
            self._open = None
        if not opened.backwards:
            raise StepError(
                "there was no accumulator.backward(loss) inside micro_batch: call it instead of "
                "loss.backward(), whose gradients have another scale"
            )
        if run is not None:
            run.succeed()
        self._pending = before + opened
        self._detector.micro_batch_succeeded(self._pending.micro_batches, ends=ends)
        if ends:
            self._take_step()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Run the backward of a micro-batch's loss; call it for each loss if there are several.

        Args:
            loss: a scalar: the sum over the micro-batch, or its mean with `mean=True`.
            options: `retain_graph`, `create_graph` and `inputs` of `torch.Tensor.backward`.

        Raises:
            OptionError: it is called outside of `micro_batch`, the loss is not a scalar tensor, or
                it is in half precision and its factor is not a power of 2.
        """
        opened = self._open
        if opened is None:
            raise OptionError("backward must be inside accumulator.micro_batch(weight=…)")
        self._detector.check_loss(loss, mean=self.mean, weight=opened.weight)
        factor = (opened.weight if self.mean else 1.0) / self._divisor
        if loss.dtype in _HALF and (self.mean or math.frexp(factor)[0] != 0.5):
            raise OptionError(
                f"a loss of {loss.dtype} cannot be multiplied exactly by its weight (mean=True), "
                "or divided by a divisor that is no power of 2: compute it in float32, as in "
                "F.cross_entropy(logits.float(), labels)"
            )
        if self.sharded and not factor:
            raise OptionError("a mean loss of weight 0 has no backward, which FSDP needs")
        if not opened.backwards:
            self._check_gradients()
        opened.backwards += 1
        if not factor:  # the mean of nothing is NaN, and so are its gradients
            return
        opened.loss = opened.loss + in_float64(loss) * (factor * self._divisor)
        # Whatever the weight is, a mean is multiplied: a trace does not know the weight.
        scaled = loss * factor if self.mean or self._divisor != 1 else loss
        if self.optimizers.scaler is not None:
            scaled = self.optimizers.scaler.scale(scaled)
        with self.backward_runs():
            torch.autograd.backward(scaled, **options)

    def backward_runs(self) -> AbstractContextManager[None]:
        """The context of a backward by other means, whose gradients are of the right scale."""
        return self._detector.backward_runs(is_first_step=self._is_first_step)

    def run_or_split(
        self, function: Callable[[Any], object], batch: Any, *, cost: MeasuredCost | None = None
    ) -> None:
        """Run a micro-batch; if memory runs out, undo it and run its halves instead.

        Before the halves run, it restores gradients, buffers, counts and the global random
        generators (of `random`, NumPy, and torch on every device; not your own `Generator`
        objects). Each half runs in a `micro_batch` of its own; for the plan, and for other ranks,
        they count as one. If memory suffices and the micro-batch has one backward, the result is
        that of a plain call, bit for bit. A second set of gradients is allocated while the
        micro-batch runs, and a third while halves run. If a single sample does not fit, the whole
        batch is undone.

        Args:
            function: runs `micro_batch` and `backward` on a batch. It must not change tensors of
                the batch in place.
            batch: a batch of a torchbudget collate, or tensors (nested too) whose first axis is the
                sample.
            cost: a measured cost, which learns the shape that did not fit, for
                `MemoryBudgetBatchSampler.replan`.

        Raises:
            SampleTooLargeError: one sample does not fit; on every rank, at this step.
            StepError: the function opens no micro-batch, or two.
            OptionError: the accumulator has no modules, so their buffers could not be restored; the
                modules run collectives in their forward or backward, which one rank cannot repeat;
                the sampler keeps units in one micro-batch, and the batch has no `split` of its own,
                which knows the units; or the function changes a tensor of its batch.
        """
        if not self.modules or self._distributed.communicates:
            raise OptionError(
                "run_or_split needs GradAccumulator(…, module=…), and no fully_shard, tensor "
                "parallelism or SyncBatchNorm, whose collectives one rank alone cannot repeat"
            )
        if cost is not None and not isinstance(batch, SplittablePaddedBatch):
            raise OptionError("cost=… needs a batch that knows its padded_size: a PaddedBatch")
        if cuts_units(batch, self._source):
            raise OptionError(
                "the sampler keeps each unit in one micro-batch, and run_or_split would cut units "
                "in two where memory runs out: call the function itself, under a lower budget, or "
                "give the batch a class with num_samples and a split(n) that keeps units together"
            )
        check_splittable(batch)  # now, rather than when memory has run out
        before, self.stepped = self._pending, False
        self._run = run = SplitRun(batch, self.optimizers.parameters(), self.modules)
        try:
            for part in run.failures(function, self._check_gradients):
                self.out_of_memory += 1
                n = num_samples(part)
                if cost is not None:
                    cost.observe(n, part.padded_size, None)
                if n == 1:
                    run.give_up(SampleTooLargeError(_ONE_SAMPLE))
        except BaseException:
            self._detector.check_gradients()
            if not self.stepped:  # otherwise the step has the batch, and the function failed later
                run.undo()
                if run.whole is not None:  # parts that succeeded are undone, too
                    self._pending = before
            if run.gave_up is not None and len(self.ranks) > 1:
                # Other ranks learn of it in their next collective, and abandon their step, too.
                self._take_step(failure=run.gave_up)
            raise
        finally:
            self._run = None

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """Take the step now, with the pending micro-batches of this rank; there may be none.

        On several ranks it is a collective: all ranks must call it.
        """
        self._check_synchronized()
        self.stepped = False
        self._take_step()

    def flush(self, when_stepped: Callable[[Step], object] | None = None) -> None:
        """Take the incomplete step; call it at the end of the data, on every rank.

        On several ranks, a rank at the end of its data joins the steps of the other ranks, without
        data, until all are at their end.

        Args:
            when_stepped: called with each step that is taken here. If it returns true, the rank
                joins no further step.
        """
        self._check_synchronized()
        stepped, over = False, False
        while not over:
            self.stepped = False
            over = self._take_step(done=True)
            stepped |= self.stepped
            if self.stepped and when_stepped is not None and self.last is not None:
                over |= bool(when_stepped(self.last))
        self.stepped = stepped

    def _check_synchronized(self) -> None:
        if self._pending.micro_batches and self.sharded:
            raise StepError(
                "FSDP reduces gradients in a backward that is marked as the step's last, and this "
                "step had none: pass steps=sampler, or say micro_batch(…, last=True)"
            )

    def _take_step(self, *, done: bool = False, failure: TorchBudgetError | None = None) -> bool:
        """Take the step, or give it up on every rank; if it fails, its gradients are cleared.

        Numbers that decide on the step are summed on the host. Only weights on a device, and what a
        scaler or `skip_nonfinite` asks for, are read from one, in one read before the optimizers
        are enqueued.

        Args:
            done: this rank is at the end of its data.
            failure: why this rank gives up.

        Returns:
            Whether every rank is at the end of its data.

        Raises:
            OptionError: a gradient is sparse, or a weight is no number of at least 0.
            SampleTooLargeError: this rank gives up, or another one.
        """
        self._detector.check_gradients()
        pending, self._pending = self._pending, Pending()
        self._boundary.taken(pending.micro_batches)
        try:
            return self._taken(pending, done=done, failure=failure)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Clear the gradients of a step that is not taken."""
        self.optimizers.abandon()
        self._distributed.clear()
        self._detector.step_ended()

    def _taken(self, pending: Pending, *, done: bool, failure: TorchBudgetError | None) -> bool:
        parameters = self.optimizers.parameters()
        device = parameters[0].device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        unread = 0.0 if pending.unread is None else pending.unread
        numbers = [
            # A loss or a weight may be on another device than the first parameter.
            (zero + (one.to(device) if isinstance(one, Tensor) else one)).reshape(())
            for one in (pending.loss, unread)
        ]
        sums = GradientSums(self.ranks, self._distributed.summed(parameters), torch.stack(numbers))
        if failure is None and ran_out_of_memory(sums.allocate):
            failure = SampleTooLargeError("out of memory while gradients were summed over ranks")
        mine = [pending.weight, pending.unread is not None, pending.micro_batches, done]
        mine += [isinstance(failure, SampleTooLargeError), failure is not None, sums.sparse]
        weight, is_unread, micro_batches, at_end, too_large, failures, sparse, *present = (
            self.ranks.sum_on_host([*mine, *sums.present])
        )
        # Every rank raises, since every rank has the sum: none is left waiting in a collective.
        if failure is not None:
            raise failure
        if failures:
            kind = SampleTooLargeError if too_large else StepError
            raise kind(
                f"{'out of memory' if too_large else 'a batch was refused'} on another rank, see "
                "its error; the step is abandoned on every rank"
            )
        if sparse:
            raise OptionError(SPARSE)
        is_over = at_end == len(self.ranks)
        if not micro_batches:  # in `flush`, ranks at their end meet here once more
            sums.drop(present)
            return is_over
        self._distributed.broadcast_buffers()
        loss, late = sums.sum(present).unbind()
        largest = self.optimizers.unscale()
        if largest is not None:
            largest = self.ranks.max(largest.to(parameters[0].device))
        late_weight, largest_gradient = read_at_once([late if is_unread else None, largest])
        weight += checked_weight(late_weight or 0.0)
        self._detector.step_ended()  # from here on gradients and parameters may change
        factor = self._divisor / weight if weight else 0.0
        norm, skipped = self.optimizers.step(factor, self._distributed.divisors(), largest_gradient)
        # An autocast that is open around steps still has casts of the weights before this step.
        torch.clear_autocast_cache()
        self.optimizers.clear()
        for scheduler in () if skipped else self.optimizers.schedulers:
            scheduler.step()
        self._steps += 1
        self._is_first_step = False
        self.stepped = True
        self.last = Step(
            number=self._steps,
            loss=loss / weight if weight else math.nan,
            weight=weight,
            gradient_norm=norm,
            micro_batches=int(micro_batches),
            skipped=skipped,
        )
        return is_over

    def _check_gradients(self) -> None:
        self._detector.check_gradients(is_first=not self._pending.backwards)

    # ------------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, as plain types.

        Raises:
            StepError: in the middle of a step, whose gradients are not saved.
        """
        if self._pending.backwards:
            raise StepError(
                f"in the middle of a step, after {self.pending} of its micro-batches on this rank, "
                "gradients cannot be saved: save when accumulator.stepped is true"
            )
        return {"version": _VERSION, "steps": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state; load model, optimizer and sampler with it.

        Raises:
            StateError: `state_dict` is not the state of an accumulator.
        """
        if not isinstance(state_dict, Mapping) or state_dict.get("version") != _VERSION:
            raise StateError("expected the result of GradAccumulator.state_dict()")
        self._pending = Pending()
        self._abandon()
        self._steps = state_dict["steps"]

    def training_state(self) -> dict[str, Any]:
        """Return the states of the accumulator, the optimizers, the schedulers and the scaler."""
        return {"accumulator": self.state_dict(), **self.optimizers.state_dict()}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Load a state that `training_state` returned."""
        self.load_state_dict(state.get("accumulator", {}))
        self.optimizers.load_state_dict(state)
