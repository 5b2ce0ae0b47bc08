"""Tensors made of tensors: DTensors, of which this rank has a part, wrappers, sparse tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


# Layouts of tensors that consist of indices and values, and the methods that return these.
SPARSE: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


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


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that have the memory of a tensor, on this rank; of a plain tensor, itself.

    They are those that a wrapper names in `__tensor_flatten__`, as DTensors, jagged and quantized
    tensors do, and the indices and values of a sparse tensor.
    """
    one: Any = tensor
    if tensor.layout in SPARSE:
        parts = [getattr(one, name)() for name in SPARSE[tensor.layout]]
    elif is_traceable_wrapper_subclass(one):
        parts = [getattr(one, name) for name in one.__tensor_flatten__()[0]]
    else:
        return [tensor]
    return [plain for part in parts for plain in plain_parts(part)]


def part_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements on this rank."""
    return sum(part.nbytes for part in plain_parts(tensor))


def mesh_ranks(tensor: Tensor) -> set[int]:
    """The ranks that a DTensor is spread over; none of a plain tensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist()) if is_dtensor(tensor) else set()
