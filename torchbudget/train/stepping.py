"""The optimizers of a step: what is done to the gradients, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbudget.errors import StateError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one optimizer step did, over all ranks.

    Attributes:
        number: of the step, from 1.
        loss: Σ loss / Σ weight.
        weight: Σ weight.
        gradient_norm: before clipping; `None` without `max_norm`.
        micro_batches: that made it.
        skipped: whether an optimizer did not step: the gradient scaler found a gradient that is not
            finite, or nothing had a weight.
    """

    number: int
    loss: float
    weight: float
    gradient_norm: float | None
    micro_batches: int
    skipped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepping:
    """Optimizers that step together, and what goes with them.

    Attributes:
        optimizers: at least one.
        schedulers: of their learning rates.
        scaler: of their gradients.
        max_norm: of the gradients of all of them.
    """

    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    scaler: torch.amp.GradScaler | None
    max_norm: float | None

    def each(self) -> Iterator[Tensor]:
        """All that is trained; what two optimizers share comes twice."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]

    def parameters(self) -> list[Tensor]:
        """All that is trained, each once."""
        return list({id(parameter): parameter for parameter in self.each()}.values())

    def step(self, factor: float) -> tuple[float | None, bool]:
        """Multiply the gradients, unscale them once, clip them, step, and update the scale.

        Returns:
            The norm before clipping, if there is one to clip to; and whether the scaler skipped.
        """
        parameters = self.parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients and factor != 1:
            torch._foreach_mul_(gradients, factor)
        scaler = self.scaler
        if scaler is None:
            norm = self._clip(parameters)
            for optimizer in self.optimizers:
                optimizer.step()
            return norm, False
        # The scaler asks for a gradient of each optimizer that it unscales.
        live = [optimizer for optimizer in self.optimizers if _has_gradients(optimizer)]
        if not live:
            return None, True
        for optimizer in live:
            scaler.unscale_(optimizer)
        norm = self._clip(parameters, together=len(live) > 1)
        scale = scaler.get_scale()
        for optimizer in live:
            scaler.step(optimizer)
        scaler.update()
        return norm, scaler.get_scale() < scale

    def _clip(self, parameters: Sequence[Tensor], *, together: bool = False) -> float | None:
        """Clip, if there is a norm to clip to; the norm before.

        Of optimizers that step together none does where the gradients of one are not finite.
        """
        gradients = [p.grad for p in parameters if p.grad is not None]
        if self.max_norm is None and not together:
            return None
        norm = nn.utils.get_total_norm(gradients)
        found = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if together and not math.isfinite(found):
            for parameter in parameters:
                parameter.grad = None
        elif self.max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        return found if self.max_norm is not None else None

    def clear(self) -> None:
        """Set all gradients to `None`."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def schedule(self) -> None:
        """Step the schedulers."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of all of them."""
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put them back.

        Raises:
            StateError: of other numbers of optimizers or schedulers.
        """
        for name in ("optimizers", "schedulers"):
            mine, saved = getattr(self, name), state[name]
            if len(mine) != len(saved):
                raise StateError(f"the state has {len(saved)} {name}, there are {len(mine)}")
            for one, its in zip(mine, saved, strict=True):
                one.load_state_dict(its)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
