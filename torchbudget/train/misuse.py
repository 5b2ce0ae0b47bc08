"""Misuse that makes the gradient differ from the large batch's: each kind is warned of once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchbudget import errors
from torchbudget.distributed import local_part
from torchbudget.errors import warn
from torchbudget.train.optimizers import STEPS_IN_BACKWARD, Optimizers
from torchbudget.train.step import check_scalar

# The `_saved_reduction` in the grad_fn of torch's losses.
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
        in_micro_batch: a micro-batch is open.
    """

    def __init__(
        self,
        optimizers: Optimizers,
        modules: Sequence[nn.Module],
        distributed: Sequence[nn.Module],
    ) -> None:
        self._parts = dict.fromkeys(part for module in modules for part in module.modules())
        self._of_batches = [  # whose outputs or gradients depend on the batch as a whole
            part
            for part in self._parts
            if isinstance(part, _BatchNorm) or getattr(part, "scale_grad_by_freq", False)
        ]
        self._each_parameter = optimizers.each_parameter
        self._texts: set[str] = set()  # texts of warnings that were issued
        self.in_micro_batch = False
        self._is_muted = False
        self._looks_for_moving = True  # once, in the first step of several micro-batches
        # A parameter, its gradient, and the versions of both, as the accumulator left them.
        self._sentinel: tuple[Tensor, Tensor, tuple[int, int]] | None = None
        # Micro-batches of a step that was not taken; the finalizer reads it after the detector.
        self._pending = [0]
        weakref.finalize(self, _warn_of_lost, self._pending)
        for module in distributed:
            handle = module.register_forward_pre_hook(_Hook(weakref.ref(self)))
            weakref.finalize(self, handle.remove)

    @contextmanager
    def micro_batch(self, *, restarted: bool, is_later: bool) -> Iterator[None]:
        """A micro-batch is inside.

        Args:
            restarted: the data began again, so that what is pending is of an earlier epoch.
            is_later: its step has earlier micro-batches.
        """
        if restarted and self._pending[0]:
            self._warn(
                errors.ForgottenStepWarning,
                f"{self._pending[0]} micro-batches of an earlier epoch now count for the next "
                "step; call accumulator.flush() at the end of an epoch",
            )
        self.check_gradients()
        looks = is_later and self._looks_for_moving and not self._is_muted
        before = self._sums() if looks else {}
        self.in_micro_batch = True
        self._remember()
        try:
            yield
        finally:
            self.in_micro_batch = False
            self.check_gradients()
        if looks:
            self._looks_for_moving = False
            self._warn_of_moved(before)

    def _sums(self) -> dict[tuple[int, int], tuple[Tensor, str, str]]:
        """Sums of the buffers, and of the parameters that no optimizer has, with their names.

        By the tensor and its address: a tensor that is replaced or resized is another one.
        """
        trained = {id(parameter) for parameter in self._each_parameter()}
        found = {}
        for part in self._parts:
            own = () if isinstance(part, _BatchNorm) else (*part._buffers.items(),)
            for name, tensor in (*own, *part._parameters.items()):
                if tensor is None or id(tensor) in trained:
                    continue
                mine = local_part(tensor.detach())
                if mine.layout is torch.strided and not mine.is_quantized and not mine.is_meta:
                    name = f"{type(part).__name__}.{name}"
                    found[id(tensor), mine.data_ptr()] = tensor, name, _sums_of(mine)
        return found

    def _warn_of_moved(self, before: dict[tuple[int, int], tuple[Tensor, str, str]]) -> None:
        after = self._sums()
        pairs = [(one, after[place]) for place, one in before.items() if place in after]
        moved = [name for (_, name, sums), (*_, others) in pairs if sums != others]
        if moved:
            self._warn(
                errors.MovingStateWarning,
                f"the forward changes {', '.join(dict.fromkeys(moved))} in every micro-batch, not "
                "once a step like the large batch: update it when accumulator.stepped is true",
            )

    def _remember(self) -> None:
        """Remember parameters and gradients, to find changes. O(1) if the first has a gradient."""
        for parameter in self._each_parameter():
            if parameter.grad is not None:
                versions = parameter._version, parameter.grad._version
                self._sentinel = parameter, parameter.grad, versions
                break

    def check_gradients(self, *, is_first: bool = False) -> None:
        """Warn if other code changed parameters or gradients; from here on they may change.

        Args:
            is_first: the first backward of a step begins, before which there must be none.
        """
        if is_first and any(parameter.grad is not None for parameter in self._each_parameter()):
            self._warn(
                errors.ForeignStepWarning,
                "there were gradients before the step's first accumulator.backward, which add to "
                "the step: call optimizer.zero_grad() first, and no backward of your own",
            )
        if self._sentinel is not None:
            parameter, gradient, versions = self._sentinel
            now = parameter._version, gradient._version
            if parameter.grad is not gradient or now != versions:
                what = "parameters" if now[0] != versions[0] else "gradients"
                self._warn(
                    errors.ForeignStepWarning,
                    f"other code changed {what} in the middle of an accumulated step, such as "
                    "optimizer.step(), zero_grad(), clipping or another backward, so the step is "
                    "not that of the large batch. Remove that code: the accumulator steps by "
                    "itself, and accumulator.step() ends a step early",
                )
        self._sentinel = None

    def micro_batch_failed(self) -> None:
        """A micro-batch raised after its backward, and its step was cleared."""
        self._warn(
            errors.ForeignStepWarning,
            "a micro-batch raised after its backward, so this rank cleared the gradients of the "
            "whole step so far; run_or_split would discard that micro-batch alone",
        )

    def micro_batch_succeeded(self, micro_batches: int, *, ends: bool) -> None:
        """A micro-batch was accumulated.

        Args:
            micro_batches: of the step so far.
            ends: whether the step ends with it.
        """
        self._pending[0] = micro_batches
        if ends:
            return
        self._remember()
        # Without running statistics, those of the batch are taken in evaluation mode, too.
        if any(p.training or getattr(p, "running_mean", None) is None for p in self._of_batches):
            self._warn(
                errors.BatchNormWarning,
                "batch normalisation takes its statistics, and scale_grad_by_freq=True its counts, "
                "from each micro-batch, so the step is not that of the large batch; use group or "
                "layer normalisation, or call eval() on layers with running statistics",
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
        self._remember()

    def check_loss(self, loss: Tensor, *, mean: bool, weight: float) -> None:
        """Warn if a loss is a mean but a sum is expected, or the reverse.

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
        node: Any = loss.grad_fn  # the operation that computed the loss, before casts and views
        while node.name().startswith(_UNCHANGED) and node.next_functions[0][0] is not None:
            node = node.next_functions[0][0]
        reduction = getattr(node, "_saved_reduction", None)  # torch's losses have it
        is_mean = node.name().startswith("MeanBackward")
        is_mean &= math.prod(getattr(node, "_saved_self_sym_sizes", ())) > 1  # of several numbers
        if reduction == _SUM if mean else reduction == _MEAN or is_mean:
            expected, came = ("mean", "sum") if mean else ("sum", "mean")
            self._warn(
                errors.ReductionWarning,
                f"the loss is a {came}, but is taken for the {expected} over the micro-batch: pass "
                f'reduction="{expected}", or GradAccumulator(…, mean={not mean})',
            )

    def step_ended(self) -> None:
        """A step is taken, or its gradients were cleared: both may change from here on."""
        self._pending[0] = 0
        self._sentinel = None

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Nothing inside is warned of or remembered."""
        before = vars(self).copy()
        self._pending, self._is_muted = [0], True
        try:
            yield
        finally:
            vars(self).update(before)
            self._sentinel = None  # the caller restores gradients, which would count as a change

    def module_runs(self, module: Any) -> None:
        """A distributed module runs; called by its hook."""
        # DDP reduces nothing in a micro-batch of another accumulator of this module, as in a GAN.
        reduces = getattr(module, "require_backward_grad_sync", True)
        if not self.in_micro_batch and reduces and torch.is_grad_enabled():
            self._warn(
                errors.UnsynchronizedWarning,
                "the forward of a distributed module is outside accumulator.micro_batch(…), so "
                "gradients would be reduced twice: put forward and backward inside it",
            )

    def _warn(self, category: type[errors.TorchBudgetWarning], text: str) -> None:
        if text not in self._texts and not self._is_muted:
            self._texts.add(text)
            warn(text, category)


@dataclass(frozen=True)
class _Hook:
    """Tells a detector, without keeping it alive, that a module runs; a copy does nothing."""

    detector: Callable[[], MisuseDetector | None]

    def __call__(self, module: Any, *_: Any) -> None:
        detector = self.detector()
        if detector is not None:
            detector.module_runs(module)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (NoneType,)  # a call of NoneType returns None: no detector


def _sums_of(tensor: Tensor) -> str:
    """The sum and the norm, as text; `.data` writes show, and no tensor of its size is made."""
    sums = [tensor.sum(dtype=None if tensor.is_complex() else torch.float64).item()]
    if tensor.is_floating_point():
        sums.append(torch.linalg.vector_norm(tensor, dtype=torch.float64).item())
    return str(sums)


def _warn_of_lost(pending: list[int]) -> None:
    if pending[0]:
        warn(
            f"a GradAccumulator was deleted with {pending[0]} micro-batches that no step has "
            "applied; call accumulator.flush() after the loop",
            errors.ForgottenStepWarning,
        )
