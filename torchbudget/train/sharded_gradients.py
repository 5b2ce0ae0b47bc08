"""Gradients of which this rank has a part: how they are placed, and the norm of all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchbudget.dtensors import is_dtensor, local_part


def placed_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the placements of its parameter: parts of other ranks' sums add up then.

    A collective of the parameter's mesh where they differ, as for the gradient of a replicated
    weight that each rank has a summand of.
    """
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    placed: Tensor = gradient.redistribute(placements=parameter.placements)
    return placed


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of plain gradients and DTensors together, whole on every rank, not read."""
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None
        kinds.setdefault(mesh, []).append(gradient)
    norms = [_whole(nn.utils.get_total_norm(kind)) for kind in kinds.values()]
    if len(norms) == 1:
        return norms[0]
    together: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms])
    whole: Tensor = torch.linalg.vector_norm(together)
    return whole


def largest_share(gradients: Sequence[Tensor]) -> Tensor:
    """The largest of all gradients, as a share of the largest number that its dtype has.

    Of plain gradients and DTensors together, whole on every rank, and not read. It is infinite
    where any of them is not finite. What this rank has of one may be empty.
    """
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None
        kinds.setdefault(mesh, []).append(_values(local_part(gradient)))
    found: list[Tensor] = []
    for mesh, parts in kinds.items():
        share = _largest_share(parts)
        for group in () if mesh is None else mesh.get_all_groups():
            dist.all_reduce(share, dist.ReduceOp.MAX, group=group)
        found.append(share.to(found[0].device) if found else share)
    return torch.stack(found).max()


def _largest_share(parts: Sequence[Tensor]) -> Tensor:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        if part.numel():  # nothing has no largest one
            by_dtype.setdefault(part.dtype, []).append(part)
    shares = [torch.zeros((), device=parts[0].device)]
    for dtype, alike in by_dtype.items():
        norm = nn.utils.get_total_norm(alike, math.inf)
        # A share of float16 is not one of its numbers; of float64 it is divided there.
        wide = norm if norm.dtype is torch.float64 else norm.float()
        shares.append((wide / torch.finfo(dtype).max).float().to(shares[0].device))
    share = torch.stack(shares).max()
    return torch.where(share.isfinite(), share, math.inf)  # a maximum over ranks may leave out NaN


def _values(gradient: Tensor) -> Tensor:
    """Those that are kept of a gradient, all of one that is not sparse."""
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient


def _whole(norm: Tensor) -> Tensor:
    # The local part of a norm that is a DTensor is that of this rank's shards alone.
    whole: Tensor = norm.full_tensor() if is_dtensor(norm) else norm
    return whole
