"""The memory of a model and its optimizer, module by module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from torchbudget.display import aligned
from torchbudget.distributed import local_part, plain_parts
from torchbudget.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMemory:
    """The memory of one module's own parameters and buffers, without the modules inside it.

    Bytes are those of this rank, even if other ranks have parts of the tensors, as under FSDP2.

    Attributes:
        name: name of the module; empty for the outermost.
        kind: class of the module.
        parameters: number of elements of its parameters, on all ranks.
        learnable: number of these elements that require a gradient.
        weight_bytes: bytes of parameters and buffers.
        gradient_bytes: bytes of the gradients of learnable parameters, allocated or not.
        optimizer_bytes: bytes of the optimizer's state as it is now: 0 before the first step.
    """

    name: str
    kind: str
    parameters: int
    learnable: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """The memory of all modules; `print` shows it as a table.

    Attributes:
        modules: the modules that have parameters or buffers of their own, in the order of the
            model.
        total: the sum over all modules. Memory that tensors share is counted once, at the first.
    """

    modules: tuple[ModuleMemory, ...]
    total: ModuleMemory

    def __str__(self) -> str:
        rows = [("module", "kind", "parameters", "learnable", "weights", "gradients", "optimizer")]
        rows += [
            (
                one.name,
                one.kind,
                f"{one.parameters:,}",
                f"{one.learnable:,}",
                format_bytes(one.weight_bytes),
                format_bytes(one.gradient_bytes),
                format_bytes(one.optimizer_bytes),
            )
            for one in (*self.modules, self.total)
        ]
        return "\n".join(aligned(rows, right=2))


def memory_summary(model: nn.Module, optimizer: Optimizer | None = None) -> MemorySummary:
    """Compute the bytes of each module's parameters, gradients and optimizer state; O(tensors).

    >>> model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5).requires_grad_(False))
    >>> memory_summary(model).total.learnable
    220
    """
    seen: set[int] = set()  # ids of parameters and buffers
    counted: set[int] = set()  # storages
    modules = []
    for name, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        buffers = [b for b in module.buffers(recurse=False) if id(b) not in seen]
        seen |= {id(tensor) for tensor in (*own, *buffers)}
        if not own and not buffers:
            continue
        learnable = [p for p in own if p.requires_grad]
        state = [] if optimizer is None else [optimizer.state.get(p, {}) for p in own]
        modules.append(
            ModuleMemory(
                name=name,
                kind=type(module).__name__,
                parameters=sum(p.numel() for p in own),
                learnable=sum(p.numel() for p in learnable),
                weight_bytes=_new_bytes([*own, *buffers], counted),
                gradient_bytes=sum(local_part(p).nbytes for p in learnable),
                optimizer_bytes=_new_bytes(tree_leaves([dict(one) for one in state]), counted),
            )
        )
    numbers = [field.name for field in fields(ModuleMemory) if field.name not in ("name", "kind")]
    total = {number: sum(getattr(one, number) for one in modules) for number in numbers}
    return MemorySummary(
        modules=tuple(modules), total=ModuleMemory(name="total", kind=type(model).__name__, **total)
    )


def _new_bytes(tensors: Iterable[object], counted: set[int]) -> int:
    """Bytes of the storages that were not counted yet: an expanded tensor has few, a view none."""
    total = 0
    for part in (part for one in tensors if isinstance(one, Tensor) for part in plain_parts(one)):
        if part.layout is not torch.strided:  # without a storage of its own
            total += part.nbytes
            continue
        storage = part.untyped_storage()
        if storage._cdata not in counted:
            counted.add(storage._cdata)
            total += storage.nbytes()
    return total
