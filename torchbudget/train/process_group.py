"""Sums over ranks: of a few numbers, and of gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from torchbudget.distributed import is_distributed

# Gradients are copied into buffers of this size, one collective each.
_BUCKET_BYTES: Final = 64 * 2**20


class Ranks:
    """The ranks that share a step; one of them where there is no process group.

    Args:
        group: of processes. Default: that of all, where `torch.distributed` is initialized.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.number = dist.get_world_size(group) if is_distributed() else 1

    def __len__(self) -> int:
        return self.number

    def device(self, near: torch.device) -> torch.device:
        """Where numbers must lie to be summed: with NCCL on the GPU, else on the CPU."""
        if self.number > 1 and "gloo" not in dist.get_backend(self.group):
            return near
        return torch.device("cpu")

    def summed(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, on every one; one collective."""
        if self.number > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each parameter's gradient by its sum over all ranks.

        Where a rank has none it counts as 0. O(gradients) time, a buffer of 64 MiB beside them,
        and one collective for each buffer.
        """
        if self.number == 1:
            return
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            alike[parameter.device, parameter.grad.dtype].append(parameter.grad)
        for gradients in alike.values():
            for bucket in _buckets(gradients):
                self._sum(bucket)

    @property
    def rank(self) -> int:
        """This one's number."""
        return dist.get_rank(self.group) if self.number > 1 else 0

    def told(self, mine: Any) -> list[Any]:
        """What each rank has to tell, on every one; one collective of pickled objects."""
        everybody = [mine] * self.number
        if self.number > 1:
            dist.all_gather_object(everybody, mine, group=self.group)
        return everybody

    def gathered(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Tensors of all ranks behind each other, which may differ along the first axis.

        Returns:
            Each joined, on every rank; and where this rank's rows start in it.
        """
        device = self.device(tensors[0].device)
        mine = torch.tensor([len(tensor) for tensor in tensors], device=device)
        numbers = [torch.empty_like(mine) for _ in range(len(self))]
        dist.all_gather(numbers, mine, group=self.group)
        rows = torch.stack(numbers).tolist()  # [rank][tensor]
        rank = dist.get_rank(self.group)
        joined = []
        for tensor, each in zip(tensors, zip(*rows, strict=True), strict=True):
            padded = tensor.new_zeros(max(each), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in each]
            dist.all_gather(parts, padded, group=self.group)
            joined.append(torch.cat([part[:n] for part, n in zip(parts, each, strict=True)]))
        return joined, [sum(each[:rank]) for each in zip(*rows, strict=True)]

    def _sum(self, bucket: list[Tensor]) -> None:
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=self.group)
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=self.group)
        parts = torch.split(flat, [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        room -= gradient.nbytes
        if room < 0 or not buckets:
            buckets.append([])
            room = _BUCKET_BYTES - gradient.nbytes
        buckets[-1].append(gradient)
    return buckets
