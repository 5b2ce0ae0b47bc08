"""The optimizers that step together: what is done to the gradients, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from torchbudget.checks import positive_number
from torchbudget.distributed import local_part
from torchbudget.errors import OptionError, StateError
from torchbudget.train.gradients import largest_share, total_norm

SPARSE: Final = "sparse gradients cannot be clipped or summed over ranks: pass sparse=False"

# A share of the largest number, less what float32 rounds.
_OVERFLOWS: Final = 1 - 1e-6

STEPS_IN_BACKWARD: Final = (
    "a hook of a parameter steps an optimizer inside the backward of a micro-batch: remove the hook"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizers:
    """Optimizers that step together, with their schedulers and gradient scaler.

    Attributes:
        optimizers: at least one.
        schedulers: of their learning rates.
        scaler: of their gradients.
        max_norm: that the gradients of all of them are clipped to.
        skip_nonfinite: no optimizer steps if a gradient is not finite, without a scaler too.

    Raises:
        OptionError: no optimizer, a norm that is not positive, or an optimizer or scheduler that
            cannot work with micro-batches.
    """

    optimizers: Sequence[Optimizer]
    schedulers: Sequence[Any]
    scaler: torch.amp.GradScaler | None
    max_norm: float | None
    skip_nonfinite: bool

    def __post_init__(self) -> None:
        if not self.optimizers:
            raise OptionError("a GradAccumulator needs an optimizer")
        if any(isinstance(one, torch.optim.LBFGS) for one in self.optimizers):
            raise OptionError(
                "LBFGS evaluates the loss itself, which micro-batches do not allow: use another"
            )
        if any(isinstance(one, ReduceLROnPlateau) for one in self.schedulers):
            raise OptionError("ReduceLROnPlateau needs a metric: step it yourself, after evaluate")
        each = [id(parameter) for parameter in self.each_parameter()]
        if self.scaler is not None and len(set(each)) < len(each):
            raise OptionError(
                "a GradScaler unscales a parameter's gradient once for every optimizer that has "
                "it: let each parameter be in one optimizer"
            )
        if self.max_norm not in (None, math.inf):
            positive_number("max_norm", self.max_norm)

    def each_parameter(self) -> Iterator[Tensor]:
        """All parameters; one that two optimizers share comes twice. O(1) up to the first."""
        for optimizer in self.optimizers:
            yield from _parameters_of(optimizer)

    def parameters(self) -> list[Tensor]:
        """All parameters, each once."""
        return list({id(p): p for p in self.each_parameter()}.values())

    def unscale(self) -> Tensor | None:
        """Unscale the gradients; return their `largest_share`; `None` if it is not needed."""
        scaled = self._scaled()
        if not self._scales() and not self.skip_nonfinite:
            return None
        if self.scaler is not None and scaled:
            # Makes its scale, on a rank that had no backward yet.
            self.scaler.scale(torch.ones((), device=self.parameters()[0].device))
            for optimizer in scaled:
                self.scaler.unscale_(optimizer)
        return largest_share([p.grad for p in self.parameters() if p.grad is not None])

    def step(
        self, factor: float, divisors: Mapping[int, float], largest: float | None
    ) -> tuple[Tensor | None, bool]:
        """Multiply the gradients, which were unscaled, clip them, step, and update the scale.

        Where a gradient is not finite, or would not be once it is multiplied, no optimizer steps: a
        scaler would decide, and read, for each alone.

        Args:
            factor: of all gradients; 0: no optimizer steps.
            divisors: of the parameters with these ids, whose gradients were divided before.
            largest: of the gradients, see `largest_share`; `None`: they are not looked at.

        Returns:
            The norm before clipping, `None` without `max_norm`; and whether no optimizer stepped.

        Raises:
            OptionError: a gradient is sparse, and is to be clipped.
        """
        parameters = self.parameters()
        scaled = self._scaled()
        if not factor or (self._scales() and not scaled):
            norm, skipped = None, True
        else:
            self._multiply(parameters, factor, divisors)
            norm = None if self.max_norm is None else self._clip(parameters)
            most = factor * max(divisors.values(), default=1.0)
            skipped = largest is not None and largest * most > _OVERFLOWS
        for optimizer in () if skipped else scaled or self.optimizers:
            optimizer.step()
        if self.scaler is not None and scaled:
            self.scaler.update()
        return norm, skipped

    def abandon(self) -> None:
        """Clear the gradients of a step that is not taken; the scaler forgets them, too."""
        self.clear()
        if self.scaler is not None and self._scales():
            with suppress(AssertionError, RuntimeError):  # it has no scale yet, or its device fails
                self.scaler.update(self.scaler.get_scale())

    def _scales(self) -> bool:
        return self.scaler is not None and self.scaler.is_enabled()

    def _scaled(self) -> list[Optimizer]:
        """The optimizers whose gradients are scaled; a scaler fails on one without gradients."""
        if not self._scales():
            return []
        return [
            one for one in self.optimizers if any(p.grad is not None for p in _parameters_of(one))
        ]

    @staticmethod
    def _multiply(
        parameters: Sequence[Tensor], factor: float, divisors: Mapping[int, float]
    ) -> None:
        by_factor: dict[float, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                own = factor * divisors.get(id(parameter), 1)
                by_factor.setdefault(own, []).append(local_part(parameter.grad))
        for own, gradients in by_factor.items():
            if own != 1:
                torch._foreach_mul_(gradients, own)

    def _clip(self, parameters: Sequence[Tensor]) -> Tensor:
        """Clip to `max_norm`, if there is one; the norm before."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise OptionError(SPARSE)
        norm = total_norm(gradients)
        if self.max_norm is not None and self.max_norm < math.inf:
            # As torch.nn.utils.clip_grads_with_norm_, which takes no DTensors beside plain ones.
            factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
            for device, parts in groupby(map(local_part, gradients), attrgetter("device")):
                torch._foreach_mul_(list(parts), factor.to(device))
        return norm

    def set_mode(self, mode: str) -> None:
        """Set the model to the weights that are trained ("train") or returned ("eval").

        For optimizers that have methods of these names, such as schedule-free ones.
        """
        for optimizer in self.optimizers:
            set_mode = getattr(optimizer, mode, None)
            if callable(set_mode):
                set_mode()

    def clear(self) -> None:
        """Set all gradients to `None`; while they are measured, to 0."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

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
                raise StateError(f"the state has {len(states)} {name}, but {len(ones)} are given")
            for one, its_state in zip(ones, states, strict=True):
                one.load_state_dict(its_state)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])


def _parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
