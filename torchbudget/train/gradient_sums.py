"""Gradients summed over ranks: in flat buffers, and allocated before any rank waits for another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from torchbudget.dtensors import local_part
from torchbudget.train.process_group import Ranks
from torchbudget.train.sharded_gradients import placed_as

# Gradients are copied into flat buffers of this size, with one collective each: few collectives,
# while a copy of all gradients at once is never needed.
_BUCKET_BYTES: Final = 64 * 2**20


class GradientSums:
    """Replaces each parameter's gradient by its sum over all ranks; of DTensors, their local parts.

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
        self._missing = [p for p in self._parameters if p.grad is None]
        self._flat: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        missing = set(map(id, self._missing))
        self.present = [float(id(parameter) not in missing) for parameter in self._parameters]
        self.sparse = any(
            p.grad is not None and p.grad.layout is not torch.strided for p in self._parameters
        )

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate what the sum takes; where memory runs out here, no other rank waits yet.

        O(gradients) time; the gradients that are missing, and a buffer of 64 MiB for each device
        and dtype.
        """
        for parameter in self._missing:
            if parameter.requires_grad:
                parameter.grad = _zeros(parameter)
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad = placed_as(parameter.grad, parameter)
        for kind, tensors in self._by_kind(self._parameters).items():
            buckets = _buckets(tensors)
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
            for bucket in _buckets(tensors):
                self._sum(bucket, self._flat.get(kind))
        return self._numbers

    def drop(self, present: Sequence[float]) -> None:
        """Drop the zeros that stand for gradients which no rank has."""
        missing = set(map(id, self._missing))
        for parameter, ranks in zip(self._parameters, present, strict=True):
            if not ranks and id(parameter) in missing:
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


def _zeros(parameter: Tensor) -> Tensor:
    """What a gradient would be; since torch 2.10 a parameter may have those of another dtype."""
    dtype = getattr(parameter, "grad_dtype", None)
    return torch.zeros_like(parameter, dtype=dtype or parameter.dtype)


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        room -= tensor.nbytes
        if room < 0 or not buckets:
            buckets.append([])
            room = _BUCKET_BYTES - tensor.nbytes
        buckets[-1].append(tensor)
    return buckets


def _numel(bucket: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in bucket)


def _in_place(bucket: Sequence[Tensor]) -> bool:
    return len(bucket) == 1 and bucket[0].is_contiguous()
