"""Tensors of which this rank has a part: DTensors, as tensor parallelism and FSDP2 make them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a `torch.distributed.tensor.DTensor`."""
    # Not imported here, which takes time and reads the environment: none exists without it.
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in the same memory: the tensor itself where it is plain."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()  # type: ignore[attr-defined]  # of a DTensor
        return part


def mesh_ranks(tensor: Tensor) -> set[int]:
    """The ranks that a DTensor is spread over; none of a plain tensor."""
    return set(tensor.device_mesh.mesh.flatten().tolist()) if is_dtensor(tensor) else set()  # type: ignore[attr-defined]  # of a DTensor


def placed_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the placements of its parameter: parts of other ranks' sums add up then.

    A collective of the parameter's mesh where they differ, as for the gradient of a replicated
    weight that each rank has a summand of.
    """
    if not is_dtensor(gradient) or gradient.placements == parameter.placements:  # type: ignore[attr-defined]  # of a DTensor
        return gradient
    placed: Tensor = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]  # of a DTensor
    return placed


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of plain gradients and DTensors together, whole on every rank, not read."""
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None  # type: ignore[attr-defined]  # of a DTensor
        kinds.setdefault(mesh, []).append(gradient)
    norms = [_whole(nn.utils.get_total_norm(kind)) for kind in kinds.values()]
    if len(norms) == 1:
        return norms[0]
    together: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms])
    whole: Tensor = torch.linalg.vector_norm(together)
    return whole


def _whole(norm: Tensor) -> Tensor:
    # The local part of a norm that is a DTensor is that of this rank's shards alone.
    whole: Tensor = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]  # of a DTensor
    return whole
