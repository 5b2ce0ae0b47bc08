"""`stop_together`: ranks with unequal numbers of batches end their loops at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchbudget.distributed import host_group, is_distributed, keep


def stop_together(loader: Any, *, group: Any = None) -> Iterator[Any]:
    """Yield the batches of a loader until any rank has none left; then all ranks stop.

    One collective of one number a batch, on the host over gloo: the device is not waited for. The
    remaining batches of other ranks are not read.

    Args:
        loader: of this rank, or a tracked loop over it.
        group: of processes. Default: all, if `torch.distributed` is initialized.
    """
    batches = iter(loader)
    nothing = object()
    while True:
        batch = next(batches, nothing)
        with torch.inference_mode(False):  # see `keep`
            has_batch = torch.tensor(int(batch is not nothing))
        if is_distributed():
            least = torch.distributed.ReduceOp.MIN
            keep(has_batch)
            torch.distributed.all_reduce(has_batch, least, group=host_group(group))
        if not has_batch:
            return
        given = [batch]
        del batch  # nothing keeps it here while the next one is made
        yield given.pop()
