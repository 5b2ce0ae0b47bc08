"""DDP and FSDP2 modules: gradients are reduced once a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchbudget.errors import OptionError


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
