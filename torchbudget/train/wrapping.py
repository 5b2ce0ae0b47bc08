"""What distributed modules do by themselves in forward and backward, and how to have it once."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchbudget.errors import OptionError


class Wrapping:
    """The distributed modules among those that are trained.

    `DistributedDataParallel` is kept from reducing at all, which its forward prepares and its
    backward does: the accumulator sums gradients itself, so that ranks may have unequal numbers of
    micro-batches. FSDP2 holds shards, and must reduce in the step's last backward.

    Args:
        modules: what is trained.

    Raises:
        OptionError: one is the older FSDP, whose gradients cannot be divided by a global weight
            that is known at the end only.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        inner = [part for module in modules for part in module.modules()]
        # Importing it reads the environment; nobody has such modules who has not imported it.
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        if fsdp and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in inner):
            raise OptionError(
                "FullyShardedDataParallel is not supported; torch.distributed.fsdp.fully_shard is"
            )
        self.replicated = [p for p in inner if isinstance(p, DistributedDataParallel)]
        # A root's flags reach all that is inside it.
        self._roots = [one for one in modules if fsdp and isinstance(one, fsdp.FSDPModule)]
        self.sharded = bool(fsdp) and any(isinstance(part, fsdp.FSDPModule) for part in inner)
        if self.sharded and len(self._roots) < len(modules):
            raise OptionError("fully_shard must be applied to every module as a whole, too")

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Forward and backward inside reduce nothing, but FSDP2 does where it is the last."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)
        with ExitStack() as stack:
            for module in self.replicated:
                stack.enter_context(module.no_sync())
                module.require_forward_param_sync = False  # the first forward shares buffers else
            yield

    @property
    def distributed(self) -> list[nn.Module]:
        """All whose forward must stand in `accumulating`."""
        return [*self.replicated, *self._roots]

    def share_buffers(self) -> None:
        """Give every rank the first one's buffers, as each forward of DDP does otherwise."""
        for module in self.replicated:
            if module.broadcast_buffers:
                for buffer in module.buffers():
                    dist.broadcast(buffer, group_src=0, group=module.process_group)
