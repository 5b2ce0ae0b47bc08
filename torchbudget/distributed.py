"""What is asked of `torch.distributed`, wherever it may not have been started."""

from __future__ import annotations

import torch

from torchbudget.checks import at_least_one, natural
from torchbudget.errors import OptionError


def is_distributed() -> bool:
    """Whether this process is one of several that `torch.distributed` has joined."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def ranks_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The number of ranks and this one's, from `torch.distributed` where they are not given."""
    distributed = is_distributed()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if distributed else 1
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    ranks = at_least_one("num_replicas", num_replicas)
    if natural("rank", rank) >= ranks:
        raise OptionError(f"rank must be below num_replicas={ranks}, got {rank}")
    return ranks, rank
