"""`GradAccumulator`: micro-batches become exactly the step of the one large batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbudget.checks import positive_number, several
from torchbudget.cost.measured import MeasuredCost
from torchbudget.errors import OptionError, StepError
from torchbudget.protocols import SplittablePaddedBatch, StepSource
from torchbudget.restoring import AccumulatesGradients
from torchbudget.train.batches import check_splittable, num_samples
from torchbudget.train.half_precision import backward_times, check_carried
from torchbudget.train.misuse import MisuseDetector
from torchbudget.train.optimizers import Optimizers
from torchbudget.train.process_group import Ranks
from torchbudget.train.retry import SplitRun
from torchbudget.train.step import OpenMicroBatch, Pending, Step, in_float64, step_boundary_of
from torchbudget.train.taking import StepTaker
from torchbudget.train.wrappers import DistributedModules


class GradAccumulator(AccumulatesGradients):
    """Works beside the optimizer: micro-batches make the step of the one large batch.

    At each step the gradient is Σ loss / Σ weight over all its micro-batches and all ranks,
    whatever the cut: losses are summed, and divided once by the sum of their weights. Gradients are
    summed over ranks once a step, after the last backward; so ranks may have unequal numbers of
    micro-batches, or none.

    A step accumulates, sums over ranks, unscales, divides, clips, steps, updates the scale, sets
    gradients to `None`, and steps the schedulers unless the scaler skipped the step.

    Args:
        optimizer: one, or several that step together.
        module: what is trained, one or several; as it is called, so `DistributedDataParallel` or
            FSDP2's `fully_shard` included. Needed for those two, for `run_or_split`, and to notice
            batch normalisation.
        steps: when a step is complete: a `MemoryBudgetBatchSampler`, which plans the steps (or
            another `torchbudget.protocols.StepSource`), or the number of micro-batches on
            each rank.
        samples: or, at least this many samples, over all ranks.
        weight: or, at least this weight, over all ranks. With none of the three, `step` ends it.
        mean: losses are means, to be multiplied by their weights.
        max_norm: that the gradients of all parameters are clipped to; infinity only measures it.
        scaler: of gradients, for half precision.
        scheduler: of learning rates, one or several.
        divisor: a constant that losses are divided by before backward, and gradients multiplied by
            after; near the weight of a step it keeps half-precision sums from overflowing. A power
            of 2 changes no bit.
        group: of processes. Default: those that the modules are distributed over, else all, where
            `torch.distributed` is initialized. With tensor parallelism, those that have the same
            part of the parameters.

    Attributes:
        last: the latest `Step`, `None` before the first.
        stepped: whether the latest call took a step.
        optimizers: that step together.
        out_of_memory: how often memory ran out in `run_or_split`.
        needs_samples: whether each micro-batch must state its samples, since steps end by them.
        ranks: that share the steps.
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
        scheduler: Any = (),
        divisor: float = 1.0,
        group: Any = None,
    ) -> None:
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
        )
        self._parameters = self.optimizers.parameters
        self._distributed = DistributedModules(self.modules)
        self.sharded = self._distributed.sharded
        self.ranks = Ranks(self._distributed.group(group))
        self._distributed.check_meshes(self.optimizers.parameters(), self.ranks.group)
        self.optimizers.check_sparse(self.modules, len(self.ranks))
        if self.sharded and (samples or weight):
            raise OptionError(
                "with fully_shard every rank must know the step's last micro-batch in advance, and "
                "samples= and weight= end it when each rank has its share: let steps come from the "
                "sampler's plan, pass steps=, or say micro_batch(…, last=True)"
            )
        self._boundary = step_boundary_of(steps, samples, weight, len(self.ranks))
        self._reads_weights = mean or weight is not None
        self._pending = Pending()
        self._steps = 0
        self._is_first_step = True  # of this object, in whose micro-batches it is checked
        self._open: OpenMicroBatch | None = None
        self._run: SplitRun | None = None  # of `run_or_split`
        self._detector = MisuseDetector(self.optimizers, self.modules, self._distributed.modules)
        self._taker = StepTaker(
            ranks=self.ranks,
            distributed=self._distributed,
            optimizers=self.optimizers,
            detector=self._detector,
            divisor=self._divisor,
        )

    @contextmanager
    def single_steps(self) -> Iterator[None]:
        """Make each micro-batch inside a measured step of its own; all are forgotten at the end.

        Where steps have several, gradients stay allocated, as a later one of a step finds them.
        """
        before = vars(self).copy()
        self._taker = replace(self._taker, keeps_gradients=self._boundary.has_several())
        self._pending, self._boundary = Pending(), step_boundary_of(1, None, None, ranks=1)
        try:
            with self._detector.muted():
                yield
        finally:
            vars(self).update(before)

    # ------------------------------------------------------------------ micro-batches

    @contextmanager
    def micro_batch(
        self, weight: float | Tensor, *, samples: int | None = None, last: bool = False
    ) -> Iterator[None]:
        """Accumulate the forward and the backward inside; take the step where it is complete.

        If the code inside raises, the micro-batch does not count; after its backward, nor do those
        of the step before it, whose gradients cannot be told apart (`run_or_split` keeps them).

        Args:
            weight: what the loss would be divided by if this were the whole batch: the number of
                samples, or of tokens that have a label. A tensor on a device is read at the step;
                with `mean=True` or `weight=` at once, which waits for the device.
            samples: in it; needed where steps end by `samples`.
            last: end the step with it, whatever is planned.

        Raises:
            OptionError: the weight is not a number of at least 0; or micro-batches are nested.
            StepError: there was no `backward` inside.
        """
        if self._open is not None:
            raise OptionError("micro_batch must not be inside another one")
        opened = OpenMicroBatch.of(weight, read=self._reads_weights)
        if samples is None and self.needs_samples:
            raise OptionError("steps end by samples: say micro_batch(…, samples=…)")
        self.stepped = False
        before, run = self._pending, self._run
        # To the plan and to other ranks, the parts of a batch that was split are one micro-batch.
        parts_follow = run is not None and run.parts_follow
        if run is not None and run.attempt is None:
            raise StepError("run_or_split's function opened a second micro_batch: it must open one")
        if self._is_first_step:
            self._distributed.check_options()  # a hook may have been registered since
            self._detector.notice_others(self._distributed.others_with(self._parameters()))
        self._check_gradients()
        self._detector.micro_batch_begins(restarted=self._boundary.restarted())
        pending = before.with_next(opened, samples or 0, counts=not parts_follow)
        ends = not parts_follow and (self._boundary.ends(pending) or last)
        self._open = opened
        try:
            with self._distributed.accumulating(last=ends):
                yield
        except BaseException:
            if opened.backwards and run is None:  # run_or_split takes its own gradients back
                self._pending = Pending()
                self._boundary.taken(before.micro_batches)
                self._taker.abandon()
                self._detector.micro_batch_failed()
            raise
        finally:
            self._open = None
            self._detector.micro_batch_left()
        if not opened.backwards:
            raise StepError(
                "there was no accumulator.backward(loss) inside micro_batch: its gradients would "
                "be of another scale than the rest"
            )
        self._pending = replace(pending, loss=pending.loss + opened.loss)
        if run is not None:
            run.succeed()
        self._detector.micro_batch_succeeded(pending.micro_batches, ends=ends)
        if ends:
            self._take_step()

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backward of a micro-batch's loss; several times where it has several losses.

        Args:
            loss: a scalar: the sum over the micro-batch, or its mean with `mean=True`.
            options: `retain_graph`, `create_graph` and `inputs` of `torch.Tensor.backward`.

        Raises:
            OptionError: it is called outside of `micro_batch`, or the loss is not a scalar
                tensor.
        """
        opened = self._open
        if opened is None:
            raise OptionError("backward must be inside accumulator.micro_batch(weight=…)")
        self._detector.check_loss(loss, mean=self.mean, weight=opened.weight)
        factor = (opened.weight if self.mean else 1.0) / self._divisor
        if self.sharded:
            if not factor:
                raise OptionError("a mean loss of weight 0 has no backward, which FSDP needs")
            check_carried(loss, factor)
        opened.backwards += 1
        if not factor:  # the mean of nothing is NaN, and so are its gradients
            return
        opened.loss = opened.loss + in_float64(loss) * (factor * self._divisor)
        with self.backward_runs():
            backward_times(loss, factor, self._parameters, self.optimizers.scaler, **options)

    def backward_runs(self) -> AbstractContextManager[None]:
        """The context of a backward by other means, whose gradients are of the right scale."""
        return self._detector.backward_runs(is_first_step=self._is_first_step)

    def run_or_split(
        self, function: Callable[[Any], object], batch: Any, *, cost: MeasuredCost | None = None
    ) -> None:
        """Run a micro-batch; if memory runs out, undo it and run its halves instead.

        Gradients, the modules' buffers, the global random generators (of `random`, NumPy, and torch
        on every device; no `Generator` objects of your own) and what was counted are restored
        before the halves are run, each in a `micro_batch` of its own; to the plan, and to other
        ranks, they are one. If memory suffices, the arithmetic is that of a plain call, bit for
        bit, where a micro-batch has one backward. While it runs, a second set of gradients is
        allocated, and a third while parts are run; if a part fails for good, the whole batch is
        undone.

        Args:
            function: runs `micro_batch` and `backward` on a batch.
            batch: of a torchbudget collate, or tensors (nested too) whose first axis is the sample.
            cost: learns what did not fit, for `MemoryBudgetBatchSampler.replan`.

        Raises:
            SampleTooLargeError: one sample does not fit; on every rank, at this step.
            StepError: the function opens no micro-batch, or two; or memory ran out after a
                collective of its own, which one rank cannot repeat.
            OptionError: there are no modules whose buffers could be restored, or the ranks meet in
                their forward or backward, which cannot be repeated on one rank.
        """
        if not self.modules or self._distributed.communicates:
            raise OptionError(
                "run_or_split needs GradAccumulator(…, module=…), without fully_shard, tensor "
                "parallelism and SyncBatchNorm: ranks meet in their forward and backward, which "
                "one rank whose memory has run out cannot repeat"
            )
        if cost is not None and not isinstance(batch, SplittablePaddedBatch):
            raise OptionError("cost=… needs a batch that knows its padded_size: a PaddedBatch")
        check_splittable(batch)  # now, rather than when memory has run out
        before, self.stepped = self._pending, False
        self._run = run = SplitRun(batch, self._parameters(), self.modules, self.ranks)
        try:
            for part in run.failures(function, self._check_gradients):
                self.out_of_memory += 1
                n = num_samples(part)
                if cost is not None:
                    cost.observe(n, part.padded_size, None)
                if n == 1:
                    run.give_up("out of memory with one sample; shorten it, or give it more memory")
        except BaseException:
            self._detector.check_gradients()
            if not self.stepped:  # or else the batch is in the step, and the function failed after
                run.undo()
                if run.whole is not None:  # parts that succeeded are undone, too
                    self._pending = before
            if run.gave_up is not None and len(self.ranks) > 1:
                # The others learn of it in their next collective, and abandon their step, as this.
                self._take_step(failure=run.gave_up)
            raise
        finally:
            self._run = None

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """Take the step now, with what is pending on this rank, which may be nothing.

        With several ranks it is a collective, and each of them must take it.
        """
        self._check_synchronized()
        self.stepped = False
        self._take_step()

    def flush(self, when_stepped: Callable[[Step], object] | None = None) -> None:
        """Take what is left of an incomplete step; at the end of the data, on every rank.

        With several ranks, those that are at their end join the steps of the others, without data,
        until all are.

        Args:
            when_stepped: called with each step that is taken here; if what it returns is true, no
                further one is joined.
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
                "FSDP reduces gradients in the backward, and no backward of this step did: let "
                "steps come from the sampler's plan, or say micro_batch(…, last=True)"
            )

    def _take_step(self, *, done: bool = False, failure: str | None = None) -> bool:
        """Take the step, or give it up on every rank; whether all are at the end of their data."""
        pending, self._pending = self._pending, Pending()
        self._boundary.taken(pending.micro_batches)
        step, is_over = self._taker.take(pending, self._steps + 1, done=done, failure=failure)
        if step is not None:
            self._steps, self.last, self.stepped = step.number, step, True
            self._is_first_step = False
        return is_over

    def _check_gradients(self) -> None:
        self._detector.check_gradients(is_first=self._pending.is_empty)

    # ------------------------------------------------------------------ the state

    def state_dict(self) -> dict[str, Any]:
        """Where the accumulation stands; in the middle of a step with its gradients, copied.

        Raises:
            StepError: in the middle of a step whose gradients FSDP has, which does not return them.
        """
        if self.sharded and not self._pending.is_empty:
            raise StepError(
                "in the middle of a step FSDP keeps gradients where they cannot be saved: save "
                "between steps, where accumulator.stepped is true"
            )
        self._detector.state_saved()
        scale = self.optimizers.scale(self._divisor)
        return self._pending.encode(self._steps, self._parameters(), scale, self.ranks)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state; model, optimizer and sampler must be loaded with it.

        Raises:
            StateError: it is not the state of an accumulator, or of other parameters, or of the
                middle of a step whose gradients have another scale.
        """
        scale = self.optimizers.scale(self._divisor)
        self._pending = Pending.load(state_dict, self._parameters(), scale, self.ranks)
        self._steps = state_dict["steps"]
        self._detector.state_loaded(self._pending.micro_batches)

    def training_state(self) -> dict[str, Any]:
        """The states of this, of the optimizers, the schedulers and the scaler."""
        return {"accumulator": self.state_dict(), **self.optimizers.state_dict()}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Load what `training_state` returned."""
        self.optimizers.load_state_dict(state)
        self.load_state_dict(state["accumulator"])
