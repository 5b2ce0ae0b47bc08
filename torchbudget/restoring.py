"""Finds what a step refers to, and restores it: modules, optimizers, generators, tensors.

`reachable` searches the objects: `_references` says which ones an object leads to. `TrainingState`
sorts what was found by how it is restored; its `_rebound` does so. `copied` saves the values of
tensors in a file.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import pickle
import random
import shutil
import tempfile
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable
from unittest.mock import patch

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

from torchbudget.distributed import SPARSE, fsdp_groups, part_bytes, plain_parts
from torchbudget.errors import CostError
from torchbudget.random_state import RandomState
from torchbudget.units import format_bytes

# Deep enough for a trainer with a context with a model.
_DEPTH: Final = 8
# Longer containers are data and are not searched, but for a dictionary's tensors, as of averages.
_MOST_ITEMS: Final = 1000
# Containers inside a module's or an optimizer's own are restored to this depth.
_NESTED: Final = 4
# Functions of these packages do not refer to a user's model.
_FOREIGN: Final = frozenset({"torch", "numpy", "builtins"})
# A larger array is data, not a running sum.
_ARRAY_BYTES: Final = 2**20
_WRITTEN_BYTES: Final = 2**26  # at once

_SCHEDULERS: Final = (LRScheduler, ReduceLROnPlateau, torch.amp.GradScaler)
_GENERATORS: Final = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_CONTAINERS: Final = (dict, list, set, deque)
_STATEFUL: Final = (nn.Module, torch.optim.Optimizer, *_SCHEDULERS, *_GENERATORS)
_NOT_SEARCHED: Final = (types.ModuleType, type, logging.Logger)
_DATA: Final = (Dataset, DataLoader)  # tensors in them are read, not changed


@runtime_checkable
class AccumulatesGradients(Protocol):
    """Takes an optimizer step only every so many micro-batches, as `GradAccumulator` does."""

    def measured(self, *, steps: bool) -> AbstractContextManager[None]:
        """Make each micro-batch inside a step of its own, or let none end a step; forget all."""

    def has_several(self) -> bool:
        """Return whether steps have several micro-batches."""


_measurements = 0  # that are in progress


def is_measuring() -> bool:
    """Return whether torchbudget calls the step now to measure it, rather than to train.

    Measuring restores model, optimizer and tensors, but not what a step does to the world: let the
    step leave out its log, its checkpoint and its progress bar. True in traces and in real runs of
    `measure_cost`, `loader`, `predict`, `trace_peak_bytes`, `DenseCost.of` and `warm_up`.

    >>> losses = []
    >>> def log(loss):
    ...     if not is_measuring():
    ...         losses.append(float(loss))
    >>> log(2.5)
    >>> losses
    [2.5]
    """
    return _measurements > 0


def reachable(step: object) -> Iterator[Any]:
    """Everything that `step` (or a batch) refers to, directly or not, each once, breadth first."""
    seen: dict[int, Any] = {}  # which keeps them, so that no other object gets the same id
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
    """The objects that an object refers to, and that may be, or lead to, something stateful."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, types.FunctionType):
        found = [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        found += [*(name.value for name in _names_of(one)), *vars(one).values()]
        return [] if _is_foreign(one) else found
    if isinstance(one, types.BuiltinMethodType):
        return [one.__self__]
    if isinstance(one, (*_CONTAINERS, tuple, frozenset)):
        values = [*_values_of(one)] if isinstance(one, dict) or len(one) <= _MOST_ITEMS else []
        is_long = len(values) > _MOST_ITEMS
        return [value for value in values if not is_long or isinstance(value, torch.Tensor)]
    if isinstance(one, _NOT_SEARCHED):
        return []
    attributes = getattr(one, "__dict__", {})
    if isinstance(one, torch.Tensor):  # such as `grad_sample` of a parameter
        return [value for value in attributes.values() if isinstance(value, torch.Tensor)]
    if isinstance(one, torch.optim.Optimizer):  # which may wrap another one
        return [value for value in attributes.values() if isinstance(value, torch.optim.Optimizer)]
    if isinstance(one, _DATA):
        return [value for value in attributes.values() if isinstance(value, _STATEFUL + _DATA)]
    values = [*_slots_of(one).values()]
    if not isinstance(one, nn.Module):
        return [*values, *attributes.values(), attributes]  # the dictionary is a container
    values += [v for k, v in attributes.items() if k not in ("_parameters", "_buffers", "_modules")]
    return [*values, *one._modules.values()]


@dataclass(slots=True)
class _Name:
    """A name outside a function that the function may bind anew.

    Attributes:
        owner: the cell of its closure, or its module's globals.
        name: in the globals.
    """

    owner: Any
    name: str = ""

    @property
    def value(self) -> Any:
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


def _names_of(function: types.FunctionType) -> Iterator[_Name]:
    if _is_foreign(function):
        return
    yield from map(_Name, function.__closure__ or ())
    codes = [function.__code__]
    for code in codes:  # which grows: functions inside the function
        for name in code.co_names:
            if name in function.__globals__:
                yield _Name(function.__globals__, name)
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _is_foreign(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in _FOREIGN


def _is_of_torch(one: object) -> bool:
    return type(one).__module__.partition(".")[0] == "torch"


def _values_of(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _slots_of(one: object) -> dict[str, Any]:
    """Values of the attributes that an object's classes name in `__slots__`."""
    names = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return {k: getattr(one, k) for k in names if not k.startswith("__") and hasattr(one, k)}


class TrainingState:
    """The modules, optimizers, schedulers, scalers and generators that a step refers to.

    They are searched in the step's closure, in the globals that it names, in its arguments if it
    is a `functools.partial`, in its object if it is a method, and in what these refer to.

    Attributes:
        modules: the outermost ones.
        optimizers: all of them.
        accumulators: of gradients, which must make single steps while the step is measured.
        has_several: whether a step of an accumulator has several micro-batches.
        accumulates: whether several micro-batches make an optimizer step. While the step is
            measured, gradients then stay allocated, as those of earlier micro-batches do.
        is_compiled: whether a module or a function is called through `torch.compile`.
    """

    # Private attributes, by how they are restored:
    # _schedulers: schedulers and gradient scalers. Their containers are refilled, also by `rewind`.
    # _loose_tensors: that the step refers to without a module, as in a closure. Their storages,
    #   flags and gradients are put back, as those of parameters and buffers.
    # _containers: dictionaries, lists, sets and deques of the user. They are refilled if an object
    #   in them is another one; `_internal`, those of torch and of accumulators, if a tensor is,
    #   since torch and accumulators count in them.
    # _arrays: small arrays of NumPy. Their values are copied.
    # _slotted: objects with `__slots__`. Attributes that are bound anew are put back.
    # _functions: their names outside, closures and globals, are put back if they are bound anew.
    # _generators: set back to their states; `_untraced`, all but torch's, are compared as well.

    def __init__(self, step: Callable[..., object], *, accumulates: bool = False) -> None:
        found = list(reachable(step))
        modules = [one for one in found if isinstance(one, nn.Module)]
        inner = {id(part) for one in modules for part in one.modules() if part is not one}
        self.modules = [one for one in modules if id(one) not in inner]
        self.optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer)]
        self.accumulators = [one for one in found if _accumulates(one)]
        self.has_several = any(one.has_several() for one in self.accumulators)
        self.accumulates = accumulates or self.has_several
        self.is_compiled = any(map(is_compiled, found))
        self._schedulers = [one for one in found if isinstance(one, _SCHEDULERS)]
        self._loose_tensors = [one for one in found if isinstance(one, torch.Tensor)]
        owners = [one for one in found if _is_of_torch(one) or _accumulates(one)]
        internal = {id(one) for owner in owners for one in _own_containers(owner)}
        self._containers = [one for one in found if isinstance(one, _CONTAINERS)]
        self._internal = [one for one in self._containers if id(one) in internal]
        self._containers = [one for one in self._containers if id(one) not in internal]
        arrays = [one for one in found if isinstance(one, np.ndarray) and one.flags.writeable]
        self._arrays = [one for one in arrays if one.nbytes <= _ARRAY_BYTES]
        self._slotted = [one for one in found if not _is_of_torch(one) and _slots_of(one)]
        self._generators = [one for one in found if isinstance(one, _GENERATORS)]
        self._functions = [one for one in found if isinstance(one, types.FunctionType)]
        self._untraced = [one for one in self._generators if not isinstance(one, torch.Generator)]
        # While the state is being restored: containers of `_schedulers` with their items, and
        # tensors with other tensors of the same storages.
        self._scheduler_items: list[tuple[Any, Any]] = []
        self._aliases: list[tuple[torch.Tensor, torch.Tensor]] = []

    def parts(self) -> Iterator[nn.Module]:
        """The modules and their submodules."""
        return (part for module in self.modules for part in module.modules())

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of the modules and of the optimizers, each once."""
        found: list[torch.Tensor] = [p for one in self.modules for p in one.parameters()]
        found += [parameter for one in self.optimizers for parameter in parameters_of(one)]
        return list({id(tensor): tensor for tensor in found}.values())

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, gradients, and all tensors in attributes of what was found, each once."""
        found = self.parameters()
        found += [p.grad for p in found if p.grad is not None]
        values = (value for container, _ in self._saved() for value in _values_of(container))
        found += [value for value in values if isinstance(value, torch.Tensor)]
        return list({id(tensor): tensor for tensor in found}.values())

    def rewind(self) -> None:
        """Set schedulers and scalers back, so that steps that are measured use up no schedule."""
        for container, items in self._scheduler_items:
            _refill(container, items)

    def draws(self) -> bytes:
        """The states of all generators but torch's, to be compared: a trace cannot follow them."""
        state = RandomState.take(devices=False)
        return pickle.dumps((state.python, state.numpy, self._untraced))

    def draw(self, count: int) -> None:
        """Draw numbers from all generators but torch's, so that a trace makes other choices."""
        for generator in (random, np.random, *self._untraced):
            for _ in range(count):
                generator.random()

    def replaced_bytes(self) -> int:
        """Bytes that are kept only to be restored, since the step gave tensors other storages."""
        now = {part.untyped_storage()._cdata for one, _ in self._aliases for part in _strided(one)}
        kept = (part.untyped_storage() for _, alias in self._aliases for part in _strided(alias))
        return sum({one._cdata: one.nbytes() for one in kept if one._cdata not in now}.values())

    def bytes_by_kind(self) -> dict[str, float]:
        """Bytes of all tensors but dense gradients; infinite for a graph that gradients keep."""
        found: dict[str, float] = defaultdict(float)
        gradients = {id(p.grad) for p in self.parameters()}
        for one in self._every_tensor():
            if id(one) not in gradients:
                found["tensors in attributes, lists or closures"] += part_bytes(one)
            elif one.grad_fn is not None:
                found["gradients that keep their graph, by create_graph=True"] = math.inf
            elif one.layout in SPARSE:
                found["sparse gradients"] += part_bytes(one)
        return found

    def _saved(self) -> list[tuple[Any, Any]]:
        """All containers of modules, optimizers and schedulers, each with a shallow copy."""
        # Parameters may have attributes, such as gradients of each sample.
        return _copies_of([*self.parts(), *self.parameters(), *self.optimizers, *self._schedulers])

    def _sharding(self) -> list[Any]:
        """FSDP2's own objects, outside the modules; the first forward makes a part of them."""
        parts: list[Any] = [part for part in self.parts() if hasattr(part, "_get_fsdp_state")]
        states = [part._get_fsdp_state() for part in parts]
        groups = [group for part in parts for group in fsdp_groups(part)]
        sharded = [one for group in groups for one in group.fsdp_params]
        return [*states, *(one._state_ctx for one in states), *groups, *sharded]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter.

        Raises:
            CostError: there are no parameters.
        """
        for parameter in self.parameters():
            return parameter.device
        raise CostError(
            "the step refers to no module and no optimizer in its closure, its globals, its "
            "object, or what these contain; let it refer to them, as in def step(batch): "
            "loss_of(model, batch).backward(); optimizer.step(); …"
        )

    @contextmanager
    def restored_after_traces(self) -> Iterator[None]:
        """Restore everything that traced steps bind anew, Python's numbers included.

        The values of tensors are not saved: a trace computes on fake tensors.
        """
        with self._rebound(lambda *_: False):
            yield

    @contextmanager
    def restored_after_runs(self) -> Iterator[None]:
        """Restore everything that real steps bind anew, and the values of tensors, bit for bit.

        Python's numbers and texts stay as the steps leave them: a step counts with them.

        Raises:
            CostError: the temporary folder has no room for the values; nothing ran.
        """
        with copied([one.detach() for one in self._every_tensor()]) as put_back:
            try:
                with self._rebound(_are_counters):
                    yield
            finally:
                put_back()

    def _every_tensor(self) -> list[torch.Tensor]:
        return [*{id(one): one for one in [*self.tensors(), *self._loose_tensors]}.values()]

    @contextmanager
    def _rebound(self, stays: Callable[..., bool]) -> Iterator[None]:
        """Bind containers, names, attributes, tensors, gradients and generators as they were.

        Args:
            stays: whether values that differ, the new one and the old one, are left as they are.
        """
        tensors = self._every_tensor()
        flags = [(one, one.requires_grad) for one in tensors if one.is_leaf]
        gradients = [(one, one.grad) for one, _ in flags]
        # Detached, a tensor keeps its storage and its shape, whatever the step assigns to `.data`.
        self._aliases = [(one, one.detach()) for one in tensors]
        self._scheduler_items = _copies_of(self._schedulers)
        always = [*self._saved(), *_copies_of(self._sharding())]
        internal = [(one, copy.copy(one)) for one in self._internal]
        users = [(one, copy.copy(one)) for one in self._containers]
        names = [(one, one.value) for function in self._functions for one in _names_of(function)]
        arrays = [(one, one.copy()) for one in self._arrays]
        slots = [(one, _slots_of(one)) for one in self._slotted]
        with _measuring(), ExitStack() as stack:
            stack.enter_context(_autocast_cache_kept())
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            stack.callback(RandomState.take().restore)
            for generator in self._generators:
                stack.callback(_restoring(generator))
            for accumulator in self.accumulators:
                stack.enter_context(accumulator.measured(steps=True))
            owners: set[Any] = {nn.Module, *map(type, self.optimizers)}
            for owner in owners if self.accumulates else ():
                stack.enter_context(patch.object(owner, "zero_grad", _in_place(owner.zero_grad)))
            try:
                yield
            finally:
                for container, items in always:
                    _refill(container, items)
                for container, items in internal:
                    if _tensors_in(container) != _tensors_in(items):
                        _refill(container, items)
                for container, items in users:
                    if _kept(container, stays) != _kept(items, stays):
                        _refill(container, items)
                for name, value in names:
                    if name.value is not value and not stays(name.value, value):
                        name.value = value
                for array, values in arrays:
                    array[...] = values
                for one, attributes in slots:
                    for key, value in attributes.items():
                        now = getattr(one, key, None)
                        if now is not value and not stays(now, value):
                            object.__setattr__(one, key, value)
                for tensor, alias in self._aliases:
                    if _place_of(tensor) != _place_of(alias):
                        tensor.data = alias
                for tensor, needs_gradient in flags:
                    tensor.requires_grad_(needs_gradient)
                for leaf, gradient in gradients:
                    leaf.grad = gradient
                self._aliases = []


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of all its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def modes_of(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Return a function that puts the parts of modules back into the modes that they are in."""
    modes = {part: part.training for module in modules for part in module.modules()}

    def put_back() -> None:
        for part, training in modes.items():
            if part.training != training:
                part.train(training)
        for part, training in modes.items():
            part.training = training  # of a part of several modules, which the last one has changed

    return put_back


@contextmanager
def _measuring() -> Iterator[None]:
    global _measurements  # noqa: PLW0603  (a hook of the backward may ask in another thread)
    _measurements += 1
    try:
        yield
    finally:
        _measurements -= 1


def _in_place(zero_grad: Callable[..., None]) -> Callable[..., None]:
    """A method that sets dense gradients to 0 where another one sets them to `None`."""

    @functools.wraps(zero_grad)
    def kept(owner: Any, *args: Any, **options: Any) -> None:
        is_module = isinstance(owner, nn.Module)
        parameters = owner.parameters() if is_module else parameters_of(owner)
        before = [(one, one.grad) for one in parameters if one.grad is not None]
        zero_grad(owner, *args, **options)
        for one, gradient in before:
            is_plain = gradient.grad_fn is None and gradient.layout not in SPARSE
            if one.grad is None and is_plain:
                one.grad = gradient.zero_()

    return kept


def _place_of(tensor: torch.Tensor) -> list[Any]:
    """The storages of a tensor's elements, and how these are arranged."""
    parts = _strided(tensor)
    arranged = [(one.dtype, one.shape, one.stride(), one.storage_offset()) for one in parts]
    return [*arranged, *(one.untyped_storage()._cdata for one in parts)]


def _strided(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a tensor that have a storage."""
    return [part for part in plain_parts(tensor) if part.layout is torch.strided]


def _accumulates(one: object) -> TypeGuard[AccumulatesGradients]:
    # Of the type: an object that is found in a step may answer to any name in its __getattr__.
    return issubclass(type(one), AccumulatesGradients)


def is_compiled(one: object) -> bool:
    """Whether `torch.compile` has made it, or `Module.compile` was called on it."""
    if isinstance(one, types.FunctionType):
        return "_torchdynamo_orig_callable" in vars(one)
    return isinstance(one, nn.Module) and any(
        "_orig_mod" in part._modules or part._compiled_call_impl is not None
        for part in one.modules()
    )


def _own_containers(owner: object) -> list[Any]:
    attributes = getattr(owner, "__dict__", {})
    return [attributes, *(one for one in attributes.values() if isinstance(one, _CONTAINERS))]


def _copies_of(owners: Sequence[object]) -> list[tuple[Any, Any]]:
    return [saved for one in owners for saved in _nested_copies(vars(one))]


def _nested_copies(container: Any, nested: int = 0) -> Iterator[tuple[Any, Any]]:
    """A container, and the containers in it, each with a shallow copy."""
    yield container, copy.copy(container)
    for value in _values_of(container) if nested < _NESTED else ():
        if isinstance(value, _CONTAINERS):
            yield from _nested_copies(value, nested + 1)


def _tensors_in(container: Any) -> list[int]:
    return [id(one) for one in _values_of(container) if isinstance(one, torch.Tensor)]


def _are_counters(*values: object) -> bool:
    """Whether values are numbers or text, with which a step counts."""
    return all(isinstance(one, (int, float, complex, str, bytes, types.NoneType)) for one in values)


def _kept(container: Any, stays: Callable[..., bool]) -> list[Any]:
    """The keys and the identities of a container's values, but of those that stay as they are."""
    is_dict = isinstance(container, dict)
    pairs = container.items() if is_dict else ((None, value) for value in container)
    return [
        (key if _are_counters(key) else id(key), id(value))
        for key, value in pairs
        if not stays(value)
    ]


def _refill(container: Any, items: Any) -> None:
    """Restore the items of a container in place, since others may refer to it."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(items)
    else:
        container.update(items)


def _restoring(generator: Any) -> Callable[[], object]:
    """A function that sets the generator to the state that it has now."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(generator.set_state, generator.get_state())


def autocast_is_active() -> bool:
    """Whether an autocast context is open, so that its cache outlives the step."""
    outer = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return outer > 0


@contextmanager
def _autocast_cache_kept() -> Iterator[None]:
    """Leave the casts that an open autocast has cached as they are, and add none."""
    if not autocast_is_active():
        yield
        return
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        # Contexts that were made before would enable it.
        with patch.object(torch, "set_autocast_cache_enabled", lambda _: None):
            yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def copied(tensors: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """Copy the values of tensors to a temporary file, in the folder that `TMPDIR` chooses.

    Writing and reading take the memory of one tensor at a time. Of sharded tensors, the local part
    is copied.

    Args:
        tensors: detached; may be expanded.

    Yields:
        A function that copies the values back into the tensors.

    Raises:
        CostError: the folder has less room than they take; nothing was written.
    """
    # A sparse tensor is copied as a whole, since in-place operations replace its parts.
    every = ([one] if one.layout in SPARSE else plain_parts(one) for one in tensors)
    tensors = [part for parts in every for part in parts if part.numel()]  # empty: without bytes
    odd = [(one, one.clone()) for one in tensors if not _is_plain(one)]
    tensors = [_unexpanded(tensor) for tensor in tensors if _is_plain(tensor)]
    _check_room(sum(tensor.nbytes for tensor in tensors))
    with tempfile.TemporaryFile() as file:
        for tensor in tensors:
            values = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            for part in values.view(torch.uint8).split(_WRITTEN_BYTES):
                # NumPy makes a storage whose size cannot be changed any more: not the user's.
                part.clone().numpy().tofile(file)

        @torch.no_grad()
        def put_back() -> None:
            file.seek(0)
            for tensor in tensors:
                read = torch.from_numpy(np.fromfile(file, np.uint8, tensor.nbytes))
                tensor.copy_(read.view(tensor.dtype).view(tensor.shape))
            for tensor, values in odd:
                tensor.copy_(values)

        yield put_back


def _check_room(num_bytes: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CostError(
            "while the step runs, the values of model and optimizer are saved in a file: "
            f"{format_bytes(num_bytes)}, but {folder} has only {format_bytes(free)} free; set "
            "TMPDIR to a folder with more, or pass method='trace'"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """A view of each element once, which can be written to."""
    for axis in reversed(range(tensor.dim())):
        if not tensor.stride(axis) and tensor.shape[axis] > 1:
            tensor = tensor.select(axis, 0)
    return tensor
