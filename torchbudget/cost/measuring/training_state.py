"""What a training step changes: found in what the step refers to, saved and restored."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import zip_longest
from typing import Any, Final, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchbudget.cost.measuring.autocast import autocast_cache_kept
from torchbudget.cost.measuring.copies import copied
from torchbudget.cost.measuring.reachable import (
    CONTAINERS,
    GENERATORS,
    HELPERS,
    is_of_torch,
    names_of,
    reachable,
    values_of,
    values_of_slots,
)
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.random_state import RandomState
from torchbudget.warn import warn

# Devices whose memory is measured; on the meta device, a step can be traced.
_MEASURED: Final = ("cpu", "cuda", "meta")
# How deep containers inside an object's own are restored, such as an optimizer's state.
_NESTED: Final = 4
# What a user's object counts or averages with: it has no state of its own, or is restored anyway.
_VALUES: Final = (
    *(int, float, complex, str, bytes, type(None)),
    *(np.generic, np.ndarray, torch.Tensor),
)
# A larger array is data, and not what a step sums up.
_ARRAY_BYTES: Final = 2**20


@runtime_checkable
class AccumulatesGradients(Protocol):
    """Takes an optimizer step only every so many micro-batches, as `GradAccumulator` does."""

    def single_steps(self) -> AbstractContextManager[None]:
        """Make each micro-batch inside a step of its own, and forget all of them at the end."""


class TrainingState:
    """The modules, optimizers, schedulers, scalers and generators that a step refers to.

    They are searched in the step's closure, in the globals that it names, in its arguments if it
    is a `functools.partial`, in its object if it is a method, and in what these refer to.

    Attributes:
        modules: the outermost ones.
        optimizers: all of them.
        helpers: learning rate schedulers and gradient scalers.
        generators: of random numbers, beside the global ones.
        loose: tensors.
        containers: of anything, the attributes of plain objects among them.
        is_compiled: whether a module or a function is called through `torch.compile`.
        accumulators: of gradients, which must make single steps while the step is measured.
        forward_only: whether the step that was checked last made no gradients.
        stepped: ids of the parameters that an optimizer has stepped in any step that was checked.
    """

    def __init__(self, step: Callable[..., object]) -> None:
        found = list(reachable(step))
        modules = [one for one in found if isinstance(one, nn.Module)]
        inner = {id(part) for one in modules for part in one.modules() if part is not one}
        self.modules = [one for one in modules if id(one) not in inner]
        self.optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer)]
        self.helpers = [one for one in found if isinstance(one, HELPERS)]
        self.accumulators = [one for one in found if _accumulates(one)]
        self.is_compiled = any(map(_is_compiled, found))
        self.forward_only = False
        self.stepped: set[int] = set()
        self.loose = [one for one in found if isinstance(one, torch.Tensor)]
        self.containers = [one for one in found if isinstance(one, CONTAINERS)]
        # Those that torch, or an accumulator, keeps its own books in.
        of_libraries = [one for one in found if is_of_torch(one) or _accumulates(one)]
        self._libraries = {id(one) for owner in of_libraries for one in _own_containers(owner)}
        # What a step counts with is put back unless that might contradict what else it keeps.
        arrays = [one for one in found if isinstance(one, np.ndarray) and one.flags.writeable]
        self._arrays = [one for one in arrays if one.nbytes <= _ARRAY_BYTES]
        self._slotted = [one for one in found if not is_of_torch(one) and values_of_slots(one)]
        self._has_iterators = any(issubclass(type(one), Iterator) for one in found)
        self.generators = [one for one in found if isinstance(one, GENERATORS)]
        self.functions = [one for one in found if isinstance(one, types.FunctionType)]

    def parameters(self) -> list[torch.Tensor]:
        """Parameters of the modules and of the optimizers, each once."""
        found: list[torch.Tensor] = [p for one in self.modules for p in one.parameters()]
        found += [p for optimizer in self.optimizers for p in _parameters(optimizer)]
        return list({id(tensor): tensor for tensor in found}.values())

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, gradients, and all in the attributes of what was found, each once."""
        found = self.parameters()
        found += [p.grad for p in found if p.grad is not None]
        values = (value for container, _ in self._saved() for value in values_of(container))
        found += [value for value in values if isinstance(value, torch.Tensor)]
        return list({id(tensor): tensor for tensor in found}.values())

    def _saved(self) -> list[tuple[Any, Any]]:
        """All containers of modules, optimizers and helpers, each with a shallow copy."""
        parts = [part for module in self.modules for part in module.modules()]
        owners = [*parts, *self.optimizers, *self.helpers]
        return [saved for one in owners for saved in _containers(vars(one))]

    @property
    def device(self) -> torch.device:
        """The device that the parameters are on, the first one's.

        Raises:
            CostError: there are none.
        """
        for parameter in self.parameters():
            return parameter.device
        raise CostError(
            "the step refers to no module and no optimizer: they are searched in its closure, "
            "its globals and its object, and in what these refer to; let it refer to them, as in "
            "def step(batch): loss_of(model, batch).backward(); optimizer.step(); …"
        )

    def check_parameters(self, *, contents: bool) -> None:
        """Check that the parameters can be measured.

        Args:
            contents: whether their values will be saved, too.

        Raises:
            CostError: one is uninitialized, without values, or on another device than the first;
                or that is neither a CPU nor a CUDA device.
        """
        device = self.device
        if device.type not in _MEASURED:
            raise CostError(
                f"the step's parameters are on {device}: only the memory of CPUs and CUDA devices "
                "can be measured; state the cost, as PaddedCost, or measure it on one of those"
            )
        for where, one in self._named():
            if is_lazy(one):
                raise CostError(f"{where} is uninitialized: call the module on a batch first")
            if one.is_meta and contents:
                raise CostError(
                    f"{where} is on the meta device, without values to run the step with; pass "
                    "method='trace', or load the values first"
                )
            # A small buffer on the CPU takes nothing of another device.
            elsewhere = isinstance(one, nn.Parameter) or one.device.type not in ("cpu", "meta")
            if elsewhere and one.device != device:
                raise CostError(_two_devices(where, one.device, device))
        for parameter in self.parameters():  # those that only an optimizer has, too
            if parameter.device != device:
                where = self.name_of(parameter)
                raise CostError(_two_devices(where, parameter.device, device))

    def name_of(self, tensor: torch.Tensor) -> str:
        """Which parameter or buffer of which module it is."""
        return next((name for name, one in self._named() if one is tensor), "a tensor of the step")

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module in self.modules:
            for name, one in [*module.named_parameters(), *module.named_buffers()]:
                yield f"{name} of {type(module).__name__}", one

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Check that what runs inside is a full training step, or forward only.

        Afterwards `forward_only` says whether it was: no gradient of a parameter was computed, and
        no optimizer stepped. Gradients of `torch.func` are not seen.

        Raises:
            CostError: the step is a part of a training step: gradients were made, but none is left
                and no optimizer stepped; or an optimizer stepped that the step does not name.

        Warns:
            MeasureWarning: no optimizer stepped; or the step is forward only, of a module in
                training mode.
        """
        before = [parameter.grad is not None for parameter in self.parameters()]
        stepped: list[bool] = []

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not any(optimizer is one for one in self.optimizers):
                raise CostError(
                    f"the step steps an optimizer that it does not refer to, {type(optimizer)}, so "
                    "that it could not be restored; let the step's function name it"
                )
            with_gradients = [id(p) for p in _parameters(optimizer) if p.grad is not None]
            self.stepped.update(with_gradients)
            stepped.append(bool(with_gradients))

        handle = register_optimizer_step_pre_hook(note)
        try:
            with _gradients_made(self.parameters()) as made:
                yield
        finally:
            handle.remove()
        if any(stepped):
            self.forward_only = False
            return
        left = [parameter.grad is not None for parameter in self.parameters()]
        self.forward_only = not stepped and not made and left == before
        if self.forward_only:
            if self._is_training:
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

    @property
    def _is_training(self) -> bool:
        """Whether a module is in training mode, of those that have parameters."""
        return any(
            module.training and any(True for _ in module.parameters()) for module in self.modules
        )

    def idle_optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of which no trained parameter was stepped, by any optimizer, while others were.

        Not those that have their state from steps before: it is counted with all other tensors.
        """
        trained = [{id(p) for p in _parameters(one) if p.requires_grad} for one in self.optimizers]
        return [
            one
            for one, its in zip(self.optimizers, trained, strict=True)
            if self.stepped and its and its.isdisjoint(self.stepped) and not one.state
        ]

    def notes(self) -> list[str]:
        """What a report must say of the step that was checked last."""
        if not self.forward_only:
            return []
        mode = "; its module was in training mode" if self._is_training else ""
        note = (
            "the step was forward only: it made no gradients and no optimizer stepped, so the "
            f"cost is for evaluation, and too low to train with{mode}"
        )
        return [note]

    @contextmanager
    def restored(self, *, contents: bool) -> Iterator[None]:
        """Restore everything at the end, the random generators too.

        Args:
            contents: restore the tensors' values too, for a step that really runs. Without it only
                the references to tensors are restored, for a step that computes nothing.

        Raises:
            CostError: before anything runs, as `check_parameters` does.
        """
        self.check_parameters(contents=contents)
        written = {id(one): one for one in [*self.tensors(), *self.loose] if contents}
        gradients = [(p, p.grad) for p in self.parameters()]
        containers = self._saved()
        others = [(one, copy.copy(one)) for one in self.containers]
        arrays = [(one, one.copy()) for one in self._arrays]
        slots = list(map(values_of_slots, self._slotted))
        names = [(one, one.value) for function in self.functions for one in names_of(function)]
        with copied([*written.values()]) as put_back, ExitStack() as stack:
            stack.enter_context(autocast_cache_kept())
            stack.callback(RandomState.take().restore)
            for generator in self.generators:
                stack.callback(_restoring(generator))
            for accumulator in self.accumulators:
                stack.enter_context(accumulator.single_steps())
            try:
                yield
            finally:
                bound = [([name.value], [value]) for name, value in names]
                users = [saved for saved in others if id(saved[0]) not in self._libraries]
                is_changed = _has_other_tensors
                # Attributes in slots are not put back, and so nothing that may count with them.
                moved = self._has_iterators or any(
                    map(_differ, map(values_of_slots, self._slotted), slots)
                )
                if not moved and _are_values([*users, *bound]):
                    is_changed = _differ
                    for array, values in arrays:
                        array[...] = values
                containers += [saved for saved in users if is_changed(*saved)]
                containers += [saved for saved in others if _has_other_tensors(*saved)]
                for container, items in containers:
                    _refill(container, items)
                for (name, value), both in zip(names, bound, strict=True):
                    if is_changed(*both):
                        name.value = value
                for parameter, gradient in gradients:
                    parameter.grad = gradient
                put_back()


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _two_devices(where: str, device: torch.device, first: torch.device) -> str:
    return (
        f"{where} is on {device}, but the first parameter is on {first}: only the bytes of one "
        "device are measured; move all parameters to it"
    )


@contextmanager
def _gradients_made(parameters: Sequence[torch.Tensor]) -> Iterator[list[bool]]:
    """A list that is filled where a gradient of any parameter is computed inside.

    Also where it is not accumulated, as by `torch.autograd.grad`, or cleared again.
    """
    made: list[bool] = []
    hooked = [(p, p._backward_hooks) for p in parameters if p.requires_grad]
    handles = [p.register_hook(lambda _: made.append(True)) for p, _ in hooked]
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()
        for parameter, hooks in hooked:
            if hooks is None:
                parameter._backward_hooks = None  # as before, no empty dictionary


def _own_containers(owner: object) -> list[Any]:
    """The attributes of an object, and the containers among them."""
    attributes = getattr(owner, "__dict__", None)
    if attributes is None:
        return []
    return [attributes, *(one for one in attributes.values() if isinstance(one, CONTAINERS))]


def _accumulates(one: object) -> TypeGuard[AccumulatesGradients]:
    # Of the type: an object that is found in a step may answer to any name in its __getattr__.
    return issubclass(type(one), AccumulatesGradients)


def _is_compiled(one: object) -> bool:
    """Whether `torch.compile` has made it, or `Module.compile` was called on it."""
    if isinstance(one, types.FunctionType):
        return "_torchdynamo_orig_callable" in vars(one)
    return isinstance(one, nn.Module) and any(
        "_orig_mod" in part._modules or part._compiled_call_impl is not None
        for part in one.modules()
    )


