"""What a training changes and the checkpoints of `fit` do not have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchbudget.errors import OptionError, UnsavedStateWarning
from torchbudget.protocols import Stateful
from torchbudget.restoring import reachable
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.warn import warn


def check_trained(model: nn.Module, accumulator: GradAccumulator) -> None:
    """Raise an `OptionError` where parameters are trained that the model does not have."""
    saved = set(map(id, model.parameters()))
    others = [one for one in accumulator.optimizers.parameters() if id(one) not in saved]
    if others:
        raise OptionError(
            f"the optimizers train {len(others)} parameters, the first of shape "
            f"{tuple(others[0].shape)}, that the model does not have, as those of a loss or a head "
            "of its own: they would not be saved. Make one module of both, and pass that as model"
        )


class Unsaved:
    """Modules and schedulers that criterion and callbacks refer to, and which are not saved.

    Those of a callback that has a state of its own are taken to be in it.

    Args:
        model: that is saved.
        accumulator: whose schedulers are saved.
        criterion: of the training.
        callbacks: likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        accumulator: GradAccumulator,
        criterion: Callable[..., Any],
        callbacks: Sequence[Callable[..., Any]],
    ) -> None:
        owners = [getattr(callback, "__self__", callback) for callback in callbacks]
        with_state = [owner for owner in owners if isinstance(owner, Stateful)]
        both = zip(callbacks, owners, strict=True)
        without = [callback for callback, owner in both if not isinstance(owner, Stateful)]
        known = set(map(id, reachable([*with_state, *accumulator.optimizers.schedulers])))
        self._parameters = list(model.parameters())
        self._learnable = [one.requires_grad for one in self._parameters]
        # By their tensors, which modules outside of the model may share, too.
        self._saved = {id(one) for one in (*model.parameters(), *model.buffers())}
        self._states = [
            (one, self._state_of(one))
            for one in reachable([criterion, *without, *accumulator.modules])
            if isinstance(one, (nn.Module, LRScheduler, ReduceLROnPlateau)) and id(one) not in known
        ]

    def learnable(self) -> list[bool] | None:
        """Which parameters of the model require a gradient, if that changed in the training."""
        now = [one.requires_grad for one in self._parameters]
        return None if now == self._learnable else now

    def restore(self, learnable: list[bool] | None) -> None:
        """Set what a checkpoint has of `learnable`; what changed between two calls of fit stays."""
        for one, requires_grad in zip(self._parameters, learnable or (), strict=False):
            one.requires_grad_(requires_grad)

    def check(self) -> None:
        """Warn, once of each, where one has changed since the training began."""
        changed = {
            id(one) for one, state in self._states if not _is_same(state, self._state_of(one))
        }
        names = sorted({type(one).__name__ for one, _ in self._states if id(one) in changed})
        self._states = [pair for pair in self._states if id(pair[0]) not in changed]
        if names:
            warn(
                f"{', '.join(names)} changes in the training, and is not in its checkpoints, so "
                "that a training which goes on is another one: make it a part of the model, give "
                "the accumulator a scheduler, or let the callback that changes it have state_dict "
                "and load_state_dict",
                UnsavedStateWarning,
            )

    def _state_of(self, one: Any) -> list[tuple[Any, int]]:
        """What tells whether it changed: a scheduler's epoch, or tensors with their versions."""
        if not isinstance(one, nn.Module):
            return [(None, one.last_epoch)]
        own: list[Tensor | None] = [*one._parameters.values(), *one._buffers.values()]
        return [(t, t._version) for t in own if t is not None and id(t) not in self._saved]


def _is_same(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    """Whether the tensors are the same ones, unchanged."""
    same = (a is b and one == other for (a, one), (b, other) in zip(before, now, strict=False))
    return len(before) == len(now) and all(same)
