"""What a training step refers to: its closure, its globals, and what those refer to."""

from __future__ import annotations

import functools
import logging
import random
import types
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

# Deep enough for a trainer with a context with a model; large containers are not searched.
_DEPTH: Final = 8
_MOST_ITEMS: Final = 1000
# Functions of these packages do not refer to a user's model.
_FOREIGN: Final = frozenset({"torch", "numpy", "builtins"})

HELPERS: Final = (LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)
GENERATORS: Final = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
CONTAINERS: Final = (dict, list, set, deque)
_STATEFUL: Final = (nn.Module, torch.optim.Optimizer, *HELPERS, *GENERATORS)
_NOT_SEARCHED: Final = (
    *(types.ModuleType, type, logging.Logger),
    *(torch.Tensor, torch.optim.Optimizer),
)
# What the step reads: tensors in them are not saved.
_DATA: Final = (Dataset, DataLoader)


def values_of(container: Any) -> Any:
    """The values of a container."""
    return container.values() if isinstance(container, dict) else container


def values_of_slots(one: object) -> list[Any]:
    """The values of the attributes that an object's classes name in `__slots__`."""
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [getattr(one, name, None) for name in slots if not name.startswith("__")]


def reachable(step: object) -> Iterator[Any]:
    """Everything that `step` (or a batch) refers to, directly or not, each once, breadth first."""
    seen: dict[int, Any] = {}  # which keeps them, so that no other gets the same id
    level: list[Any] = [step]
    for _ in range(_DEPTH):
        next_level: list[Any] = []
        for one in level:
            if id(one) not in seen:
                seen[id(one)] = one
                yield one
                next_level += _references(one)
        level = next_level


def _references(one: Any) -> list[Any]:
    """What an object refers to that may be, or lead to, something stateful."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, types.FunctionType):
        return _of_function(one)
    if isinstance(one, types.BuiltinMethodType):
        return [one.__self__]
    if isinstance(one, (*CONTAINERS, tuple, frozenset)):
        return list(values_of(one)) if len(one) <= _MOST_ITEMS else []
    if isinstance(one, _NOT_SEARCHED):
        return []
    values = values_of_slots(one)
    attributes = getattr(one, "__dict__", {})
    if isinstance(one, _DATA):
        return [value for value in attributes.values() if isinstance(value, _STATEFUL + _DATA)]
    if not isinstance(one, nn.Module):
        return [*values, *attributes.values(), attributes]  # themselves a container
    values += [v for k, v in attributes.items() if k not in ("_parameters", "_buffers", "_modules")]
    return [*values, *one._modules.values()]


def _of_function(function: types.FunctionType) -> list[Any]:
    if _is_foreign(function):
        return []
    found: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*found, *(name.value for name in names_of(function)), *vars(function).values()]


@dataclass(slots=True)
class Name:
    """A name outside a function that it may bind anew.

    Attributes:
        owner: the cell of its closure, or its module's globals.
        name: in the globals.
    """

    owner: Any
    name: str = ""

    @property
    def value(self) -> Any:
        """What it is bound to."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.name)
        try:
            return self.owner.cell_contents
        except ValueError:  # it is not bound yet
            return None

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            self.owner.cell_contents = value


def names_of(function: types.FunctionType) -> Iterator[Name]:
    """The names outside a function that it may bind anew."""
    if _is_foreign(function):
        return
    for cell in function.__closure__ or ():
        yield Name(cell)
    codes = [function.__code__]
    for code in codes:  # which grows: functions inside the function
        for name in code.co_names:
            if name in function.__globals__:
                yield Name(function.__globals__, name)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def is_of_torch(one: object) -> bool:
    """Whether torch has made its class."""
    return type(one).__module__.partition(".")[0] == "torch"


def _is_foreign(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _FOREIGN
