"""A batch as a transaction: if memory runs out it is undone, and run again in halves."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchbudget.errors import OptionError, SampleTooLargeError, StepError, TorchBudgetError
from torchbudget.machine.out_of_memory import ran_out_of_memory
from torchbudget.random_state import RandomState
from torchbudget.train.batches import Replayed, halves


class Buffers:
    """A copy of all buffers of modules, such as the running statistics of batch normalisation.

    Args:
        modules: with all modules inside them.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        parts = dict.fromkeys(part for module in modules for part in module.modules())
        self._copies = [
            (part._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in parts
            for name, buffer in part._buffers.items()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore contents and tensor objects: a forward may have replaced them, or made them."""
        for owner, name, buffer, copy in self._copies:
            owner[name] = None if buffer is None or copy is None else buffer.copy_(copy)


class Attempt:
    """One run of a micro-batch, which can be undone.

    The gradients of earlier micro-batches are set aside, so that undoing it needs no copy of them:
    this one makes gradients of its own, which `merge` adds to the earlier ones. Buffers and the
    states of the random generators are copied.

    Args:
        parameters: that are trained.
        modules: whose buffers the forward may change.
    """

    def __init__(self, parameters: Sequence[Tensor], modules: Sequence[nn.Module]) -> None:
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        self._copies: list[Tensor | None] = [None] * len(parameters)
        self._buffers = Buffers(modules)
        self._random_state = RandomState.take()
        for parameter in parameters:
            parameter.grad = None

    def merge(self) -> None:
        """Add the gradients of this run to the earlier ones."""
        for parameter, earlier in self._gradients:
            if earlier is not None:
                if parameter.grad is not None:
                    earlier.add_(parameter.grad)
                parameter.grad = earlier

    def copy_gradients(self) -> None:
        """Copy the earlier gradients: `undo` works after other runs were merged into them, too."""
        self._copies = [
            None if gradient is None else gradient.detach().clone()
            for _, gradient in self._gradients
        ]

    @torch.no_grad()
    def undo(self) -> None:
        """Restore everything, and give freed memory back to the device."""
        for (parameter, gradient), copy in zip(self._gradients, self._copies, strict=True):
            parameter.grad = gradient
            if gradient is not None and copy is not None:
                gradient.copy_(copy)
        self._buffers.restore()
        self._random_state.restore()
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class SplitRun:
    """The runs of one batch: of the whole and, if memory runs out, of its parts.

    Args:
        batch: to be run.
        parameters: that are trained.
        modules: whose buffers the forward may change.

    Attributes:
        attempt: the run of a part that has not succeeded yet, and can be undone.
        whole: the first run, if it failed: then parts are run, and some may have succeeded.
        gave_up: the error for which this rank gave up; other ranks do not know it yet.
    """

    def __init__(
        self, batch: Any, parameters: Sequence[Tensor], modules: Sequence[nn.Module]
    ) -> None:
        self._parts = deque([batch])
        self._parameters = parameters
        self._modules = modules
        self._replayed = Replayed(batch)
        self.attempt: Attempt | None = None
        self.whole: Attempt | None = None
        self.gave_up: TorchBudgetError | None = None

    def give_up(self, reason: TorchBudgetError) -> NoReturn:
        """Raise an error that no other rank knows of."""
        self.gave_up = reason
        raise reason

    @property
    def parts_follow(self) -> bool:
        """Whether the part that is being run is not the last one."""
        return bool(self._parts)

    def succeed(self) -> None:
        """The micro-batch of the part that is being run has succeeded: its gradients count."""
        self._check_batch()
        if self.attempt is not None:
            self.attempt.merge()
            self.attempt = None

    def _check_batch(self) -> None:
        try:
            self._replayed.check()
        except OptionError as error:
            self.give_up(error)

    def failures(
        self, function: Callable[[Any], object], before_attempt: Callable[[], object]
    ) -> Iterator[Any]:
        """Run the batch; yield each part that ran out of memory, undone, before it is halved.

        Args:
            function: that runs a part; its micro-batch calls `succeed`.
            before_attempt: called before each run, before gradients are set aside.

        Raises:
            SampleTooLargeError: memory ran out after the micro-batch, in the optimizer's step.
            OptionError: the function changed a tensor of the batch in place.
            StepError: the function opened no micro-batch.
        """
        while self._parts:
            part = self._parts.popleft()
            before_attempt()
            self.attempt = attempt = Attempt(self._parameters, self._modules)
            self._replayed = Replayed(part)
            failed = ran_out_of_memory(function, self._replayed.fresh())
            succeeded = self.attempt is not attempt  # its micro-batch has called `succeed`
            if failed and succeeded:
                self.give_up(SampleTooLargeError("out of memory in the optimizer's step"))
            if not failed and not succeeded:
                raise StepError("run_or_split's function opened no micro_batch")
            if succeeded:
                continue
            self._check_batch()
            attempt.undo()
            if self.whole is None:
                attempt.copy_gradients()
                self.whole = attempt
            yield part
            self._parts.extendleft(reversed(halves(part)))

    def undo(self) -> None:
        """Undo the part that has not succeeded; of a batch that was split, all parts."""
        for attempt in (self.attempt, self.whole):
            if attempt is not None:
                attempt.undo()
