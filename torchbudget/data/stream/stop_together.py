"""`stop_together`: ranks with unequal numbers of batches end their loops at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from torchbudget.checks import at_least_one
from torchbudget.distributed import host_group, is_distributed


def stop_together(loader: Any, *, group: Any = None, every: int = 1) -> Iterator[Any]:
    """Yield the batches of a loader until any rank has none left; then all ranks stop.

    Ranks agree on the number of batches that all of them have, at most `every`: one collective of
    one number on the host, over gloo, so that the device is not waited for. The remaining batches
    of other ranks are not yielded.

    Args:
        loader: of this rank.
        group: of processes. Default: all, if `torch.distributed` is initialized.
        every: agree once in so many batches, which are read before the first of them is yielded.

    Raises:
        OptionError: `every` is below 1.
    """
    at_least_one("every", every)
    return _agreed(iter(loader), group, every)


def _agreed(batches: Iterator[Any], group: Any, every: int) -> Iterator[Any]:
    agreed = every
    while agreed == every:
        ready = list(islice(batches, every))
        number = torch.tensor(len(ready))
        if is_distributed():
            least = torch.distributed.ReduceOp.MIN
            torch.distributed.all_reduce(number, least, group=host_group(group))
        agreed = int(number)
        yield from ready[:agreed]
