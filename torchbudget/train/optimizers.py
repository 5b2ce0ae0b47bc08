"""The optimizers that step together: what is done to the gradients, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchbudget.checks import positive_number
from torchbudget.errors import OptionError, StateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizers:
    """Optimizers that step together, with their schedulers and gradient scaler.

    Attributes:
        optimizers: at least one.
        schedulers: of their learning rates.
        scaler: of their gradients.
        max_norm: that the gradients of all of them are clipped to.

    Raises:
        OptionError: no optimizer, a norm that is not positive, or an optimizer or scheduler that
            cannot work with micro-batches.
    """

    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    scaler: torch.amp.GradScaler | None
    max_norm: float | None

    def __post_init__(self) -> None:
        if not self.optimizers:
            raise OptionError("a GradAccumulator needs an optimizer")
        if any(isinstance(one, torch.optim.LBFGS) for one in self.optimizers):
            raise OptionError(
                "LBFGS evaluates the loss by itself, which micro-batches do not allow"
            )
        if any(isinstance(one, ReduceLROnPlateau) for one in self.schedulers):
            raise OptionError("ReduceLROnPlateau needs a metric: step it yourself, after evaluate")
        if self.max_norm is not None:
            positive_number("max_norm", self.max_norm)

    def each_parameter(self) -> Iterator[Tensor]:
        """All parameters; one that two optimizers share comes twice. O(1) up to the first."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def parameters(self) -> list[Tensor]:
        """All parameters, each once."""
        return list({id(p): p for p in self.each_parameter()}.values())

    def step(self, factor: float) -> tuple[float | None, bool]:
        """Multiply the gradients, unscale them once, clip them, step, and update the scale.

        Returns:
            The norm before clipping, `None` without `max_norm`; and whether the scaler skipped.
        """
        parameters = self.parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and factor != 1:
            torch._foreach_mul_(gradients, factor)
        scaler = self.scaler or torch.amp.GradScaler(enabled=False)
        scales = scaler.is_enabled()
        # A scaler fails on an optimizer that has no gradients at all.
        active = [one for one in self.optimizers if not scales or _has_gradients(one)]
        if not active:
            return None, True
        for optimizer in active:
            scaler.unscale_(optimizer)
        norm = self._clip(parameters, together=scales and len(active) > 1)
        scale = scaler.get_scale()
        for optimizer in active:
            scaler.step(optimizer)
        scaler.update()
        return norm, scaler.get_scale() < scale  # it lowers its scale exactly where it skipped

    def _clip(self, parameters: Sequence[Tensor], *, together: bool) -> float | None:
        """Clip to `max_norm`, if there is one; the norm before.

        The scaler decides for each optimizer alone whether it steps. So with several together, all
        gradients are dropped where one is not finite: then none of them steps.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.max_norm is None and not together:
            return None
        norm = nn.utils.get_total_norm(gradients)
        # The norm of FSDP's sharded gradients is a DTensor, whose local part is this shard's alone.
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if together and not math.isfinite(value):
            for parameter in parameters:
                parameter.grad = None
        elif self.max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        return value if self.max_norm is not None else None

    def clear(self) -> None:
        """Set all gradients to `None`."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def schedule(self) -> None:
        """Step the schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of optimizers, schedulers and scaler."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            StateError: it has another number of optimizers or schedulers.
        """
        for name, ones in (("optimizers", self.optimizers), ("schedulers", self.schedulers)):
            states = state[name]
            if len(ones) != len(states):
                raise StateError(f"the state has {len(states)} {name}, there are {len(ones)}")
            for one, its_state in zip(ones, states, strict=True):
                one.load_state_dict(its_state)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
