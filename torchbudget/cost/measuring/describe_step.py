"""What a cost of a training step depends on, beside the shapes of its batches."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from torchbudget.machine.device import device_memory
from torchbudget.restoring import TrainingState


def describe_step(step: Callable[[Any], object]) -> dict[str, str]:
    """What a cost of this step depends on, beside the shapes: model, dtype, device, torch.

    Of the model also what parameters do not show and memory does: whether modules are marked to
    compute their activations again in backward, as transformers and torch's `CheckpointWrapper`
    mark them, and the attention that a model of transformers runs. Checkpoints that a model's own
    `forward` makes are not seen.

    On CUDA also the allocator's settings in force, since segments of fixed sizes reserve more than
    expandable ones do.

    >>> model = torch.nn.Linear(2, 3)
    >>> describe_step(lambda batch: model(batch))["model"]
    'Linear, 9 parameters, 2bfe5e49'
    """
    state = TrainingState(step)
    parameters = state.parameters()
    shapes = repr([(tuple(p.shape), p.requires_grad) for p in parameters])
    digest = hashlib.blake2b(shapes.encode(), digest_size=4).hexdigest()
    names = ", ".join(type(module).__name__ for module in state.modules) or "no module"
    every = {id(one): one for module in state.modules for one in module.modules()}.values()
    return {
        "model": f"{names}, {sum(p.numel() for p in parameters):,} parameters, {digest}",
        "checkpointing": _checkpointing(every),
        "attention": _attention(every),
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in state.optimizers),
        "dtype": ", ".join(sorted({str(p.dtype) for p in parameters})),
        **_describe_device(state.device),
        "torch": torch.__version__,
    }


def _checkpointing(modules: Iterable[nn.Module]) -> str:
    """How many modules are marked to compute their activations again."""
    marked = sum(
        getattr(module, "gradient_checkpointing", False) is True
        or type(module).__name__ == "CheckpointWrapper"
        for module in modules
    )
    return f"of {marked} modules" if marked else "none seen"


def _attention(modules: Iterable[nn.Module]) -> str:
    """What the configurations of transformers' models say; some change it for parts of a model."""
    configs = (getattr(module, "config", None) for module in modules)
    # Configurations have no public name for what is in force.
    found = {getattr(config, "_attn_implementation", None) for config in configs}
    return ", ".join(sorted(str(name) for name in found if name)) or "not stated"


def _describe_device(device: torch.device) -> dict[str, str]:
    if device.type == "cpu":
        return {"device": f"cpu ({platform.machine()})"}
    if device.type != "cuda":
        return {"device": str(device)}  # which cannot be measured, but told from those that can
    source = device_memory(device).source
    return {"device": source.name(), "allocator": source.allocator()}
