"""Misuse that makes the gradient differ from the large batch's: each kind is warned of once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbudget import errors
from torchbudget.train.optimizers import STEPS_IN_BACKWARD, Optimizers
from torchbudget.train.step import check_scalar
from torchbudget.warn import warn

# What the grad_fn of torch's losses has as its `_saved_reduction`.
_MEAN: Final = 1
_SUM: Final = 2
# The names of a grad_fn that gives the same numbers, in another dtype or shape.
_UNCHANGED: Final = ("ToCopyBackward", "SqueezeBackward", "ViewBackward", "CloneBackward")


class MisuseDetector:
    """Warns of misuse that shows in an accumulator's optimizers, modules and losses.

    Args:
        optimizers: that step.
        modules: that are trained.
        distributed: the modules whose forward must be inside `micro_batch`.

    Attributes:
        in_micro_batch: between `micro_batch_begins` and `micro_batch_left`.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        modules: Sequence[nn.Module],
        distributed: Sequence[nn.Module],
    ) -> None:
        self._batch_norms = [
            part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)
        ]
        self._each_parameter = optimizers.each_parameter
        self._parameters: list[int] | None = None  # ids of those of the latest step
        self._texts: set[str] = set()  # that were warned of
        self.in_micro_batch = False
        self._in_own_step = False
        self._is_muted = False
        # A parameter with its gradient and that one's version, as the accumulator left them.
        self._sentinel: tuple[Tensor, Tensor, int] | None = None
        # The finalizer reads this when the detector is gone. "lost" are the micro-batches that
        # would be lost then: a state that was saved in the middle of a step has them, too.
        self._pending = {"micro_batches": 0, "lost": 0}
        weakref.finalize(self, _warn_of_lost, self._pending)
        for optimizer in optimizers.optimizers:
            self._hook(optimizer.register_step_pre_hook, MisuseDetector._optimizer_steps)
        for module in distributed:
            self._hook(module.register_forward_pre_hook, MisuseDetector._module_runs)

    def _hook(
        self, register: Callable[[_Hook], Any], method: Callable[[MisuseDetector, Any], None]
    ) -> None:
        """Have a method called, as long as this detector is there."""
        handle = register(_Hook(weakref.ref(self), method))
        weakref.finalize(self, handle.remove)

    # ------------------------------------------------------------------ called by the accumulator

    def notice_others(self, modules: Iterable[nn.Module]) -> None:
        """Raise where one of these distributed modules runs in a micro-batch."""
        for module in modules:
            self._hook(module.register_forward_pre_hook, MisuseDetector._other_runs)

    def micro_batch_begins(self, *, restarted: bool) -> None:
        """A micro-batch begins.

        Args:
            restarted: the data began again, so that what is pending is of an earlier epoch.
        """
        if restarted and self._pending["micro_batches"]:
            self._warn(
                errors.ForgottenStepWarning,
                f"{self._pending['micro_batches']} micro-batches of an earlier epoch are still in "
                "the gradients, and now count for the next step; call accumulator.flush() at the "
                "end of an epoch",
            )
        self.in_micro_batch = True
        self._remember_gradients()

    def _remember_gradients(self) -> None:
        """From here on gradients must stay as they are. O(1) where the first one has one."""
        for parameter in self._each_parameter():
            if parameter.grad is not None:
                self._sentinel = parameter, parameter.grad, parameter.grad._version
                break

    def check_gradients(self, *, is_first: bool = False) -> None:
        """Warn where others have changed gradients; from here on they may change.

        Args:
            is_first: the first micro-batch of a step begins, before which there must be none.
        """
        if is_first and any(parameter.grad is not None for parameter in self._each_parameter()):
            self._warn(
                errors.ForeignStepWarning,
                "gradients were there before the step's first micro-batch, and count for it: call "
                "optimizer.zero_grad() before",
            )
        if self._sentinel is not None:
            parameter, gradient, version = self._sentinel
            if parameter.grad is not gradient or gradient._version != version:
                self._warn(
                    errors.ForeignStepWarning,
                    "gradients were changed within a step by others than accumulator.backward "
                    "(by zero_grad, a clipping, another backward?): the step is not the large "
                    "batch's",
                )
        self._sentinel = None

    def micro_batch_failed(self) -> None:
        """A micro-batch raised after its backward, and its step was abandoned."""
        self._warn(
            errors.ForeignStepWarning,
            "a micro-batch raised after its backward: the gradients of its step so far were "
            "cleared, on this rank, and do not count; run_or_split takes back that one alone",
        )

    def micro_batch_left(self) -> None:
        """A micro-batch is over, or it raised."""
        self.in_micro_batch = False
        self.check_gradients()

    def micro_batch_succeeded(self, micro_batches: int, *, ends: bool) -> None:
        """A micro-batch was accumulated.

        Args:
            micro_batches: of the step so far.
            ends: whether the step ends with it.
        """
        self._pending.update(micro_batches=micro_batches, lost=micro_batches)
        if ends:
            return
        self._remember_gradients()
        # Without running statistics, those of the batch are taken in evaluation mode, too.
        if any(norm.training or norm.running_mean is None for norm in self._batch_norms):
            self._warn(
                errors.BatchNormWarning,
                "batch normalisation takes its statistics from each micro-batch, so that the step "
                "is not the large batch's; use group or layer normalisation, or freeze it with "
                "eval(), where it has running statistics",
            )

    @contextmanager
    def backward_runs(self, *, is_first_step: bool) -> Iterator[None]:
        """A backward runs inside, which changes gradients, and must not change parameters.

        Args:
            is_first_step: in which parameters are checked.

        Raises:
            OptionError: it changed one.
        """
        self.check_gradients()
        parameters = list(self._each_parameter()) if is_first_step else []
        versions = [parameter._version for parameter in parameters]
        yield
        if versions != [parameter._version for parameter in parameters]:
            raise errors.OptionError(STEPS_IN_BACKWARD)
        self._remember_gradients()

    def check_loss(self, loss: Tensor, *, mean: bool, weight: float) -> None:
        """Warn where a loss is a mean but a sum is expected, or the reverse.

        Args:
            loss: a scalar with its graph, whose last operation says what it is.
            mean: whether a mean is expected.
            weight: of the micro-batch; the loss of a single sample is a mean and a sum.

        Raises:
            OptionError: the loss is not a scalar tensor.
        """
        check_scalar(loss)
        if weight == 1 or loss.grad_fn is None:
            return
        node = _reduction_of(loss.grad_fn)
        reduction = getattr(node, "_saved_reduction", None)  # torch's losses have it
        # Of several numbers. loss.sum() only of a vector, which may be one of losses; of a matrix
        # it may be that of weighted losses, which is a mean.
        sizes = getattr(node, "_saved_self_sym_sizes", ())
        is_mean = node.name().startswith("MeanBackward") and math.prod(sizes) > 1
        is_sum = node.name().startswith("SumBackward") and len(sizes) == 1
        if not mean and (reduction == _MEAN or is_mean):
            self._warn(
                errors.ReductionWarning,
                "the loss is a mean, but is taken for the sum over the micro-batch: pass "
                'reduction="sum", or GradAccumulator(…, mean=True)',
            )
        elif mean and (reduction == _SUM or is_sum):
            self._warn(
                errors.ReductionWarning,
                "the loss is a sum, but mean=True multiplies it by its weight: leave mean out",
            )

    def state_loaded(self, micro_batches: int) -> None:
        """A state was loaded that has so many micro-batches of a step."""
        self._pending["micro_batches"] = micro_batches
        self._sentinel = None

    def state_saved(self) -> None:
        """A state was saved: what is pending is in it, and not lost with this object."""
        self._pending["lost"] = 0

    def step_abandoned(self) -> None:
        """A step failed, and its gradients were cleared."""
        self._pending.update(micro_batches=0, lost=0)
        self._sentinel = None

    @contextmanager
    def own_step(self, parameters: Sequence[Tensor], *, has_weight: bool) -> Iterator[None]:
        """The accumulator steps its optimizers inside, on these parameters.

        Args:
            parameters: of all optimizers.
            has_weight: the weight of the step is not 0.
        """
        parameters_now = [id(parameter) for parameter in parameters]
        if self._parameters not in (None, parameters_now):
            self._warn(
                errors.ChangedParametersWarning,
                "the optimizer's parameters are others than at the step before; make a new "
                "GradAccumulator where model or optimizer are changed",
            )
        self._parameters = parameters_now
        if has_weight and all(parameter.grad is None for parameter in parameters):
            self._warn(
                errors.ChangedParametersWarning,
                "no parameter of the optimizer has a gradient, so that nothing is trained: it has "
                "those of another model, such as the one that was copied or replaced after it was "
                "made; make the optimizer of the model that is called",
            )
        self.step_abandoned()
        self._in_own_step = True
        try:
            yield
        finally:
            self._in_own_step = False

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Nothing inside is warned of or remembered."""
        before = vars(self).copy()
        self._pending, self._is_muted = {"micro_batches": 0, "lost": 0}, True
        try:
            yield
        finally:
            vars(self).update(before)
            self._sentinel = None  # the caller restores gradients, which would count as a change

    # ------------------------------------------------------------------ called by hooks

    def _optimizer_steps(self, _: Any) -> None:
        if not self._in_own_step and self._pending["micro_batches"]:
            self._warn(
                errors.ForeignStepWarning,
                "optimizer.step() was called in the middle of an accumulated step; the accumulator "
                "steps by itself, and accumulator.step() ends a step early",
            )

    def _module_runs(self, module: Any) -> None:
        # DDP reduces nothing in a micro-batch of another accumulator that has it, as of a GAN.
        reduces = getattr(module, "require_backward_grad_sync", True)
        if not self.in_micro_batch and reduces and torch.is_grad_enabled():
            self._warn(
                errors.UnsynchronizedWarning,
                "the forward of a distributed module is outside accumulator.micro_batch(…): it "
                "will reduce gradients by itself, and they are reduced again",
            )

    def _other_runs(self, _: Any) -> None:
        if self.in_micro_batch and torch.is_grad_enabled():
            raise errors.OptionError(
                "a DistributedDataParallel runs that GradAccumulator does not know, so it would "
                "reduce gradients by itself in every backward, and ranks with unequal numbers of "
                "micro-batches would wait for ever: pass the wrapped one, "
                "GradAccumulator(optimizer, module=ddp)"
            )

    def _warn(self, category: type[errors.TorchBudgetWarning], text: str) -> None:
        if text not in self._texts and not self._is_muted:
            self._texts.add(text)
            warn(text, category)


@dataclass(frozen=True)
class _Hook:
    """Calls a method of a detector without keeping it alive; a copy of the hook does nothing."""

    detector: Callable[[], MisuseDetector | None]
    method: Callable[[MisuseDetector, Any], None]

    def __call__(self, owner: Any, *_: Any) -> None:
        detector = self.detector()
        if detector is not None:
            self.method(detector, owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (NoneType, self.method)  # a call of NoneType returns None: no detector


def _reduction_of(node: Any) -> Any:
    """The operation whose number a loss is, before it was cast or viewed."""
    while node.name().startswith(_UNCHANGED) and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _warn_of_lost(pending: dict[str, int]) -> None:
    if pending["lost"]:
        warn(
            f"a GradAccumulator is gone with {pending['lost']} micro-batches that no step "
            "took; call accumulator.flush() after the loop",
            errors.ForgottenStepWarning,
        )
