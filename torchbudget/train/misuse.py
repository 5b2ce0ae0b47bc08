"""Misuse that would give another gradient than the large batch's is noticed, and said once."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from torchbudget.errors import (
    BatchNormWarning,
    ChangedParametersWarning,
    ForeignStepWarning,
    ForgottenStepWarning,
    ReductionWarning,
    TorchBudgetWarning,
    UnsynchronizedWarning,
)

# What torch's losses save of their argument `reduction`.
_MEAN, _SUM = 1, 2


class MisuseDetector:
    """What an accumulator's optimizers, modules and losses tell of their use.

    Args:
        optimizers: that step.
        modules: that are trained.
        distributed: those of them, or inside them, whose forward must stand in `micro_batch`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        modules: Sequence[nn.Module],
        distributed: Sequence[nn.Module],
    ) -> None:
        self._norms = [
            part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)
        ]
        self._optimizers = list(optimizers)
        self._parameters: list[int] | None = None
        self._told: set[Any] = set()
        self._inside = False
        self._ours = False
        self._quiet = False
        self._sentinel: tuple[Tensor, Tensor, int] | None = None
        # Outlives this object, to be looked at when it is gone; nothing that a state holds is lost.
        self._pending = {"micro_batches": 0, "lost": 0}
        weakref.finalize(self, _forgotten, self._pending)
        me = weakref.ref(self)
        for optimizer in optimizers:
            handle = optimizer.register_step_pre_hook(_Hook(me, MisuseDetector._stepped))
            weakref.finalize(self, handle.remove)
        for module in distributed:
            handle = module.register_forward_pre_hook(_Hook(me, MisuseDetector._forwarded))
            weakref.finalize(self, handle.remove)

    # ------------------------------------------------------------------ told by the accumulator

    def entering(self, restarted: bool, untouched: Iterable[Tensor]) -> None:
        """A micro-batch begins; these parameters are to have no gradients yet."""
        if any(parameter.grad is not None for parameter in untouched):
            self._warn(
                ForeignStepWarning,
                "gradients were there before the step's first micro-batch, and count for it: call "
                "optimizer.zero_grad() before",
            )
        if restarted and self._pending["micro_batches"]:
            self._warn(
                ForgottenStepWarning,
                f"{self._pending['micro_batches']} micro-batches of an epoch gone by are in the "
                "gradients still, and now count for the next step; call accumulator.flush() at the "
                "end of an epoch",
            )
        self.check()
        self._inside = True

    def check(self) -> None:
        """Gradients must be as the last micro-batch left them; from here on they may change."""
        if self._sentinel is not None:
            parameter, gradient, version = self._sentinel
            if parameter.grad is not gradient or gradient._version != version:
                self._warn(
                    ForeignStepWarning,
                    "gradients were changed between two micro-batches of a step (by zero_grad, a "
                    "clipping, a backward outside of micro_batch?): the step is not the large "
                    "batch's",
                )
        self._sentinel = None

    def left(self, micro_batches: int, parameters: Iterable[Tensor], *, ends: bool) -> None:
        """A micro-batch ended well, which makes that many of the step."""
        self._pending.update(micro_batches=micro_batches, lost=micro_batches)
        self._sentinel = None
        if ends:
            return
        held = next((p for p in parameters if p.grad is not None), None)
        if held is not None and held.grad is not None:
            self._sentinel = held, held.grad, held.grad._version
        if any(norm.training for norm in self._norms):
            self._warn(
                BatchNormWarning,
                "batch normalisation takes its statistics from each micro-batch, so that the step "
                "is not the large batch's; use group or layer normalisation, or freeze it with "
                "eval()",
            )

    def left_behind(self) -> None:
        """A micro-batch raised behind its backward."""
        self._warn(
            ForeignStepWarning,
            "a micro-batch raised behind its backward: its gradients are there, its weight does "
            "not count; call optimizer.zero_grad(), or use run_or_split, which takes them back",
        )
        self._sentinel = None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing inside is said or remembered."""
        before = dict(self._pending), self._parameters, self._quiet
        self._pending.update(micro_batches=0, lost=0)
        self._quiet = True
        try:
            yield
        finally:
            pending, self._parameters, self._quiet = before
            self._pending.update(pending)
            self._sentinel = None  # gradients are put back, which counts as a change

    def outside(self) -> None:
        """A micro-batch is left, however."""
        self._inside = False

    def loss(self, loss: Tensor, mean: bool, weight: float) -> None:
        """A loss comes, said to be a mean or a sum; of one sample it is both."""
        if weight == 1 or loss.grad_fn is None:
            return
        kind = getattr(loss.grad_fn, "_saved_reduction", None)
        name = loss.grad_fn.name()
        # Of a vector of losses, it is the mean or the sum over them.
        over_losses = len(getattr(loss.grad_fn, "_saved_self_sym_sizes", ())) == 1
        if not mean and (kind == _MEAN or (over_losses and name.startswith("MeanBackward"))):
            self._warn(
                ReductionWarning,
                "the loss is a mean, but is taken for the sum over the micro-batch: pass "
                'reduction="sum", or GradAccumulator(…, mean=True)',
            )
        elif mean and (kind == _SUM or (over_losses and name.startswith("SumBackward"))):
            self._warn(
                ReductionWarning,
                "the loss is a sum, but mean=True multiplies it by its weight: leave mean out",
            )

    def loaded(self, micro_batches: int) -> None:
        """A state was loaded that holds so many micro-batches of a step."""
        self._pending["micro_batches"] = micro_batches
        self._sentinel = None

    def saved(self) -> None:
        """A state was taken: what it holds of a step is not lost with this object."""
        self._pending["lost"] = 0

    def stepping(self, parameters: Sequence[Tensor]) -> None:
        """A step is taken on these parameters."""
        now = [id(parameter) for parameter in parameters]
        if self._parameters is not None and now != self._parameters:
            self._warn(
                ChangedParametersWarning,
                "the optimizer's parameters are others than at the step before; make a new "
                "GradAccumulator where model or optimizer are changed",
            )
        self._parameters = now
        self._pending.update(micro_batches=0, lost=0)
        self._sentinel = None

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Steps inside are the accumulator's."""
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    # ------------------------------------------------------------------ told by hooks

    def _stepped(self) -> None:
        if not self._ours and self._pending["micro_batches"]:
            self._warn(
                ForeignStepWarning,
                "optimizer.step() was called in the middle of an accumulated step; the accumulator "
                "steps by itself, and accumulator.step() ends a step early",
            )

    def _forwarded(self) -> None:
        if not self._inside and torch.is_grad_enabled():
            self._warn(
                UnsynchronizedWarning,
                "a distributed module's forward stands outside accumulator.micro_batch(…): it will "
                "reduce gradients by itself, and they are reduced again",
            )

    def _warn(self, category: type[TorchBudgetWarning], text: str) -> None:
        if text not in self._told and not self._quiet:
            self._told.add(text)
            warnings.warn(text, category, stacklevel=_callers_level())


class _Hook:
    """Calls a method of a watch that it does not keep alive; of copies, nothing."""

    def __init__(
        self, me: Callable[[], MisuseDetector | None], method: Callable[[MisuseDetector], None]
    ) -> None:
        self._me = me
        self._method = method

    def __call__(self, *_: Any) -> None:
        watch = self._me()
        if watch is not None:
            self._method(watch)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nobody, MisuseDetector._stepped)


def _nobody() -> None:
    return None


def _callers_level() -> int:
    """The stack level, for a warning, of the first frame outside this package and contextlib."""
    level = 1
    frame = sys._getframe(1)
    inside = (str(Path(__file__).parent), contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
        level += 1
    return level - 1


def _forgotten(pending: dict[str, int]) -> None:
    if pending["lost"]:
        warnings.warn(
            f"a GradAccumulator is gone with {pending['lost']} micro-batches that no step "
            "took; call accumulator.flush() behind the loop",
            ForgottenStepWarning,
            stacklevel=2,
        )
