"""Gradients of all ranks: their sum, their norm, and the largest of them.

Tensor parallelism and FSDP2 make DTensors, of which each rank holds a part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _take_tensors

from torchbudget.distributed import Ranks, is_dtensor, local_part

# Gradients are copied into flat buffers of this size, with one collective each: few collectives,
# while a copy of all gradients at once is never needed.
_BUCKET_BYTES: Final = 64 * 2**20


class GradientSums:
    """Replaces each parameter's gradient, of a DTensor its local part, by the sum over all ranks.

    A gradient that is missing on this rank counts as 0. One that is missing on every rank stays
    missing, and the optimizer leaves its parameter alone.

    Args:
        ranks: that share the step.
        parameters: the same ones on every rank; none are summed on a single rank.
        numbers: of this rank, in float64, to be summed with them, shape `(k,)`.

    Attributes:
        present: for each parameter, whether it has a gradient on this rank.
        sparse: whether any gradient is.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[Tensor], numbers: Tensor) -> None:
        self._ranks = ranks
        self._numbers = numbers
        self._parameters = list(parameters) if len(ranks) > 1 else []
        self._flat: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        self.present = [float(parameter.grad is not None) for parameter in self._parameters]
        self.sparse = any(
            p.grad is not None and p.grad.layout is not torch.strided for p in self._parameters
        )

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the buffers of the sum; if memory runs out here, no other rank waits yet.

        O(gradients) time; the gradients that are missing, and a buffer of 64 MiB for each device
        and dtype.
        """
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = _placed_as(parameter.grad, parameter)
            elif parameter.requires_grad:
                parameter.grad = _zeros(parameter)
        for kind, tensors in self._by_kind(self._parameters).items():
            buckets = _take_tensors(tensors, _BUCKET_BYTES)
            most = max((_numel(bucket) for bucket in buckets if not _in_place(bucket)), default=0)
            self._flat[kind] = tensors[0].new_empty(most)

    @torch.no_grad()
    def sum(self, present: Sequence[float]) -> Tensor:
        """Sum the gradients and the numbers; one collective for each buffer.

        Args:
            present: for each parameter, on how many ranks it has a gradient.

        Returns:
            The numbers of all ranks, which were not read.
        """
        self.drop(present)
        kept = [p for p, ranks in zip(self._parameters, present, strict=True) if ranks]
        for parameter in kept:
            if parameter.grad is None:  # it requires one on other ranks only
                parameter.grad = _zeros(parameter)
        for kind, tensors in self._by_kind(kept).items():
            for bucket in _take_tensors(tensors, _BUCKET_BYTES):
                self._sum(bucket, self._flat.get(kind))
        return self._numbers

    def drop(self, present: Sequence[float]) -> None:
        """Drop the zeros that stand for gradients which no rank has."""
        for parameter, ranks in zip(self._parameters, present, strict=True):
            if not ranks:
                parameter.grad = None

    def _sum(self, bucket: list[Tensor], flat: Tensor | None) -> None:
        if _in_place(bucket):
            self._ranks.sum(bucket[0])
            return
        numel = _numel(bucket)
        flat = bucket[0].new_empty(numel) if flat is None or len(flat) < numel else flat[:numel]
        torch.cat([tensor.reshape(-1) for tensor in bucket], out=flat)
        self._ranks.sum(flat)
        parts = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def _by_kind(
        self, parameters: Sequence[Tensor]
    ) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
        parts = [local_part(p.grad) for p in parameters if p.grad is not None]
        kinds = defaultdict(list)
        for tensor in (*parts, self._numbers):
            kinds[tensor.device, tensor.dtype].append(tensor)
        return kinds


def _placed_as(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient with the placements of its parameter: parts of other ranks' sums add up then.

    A collective of the parameter's mesh if they differ, as for the gradient of a replicated
    weight that each rank has a summand of.
    """
    if not is_dtensor(gradient) or not is_dtensor(parameter):
        return gradient
    if gradient.placements == parameter.placements:
        return gradient
    placed: Tensor = gradient.redistribute(placements=parameter.placements)
    return placed


def _zeros(parameter: Tensor) -> Tensor:
    """A gradient of zeros; since torch 2.10 a parameter may have gradients of another dtype."""
    dtype = getattr(parameter, "grad_dtype", None)
    return torch.zeros_like(parameter, dtype=dtype or parameter.dtype)


def _numel(bucket: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in bucket)


def _in_place(bucket: Sequence[Tensor]) -> bool:
    return len(bucket) == 1 and bucket[0].is_contiguous()


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The norm of plain gradients and DTensors together, whole on every rank, not read."""
    norms = []
    for kind in _by_mesh(gradients).values():
        norm = nn.utils.get_total_norm(kind)
        # The local part of a norm that is a DTensor is that of this rank's shards alone.
        norms.append(norm.full_tensor() if is_dtensor(norm) else norm)
    if len(norms) == 1:  # its bits stay as they are
        return norms[0]
    whole: Tensor = torch.linalg.vector_norm(
        torch.stack([one.to(norms[0].device) for one in norms] or [torch.zeros(())])
    )
    return whole


def largest_share(gradients: Sequence[Tensor]) -> Tensor:
    """The largest of all gradients, as a share of the largest number that its dtype has.

    Plain gradients and DTensors count together. The share is the same on every rank, stays on the
    device, and is infinite if a gradient is not finite. A rank's part of a DTensor may be empty.
    """
    found: list[Tensor] = []
    for mesh, kind in _by_mesh(gradients).items():
        share = _largest_share([_values(local_part(gradient)) for gradient in kind])
        for group in () if mesh is None else mesh.get_all_groups():
            dist.all_reduce(share, dist.ReduceOp.MAX, group=group)
        found.append(share.to(found[0].device) if found else share)
    return torch.stack(found).max() if found else torch.zeros(())


def _by_mesh(gradients: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        mesh = gradient.device_mesh if is_dtensor(gradient) else None
        kinds.setdefault(mesh, []).append(gradient)
    return kinds


def _largest_share(parts: Sequence[Tensor]) -> Tensor:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for part in parts:
        if part.numel():  # an empty part has no largest element
            by_dtype.setdefault(part.dtype, []).append(part)
    shares = [torch.zeros((), device=parts[0].device)]
    for dtype, alike in by_dtype.items():
        norm = nn.utils.get_total_norm(alike, math.inf)
        # float16 has no number as small as the share: compute it in float32, float64 in float64.
        wide = norm if norm.dtype is torch.float64 else norm.float()
        shares.append((wide / torch.finfo(dtype).max).float().to(shares[0].device))
    share = torch.stack(shares).max()
    return torch.where(share.isfinite(), share, math.inf)  # a maximum over ranks may leave out NaN


def _values(gradient: Tensor) -> Tensor:
    """The elements that are kept of a gradient, all of one that is not sparse."""
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient
