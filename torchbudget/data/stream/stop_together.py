"""`stop_together`: ranks with unequal numbers of batches end their loops at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchbudget.distributed import is_distributed


def stop_together(loader: Any, *, group: Any = None) -> Iterator[Any]:
    """Yield the batches of a loader until any rank has none left; then all ranks stop.

    One collective of a single number per batch, in the process that trains. The remaining batches
    of other ranks are not read.

    Args:
        loader: of this rank.
        group: of processes. Default: all, if `torch.distributed` is initialized.
    """
    batches = iter(loader)
    nothing = object()
    while True:
        batch = next(batches, nothing)
        has_batch = torch.tensor(int(batch is not nothing))
        if is_distributed():
            if "nccl" in torch.distributed.get_backend(group):
                has_batch = has_batch.cuda()
            torch.distributed.all_reduce(has_batch, torch.distributed.ReduceOp.MIN, group=group)
        if not has_batch:
            return
        yield batch
