"""What a training step refers to: its closure, its globals, and what those refer to."""

from __future__ import annotations

import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
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
_FOREIGN_TYPES: Final = frozenset({"torch", "numpy"})
_FOREIGN: Final = _FOREIGN_TYPES | {"builtins"}

HELPERS: Final = (LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)
GENERATORS: Final = (
    torch.Generator,
    np.random.Generator,
    np.random.RandomState,
    random.Random,
)
CONTAINERS: Final = (dict, list, set, deque)
_STATEFUL: Final = (nn.Module, torch.optim.Optimizer, *HELPERS, *GENERATORS)
# Of the standard library's packages with these names, what threads and processes share.
_SHARED: Final = frozenset(
    {"_thread", "threading", "_queue", "queue", "_multiprocessing", "multiprocessing", "concurrent"}
)
# What the step reads: tensors in them are not saved.
_DATA: Final = (Dataset, DataLoader)


def values_of(container: Any) -> Any:
    """The values of a container."""
    return container.values() if isinstance(container, dict) else container


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
    if isinstance(one, (types.ModuleType, type, torch.Tensor, torch.optim.Optimizer)):
        return []
    values = [slot.value for slot in slots_of(one)]
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
    attributes = vars(function)
    return [*found, *(name.value for name in names_of(function)), *attributes.values(), attributes]


def not_the_steps_own(found: Iterable[Any]) -> list[Any]:
    """Of what was found, containers and objects whose numbers and texts others count with.

    All that an object with a lock, a thread or a queue refers to, since another thread may be
    about to change it; and the attributes of objects of torch's, such as a profiler.
    """
    shared = [one for one in found if _is_shared(one) or _shares(one)]
    of_torch = [one for one in found if type(one).__module__.partition(".")[0] in _FOREIGN_TYPES]
    inside = [value for one in of_torch for value in (one, *_references(one))]
    return [*reachable(shared), *inside]


def _shares(one: Any) -> bool:
    if isinstance(one, (types.ModuleType, types.FunctionType, type)):
        return False
    attributes = getattr(one, "__dict__", {}).values()
    return any(map(_is_shared, (*attributes, *(slot.value for slot in slots_of(one)))))


def _is_shared(one: Any) -> bool:
    return any(kind.__module__.partition(".")[0] in _SHARED for kind in type(one).__mro__)


class _Unbound:
    """The only one stands for what is not there."""


UNBOUND: Final = _Unbound()


@dataclass(slots=True)
class Name:
    """A name outside a function that it may bind anew, or an object's attribute in a slot.

    Attributes:
        owner: the cell of its closure, its module's globals, or the object.
        name: in the globals, or of the slot.
    """

    owner: Any
    name: str = ""

    @property
    def value(self) -> Any:
        """What it is bound to; `UNBOUND` if it is not bound."""
        if isinstance(self.owner, dict):
            return self.owner.get(self.name, UNBOUND)
        try:
            return object.__getattribute__(self.owner, self._attribute)
        except (AttributeError, ValueError):  # of an object, of a cell
            return UNBOUND

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        elif value is UNBOUND:
            object.__delattr__(self.owner, self._attribute)
        else:
            object.__setattr__(self.owner, self._attribute, value)  # of a frozen object, too

    @property
    def _attribute(self) -> str:
        return self.name or "cell_contents"


def slots_of(one: object) -> Iterator[Name]:
    """The attributes of an object that are in slots."""
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield Name(one, name)


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


def _is_foreign(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _FOREIGN
