"""Tensors of which this rank has a part: DTensors, as tensor parallelism and FSDP2 make them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a `torch.distributed.tensor.DTensor`."""
    # Not imported here, which takes time and reads the environment: none exists without it.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
        return part


def mesh_ranks(tensor: Tensor) -> set[int]:
    """The ranks that a DTensor is spread over; none of a plain tensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist()) if is_dtensor(tensor) else set()
