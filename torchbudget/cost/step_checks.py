"""Checks that a step can be measured, and that it is a whole training step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchbudget.distributed import SPARSE
from torchbudget.errors import CostError, MeasureWarning, warn
from torchbudget.restoring import TrainingState, parameters_of

# Devices whose memory is measured; a step on the meta device can be traced.
_MEASURED: Final = ("cpu", "cuda", "meta")
_NO_GRADIENTS: Final = (
    "the model had no gradients yet: to evaluate between the steps of a training, measure after "
    "its first step, when gradients and the optimizer's state are allocated"
)


class StepChecks:
    """Checks of a step and of what it refers to.

    Args:
        state: what the step refers to.

    Attributes:
        forward_only: whether the step that was checked last made no gradients.
        keeps_gradients: whether gradients stayed allocated from step to step, and are dense.
        trained: outermost modules with a parameter that got a gradient.
    """

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self.forward_only = False
        self.keeps_gradients = True
        self.trained: set[nn.Module] = set()
        self.in_optimizer = False  # whether an optimizer steps at the moment
        self._stepped: set[int] = set()  # ids of parameters that an optimizer has stepped

    def check_parameters(self, *, contents: bool) -> None:
        """Check that the parameters can be measured.

        Args:
            contents: whether their values will be saved, too.

        Raises:
            CostError: one is uninitialized, without values, or on another device than the first;
                or that device is neither a CPU nor a CUDA device.
        """
        device = self._state.device
        if device.type not in _MEASURED:
            raise CostError(
                f"the step's parameters are on {device}: only the memory of CPUs and CUDA devices "
                "can be measured; state the cost, as PaddedCost, or measure it on one of those"
            )
        for one in [*self._state.parameters(), *(buffer for _, buffer in self._named())]:
            if is_lazy(one):
                raise CostError(
                    f"{self.name_of(one)} is uninitialized: call the module on a batch first"
                )
            if one.is_meta and contents:
                raise CostError(
                    f"{self.name_of(one)} is on the meta device, without values to run the step "
                    "with; pass method='trace', or load the values first"
                )
            # A small buffer on the CPU uses no memory of another device.
            counts = isinstance(one, nn.Parameter) or one.device.type not in ("cpu", "meta")
            if counts and one.device != device:
                raise CostError(
                    f"{self.name_of(one)} is on {one.device}, but the first parameter is on "
                    f"{device}: only the bytes of one device are measured; move all parameters "
                    "to it"
                )

    def name_of(self, tensor: torch.Tensor) -> str:
        """The name of a parameter or a buffer, with that of its module."""
        return next((name for name, one in self._named() if one is tensor), "a tensor of the step")

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module in self._state.modules:
            for name, one in [*module.named_parameters(), *module.named_buffers()]:
                yield f"{name} of {type(module).__name__}", one

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Check that the step inside is a full training step, or forward only.

        Afterwards `forward_only` says whether no gradient of a parameter was computed, and no
        optimizer stepped. Gradients of `torch.func` are not seen.

        Raises:
            CostError: the step is a part of a training step: gradients were made, but none is left
                and no optimizer stepped; an optimizer stepped that the step does not name; or
                gradients are to stay allocated, and do not.

        Warns:
            MeasureWarning: no optimizer stepped; or the step is forward only, of a module in
                training mode.
        """
        parameters = self._state.parameters()
        before = [parameter.grad is not None for parameter in parameters]
        # A reference to a gradient would keep it allocated.
        earlier = [(p, weakref.ref(p.grad)) for p in parameters if p.grad is not None]
        stepped: list[bool] = []

        def read(optimizer: torch.optim.Optimizer) -> None:
            with_gradients = [id(p) for p in parameters_of(optimizer) if p.grad is not None]
            self._stepped.update(with_gradients)
            stepped.append(bool(with_gradients))

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not any(optimizer is one for one in self._state.optimizers):
                raise CostError(
                    f"the step calls an optimizer of type {type(optimizer)} that it does not refer "
                    "to, so its state cannot be restored; let the step's function refer to it"
                )
            read(optimizer)  # some drop gradients at the end of their step
            if not made:  # FSDP2 has no such hooks, and adds in place
                self.keeps_gradients &= all(gradient() is not None for _, gradient in earlier)
            self.in_optimizer = True

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:  # a closure made gradients
            self.in_optimizer = False
            read(optimizer)

        def note_made(owner: nn.Module | None) -> None:
            # Here, before the backward adds to them, DDP may have replaced them, and
            # `run_or_split` put them aside. The step may replace them later.
            dropped = any(p.grad is None and gradient() is None for p, gradient in earlier)
            self.keeps_gradients &= not dropped
            made.append(owner)

        # Also of a gradient that `torch.autograd.grad` does not accumulate.
        made: list[nn.Module | None] = []
        owners: list[tuple[nn.Module | None, list[torch.Tensor]]] = [(None, parameters)]
        owners += [(one, [*one.parameters()]) for one in self._state.modules]
        handles = [
            register_optimizer_step_pre_hook(check),
            register_optimizer_step_post_hook(note),
            *(
                register_multi_grad_hook(own, lambda _, one=one: note_made(one), mode="any")
                for one, own in owners
                if own
            ),
        ]
        try:
            yield
        finally:
            self.in_optimizer = False
            for handle in handles:
                handle.remove()
            for one in parameters:
                one._backward_hooks = one._backward_hooks or None  # as before, no empty dictionary
        self.trained |= {one for one in made if one is not None}
        left = [parameter.grad is not None for parameter in self._state.parameters()]
        self.forward_only = not stepped and not made and left == before
        self.keeps_gradients &= not any(
            p.grad is None or p.grad.layout in SPARSE
            for p in self._state.parameters()
            if id(p) in self._stepped
        )
        if self._state.accumulates and not self.keeps_gradients:
            raise CostError(
                "micro-batches of one optimizer step add to the same gradients, but this step sets "
                "them to None, or has sparse gradients or gradients that keep their graph: let it "
                "clear dense ones by optimizer.zero_grad(), or plan without samples_per_step"
            )
        if any(stepped):
            return
        if self.forward_only:
            # A module without parameters has no mode that matters.
            if any(own and one.training for one, own in owners if one is not None):
                warn(
                    "the step is forward only, it made no gradients, but its module is in training "
                    "mode: to train, let it call backward(), optimizer.step() and "
                    "optimizer.zero_grad(); to evaluate, call model.eval() first, and compute "
                    "under torch.no_grad()",
                    MeasureWarning,
                )
            return
        if not stepped and not any(left) | any(before):
            raise CostError(
                "gradients were made, but none is left and no optimizer stepped: the step must be "
                "a full one, with backward(), optimizer.step() and optimizer.zero_grad(), or "
                "forward only, without any of them"
            )
        warn(
            "no optimizer stepped: the memory of its step is not in the cost; let the step call "
            "optimizer.step() and optimizer.zero_grad(), as in training",
            MeasureWarning,
        )

    def idle_optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers without a trained parameter that any optimizer stepped.

        None if no optimizer stepped at all; not those that have their state from steps before:
        it is counted with all other tensors.
        """
        optimizers = self._state.optimizers
        trained = [{id(p) for p in parameters_of(one) if p.requires_grad} for one in optimizers]
        return [
            one
            for one, its in zip(optimizers, trained, strict=True)
            if self._stepped and its and its.isdisjoint(self._stepped) and not one.state
        ]

    def notes(self) -> list[str]:
        """Notes for the report on the step that was checked last."""
        if not self.forward_only:
            return []
        note = (
            "the step was forward only: it made no gradients and no optimizer stepped, so the "
            "cost is for evaluation, and too low to train with"
        )
        parameters = self._state.parameters()
        if any(p.requires_grad for p in parameters) and all(p.grad is None for p in parameters):
            return [note, _NO_GRADIENTS]
        return [note]
