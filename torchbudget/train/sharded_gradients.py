"""Gradients of which this rank has a part: how they are placed, and the norm of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchbudget.dtensors import is_dtensor


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


def total_norm(gradients: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of plain gradients and DTensors together, whole on every rank, not read."""
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None
        kinds.setdefault(mesh, []).append(gradient)
    norms = [_whole(nn.utils.get_total_norm(kind, order)) for kind in kinds.values()]
    if len(norms) == 1:
        return norms[0]
    together: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms])
    whole: Tensor = torch.linalg.vector_norm(together, order)
    return whole


def _whole(norm: Tensor) -> Tensor:
    # The local part of a norm that is a DTensor is that of this rank's shards alone.
    whole: Tensor = norm.full_tensor() if is_dtensor(norm) else norm
    return whole
