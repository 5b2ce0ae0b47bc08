"""Collectives over the ranks that share a step, and the modules that reduce gradients over them."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchbudget.distributed import is_distributed
from torchbudget.errors import OptionError

# Gradients are copied into flat buffers of this size, with one collective each: few collectives,
# while a copy of all gradients at once is never needed.
_BUCKET_BYTES: Final = 64 * 2**20


class Ranks:
    """The ranks that share a step; a single one where `torch.distributed` is not initialized.

    Args:
        group: of processes. Default: that of all, where `torch.distributed` is initialized.

    Attributes:
        group: as given.
        rank: the number of this rank.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._number = dist.get_world_size(group) if is_distributed() else 1
        self.rank = dist.get_rank(group) if is_distributed() else 0

    def __len__(self) -> int:
        return self._number

    def device(self, near: torch.device) -> torch.device:
        """The device that numbers must be on to be summed: the CPU, but with NCCL the GPU.

        Args:
            near: the device of the parameters.
        """
        if self._number > 1 and "gloo" not in dist.get_backend(self.group):
            return near
        return torch.device("cpu")

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, written into `numbers` on each; one collective."""
        if self._number > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace each parameter's gradient by its sum over all ranks.

        A gradient that is missing on this rank counts as 0. O(gradients) time, a buffer of 64 MiB,
        and one collective for each buffer. Every rank must pass the same parameters.
        """
        if self._number == 1:
            return
        by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_type[parameter.device, parameter.grad.dtype].append(parameter.grad)
        for gradients in by_type.values():
            for bucket in _buckets(gradients):
                self._sum(bucket)

    def gather_objects(self, mine: Any) -> list[Any]:
        """The object of each rank, on every rank; one collective of pickled objects."""
        objects = [mine] * self._number
        if self._number > 1:
            dist.all_gather_object(objects, mine, group=self.group)
        return objects

    def gather_rows(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
        """Concatenate the tensors of all ranks, whose numbers of rows may differ.

        Returns:
            The tensors of all ranks, in the order of the ranks; and for each, at which row the one
            of this rank starts.
        """
        if self._number == 1:
            return list(tensors), [0] * len(tensors)
        mine = torch.tensor([len(t) for t in tensors], device=self.device(tensors[0].device))
        rows_of_rank = [torch.empty_like(mine) for _ in range(self._number)]
        dist.all_gather(rows_of_rank, mine, group=self.group)
        whole, starts = [], []
        for tensor, rows in zip(tensors, torch.stack(rows_of_rank, 1).tolist(), strict=True):
            # all_gather needs equal shapes: each rank pads to the most rows of any.
            padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
            padded[: len(tensor)] = tensor
            parts = [torch.empty_like(padded) for _ in rows]
            dist.all_gather(parts, padded, group=self.group)
            whole.append(torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)]))
            starts.append(sum(rows[: self.rank]))
        return whole, starts

    def _sum(self, bucket: list[Tensor]) -> None:
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], group=self.group)
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=self.group)
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [p.view_as(g) for p, g in zip(parts, bucket, strict=True)])


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


class DistributedModules:
    """The distributed modules among those that are trained.

    `DistributedDataParallel` never reduces gradients: the accumulator sums them itself, so that
    ranks may have unequal numbers of micro-batches. FSDP2 keeps only shards of the gradients, so it
    must reduce them itself, in the step's last backward.

    Args:
        modules: that are trained.

    Attributes:
        modules: all whose forward must be inside `accumulating`.
        sharded: whether FSDP2 shards any module.

    Raises:
        OptionError: one is the older FSDP, which divides gradients before the weight over all ranks
            is known; or FSDP2 shards only a part of a module.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        inner = [part for module in modules for part in module.modules()]
        # Not imported here, which would read the environment: no such module exists without it.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in inner):
            raise OptionError(
                "FullyShardedDataParallel is not supported; torch.distributed.fsdp.fully_shard is"
            )
        self._replicated = [p for p in inner if isinstance(p, DistributedDataParallel)]
        # Flags that are set on a root apply to all modules inside it.
        self._roots = [one for one in modules if fsdp and isinstance(one, fsdp.FSDPModule)]
        self.modules: list[nn.Module] = [*self._replicated, *self._roots]
        self.sharded = bool(fsdp) and any(isinstance(part, fsdp.FSDPModule) for part in inner)
        if self.sharded and len(self._roots) < len(modules):
            raise OptionError("fully_shard must be applied to every module as a whole, too")

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """No gradients are reduced inside, except by FSDP2 where it is the step's last backward."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
        with ExitStack() as stack:
            for module in self._replicated:
                stack.enter_context(module.no_sync())
                # Otherwise the first forward after a step broadcasts buffers, a collective, for
                # which a rank without micro-batches would never come: see `broadcast_buffers`.
                module.require_forward_param_sync = False
            yield

    def broadcast_buffers(self) -> None:
        """Copy DDP's buffers from rank 0 to every rank, as each forward of DDP does otherwise."""
        for module in self._replicated:
            if module.broadcast_buffers:
                for buffer in module.buffers():
                    dist.broadcast(buffer, group_src=0, group=module.process_group)
