"""What a training step changes: found in what the step refers to, saved, and put back."""

from __future__ import annotations

import copy
import functools
import random
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from torchbudget.errors import CostError, MeasureWarning

# Deep enough for a trainer that holds a context that holds a model; a data set is not searched.
_DEPTH: Final = 8
_MOST_ITEMS: Final = 1000
# Functions of these packages refer to nobody's model.
_FOREIGN: Final = frozenset({"torch", "numpy", "builtins"})

_STATEFUL: Final = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)


class TrainingState:
    """The modules, optimizers, schedulers and scalers that a step refers to.

    They are looked for in the step's closure, in the globals that it names, in its arguments if it
    is a `functools.partial`, in its object if it is a method, and in what those hold in turn.

    Attributes:
        modules: the outermost ones.
        optimizers: all of them.
        helpers: learning rate schedulers and gradient scalers.
    """

    def __init__(self, step: Callable[..., object]) -> None:
        found = list(_stateful(step))
        modules = [one for one in found if isinstance(one, nn.Module)]
        inner = {id(part) for one in modules for part in one.modules() if part is not one}
        self.modules = [one for one in modules if id(one) not in inner]
        self.optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer)]
        self.helpers = [
            one for one in found if isinstance(one, (LRScheduler, torch.amp.GradScaler))
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of the modules and of the optimizers, each once."""
        held = [p for module in self.modules for p in module.parameters()]
        held += [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        return list({id(tensor): tensor for tensor in held}.values())

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, gradients and the optimizers' states, each once."""
        held = self.parameters()
        held += [p.grad for p in held if p.grad is not None]
        held += [b for module in self.modules for b in module.buffers()]
        for optimizer in self.optimizers:
            held += [
                t for t in tree_leaves([dict(s) for s in optimizer.state.values()]) if _is_tensor(t)
            ]
            held += [t for g in optimizer.param_groups for t in g.values() if _is_tensor(t)]
        return list({id(tensor): tensor for tensor in held}.values())

    @property
    def device(self) -> torch.device:
        """The device that the parameters are on, the first one's.

        Raises:
            CostError: there are none.
        """
        for parameter in self.parameters():
            return parameter.device
        raise CostError(
            "the step refers to no module and no optimizer: they are looked for in its closure, "
            "its globals and its object, and in what those hold; let it refer to them, as in "
            "def step(batch): loss_of(model, batch).backward(); optimizer.step(); …"
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Check that what runs inside is a full training step.

        Raises:
            CostError: no backward came.

        Warns:
            MeasureWarning: no optimizer stepped.
        """
        before = [parameter.grad is not None for parameter in self.parameters()]
        stepped: list[bool] = []

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
            stepped.append(any(gradient is not None for gradient in gradients))

        handle = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()
        if any(stepped):
            return
        if not any(p.grad is not None for p in self.parameters()) and not any(before):
            raise CostError(
                "no parameter got a gradient: the step must be a full one, with backward(), "
                "optimizer.step() and optimizer.zero_grad()"
            )
        warnings.warn(
            "no optimizer stepped: what its step needs is not in the cost; let the step call "
            "optimizer.step() and optimizer.zero_grad(), as in training",
            MeasureWarning,
            stacklevel=2,
        )

    @contextmanager
    def kept(self, *, contents: bool) -> Iterator[int]:
        """Put everything back at the end, the random generators too.

        Args:
            contents: copy what the tensors hold, for a step that really runs. Without it only
                which tensors there are is kept, for one that computes nothing.

        Yields:
            The bytes of the copies.
        """
        copies = [(t, t.detach().clone()) for t in self.tensors()] if contents else []
        gradients = [(p, p.grad) for p in self.parameters()]
        parts = [(part, _attributes(part)) for one in self.modules for part in one.modules()]
        states = [
            (
                one,
                {p: dict(state) for p, state in one.state.items()},
                [dict(g) for g in one.param_groups],
            )
            for one in self.optimizers
        ]
        helpers = [(one, copy.deepcopy(one.state_dict())) for one in self.helpers]
        generators = _generator_states()
        try:
            yield sum(copied.untyped_storage().nbytes() for _, copied in copies)
        finally:
            for part, attributes in parts:
                part.__dict__.clear()
                part.__dict__.update(attributes)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer, state, groups in states:
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, saved in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(saved)
            with torch.no_grad():
                for tensor, copied in copies:
                    tensor.copy_(copied)
            for helper, saved_state in helpers:
                helper.load_state_dict(saved_state)
            _set_generator_states(generators)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """The module's attributes; of containers, such as that of the buffers, a copy."""
    return {
        name: copy.copy(value) if isinstance(value, (dict, list, set)) else value
        for name, value in module.__dict__.items()
    }


def _stateful(step: Callable[..., object]) -> Iterator[Any]:
    """Everything stateful that is reached from `step`, each once, in the order it is met."""
    seen: set[int] = set()
    level: list[Any] = [step]
    for _ in range(_DEPTH):
        below: list[Any] = []
        for one in level:
            if id(one) not in seen:
                seen.add(id(one))
                if isinstance(one, _STATEFUL):
                    yield one
                below += _references(one)
        level = below


def _references(one: Any) -> list[Any]:
    """What an object holds that may be, or lead to, something stateful."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, types.FunctionType):
        return _of_function(one)
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one) if len(one) <= _MOST_ITEMS else []
    if isinstance(one, dict):
        return list(one.values()) if len(one) <= _MOST_ITEMS else []
    if isinstance(one, (types.ModuleType, type, torch.Tensor, nn.Module, torch.optim.Optimizer)):
        return []
    return list(getattr(one, "__dict__", {}).values())


def _of_function(function: types.FunctionType) -> list[Any]:
    if (function.__module__ or "").partition(".")[0] in _FOREIGN:
        return []
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that is not bound yet
            held.append(cell.cell_contents)
    codes = [function.__code__]
    for code in codes:
        held += [
            function.__globals__[name] for name in code.co_names if name in function.__globals__
        ]
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return [*held, *vars(function).values()]


def _generator_states() -> tuple[Any, ...]:
    devices = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices = torch.cuda.get_rng_state_all()
    numpy = np.random.get_state()  # noqa: NPY002 (the user's step may draw from it)
    return random.getstate(), numpy, torch.get_rng_state(), devices


def _set_generator_states(states: tuple[Any, ...]) -> None:
    python, numpy, cpu, devices = states
    random.setstate(python)
    np.random.set_state(numpy)  # noqa: NPY002
    torch.set_rng_state(cpu)
    if devices is not None:
        torch.cuda.set_rng_state_all(devices)