def _containers(container: Any, nested: int = 0) -> Iterator[tuple[Any, Any]]:
    """A container, and the containers in it, each with a shallow copy."""
    yield container, copy.copy(container)
    if nested == _NESTED:
        return
    for value in values_of(container):
        if isinstance(value, CONTAINERS):
            yield from _containers(value, nested + 1)


def _are_values(saved: Sequence[tuple[Any, Any]]) -> bool:
    """Whether only numbers, texts, tensors and arrays came to a user's containers, or went."""
    return all(
        isinstance(one, _VALUES)
        for container, items in saved
        for one in _differences(container, items)
    )


def _differ(container: Any, items: Any) -> bool:
    return any(True for _ in _differences(container, items))


def _differences(container: Any, items: Any) -> Iterator[Any]:
    """The values that came to a container, that went, or that were replaced."""
    if isinstance(container, set):
        yield from container ^ items
        return
    if isinstance(container, dict):
        keys = container.keys() | items.keys()
        same = container.keys() == items.keys()
        pairs: Any = ((container.get(key), items.get(key)) for key in keys)
    else:
        same = len(container) == len(items)
        pairs = zip_longest(container, items)
    if not same:
        yield None  # which may be what came or went
    for now, before in pairs:
        if now is not before:
            yield now
            yield before


def _has_other_tensors(container: Any, items: Any) -> bool:
    now, before = (
        [id(one) for one in values_of(some) if isinstance(one, torch.Tensor)]
        for some in (container, items)
    )
    return now != before


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
