"""Arguments that a sampler and a stream share, checked."""

from __future__ import annotations

import numpy as np
import torch

from torchbudget.errors import OptionError


def ranks_of(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The number of ranks and this one's, from `torch.distributed` where they are not given."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if distributed else 1
    if rank is None:
        rank = torch.distributed.get_rank() if distributed else 0
    ranks = at_least_one("num_replicas", num_replicas)
    if natural("rank", rank) >= ranks:
        raise OptionError(f"rank must be below num_replicas={ranks}, got {rank}")
    return ranks, rank


def natural(name: str, value: int) -> int:
    """The value as an int, which must be one of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise OptionError(f"{name} must be an int of at least 0, got {value!r}")
    return int(value)


def at_least_one(name: str, value: int) -> int:
    """The value as an int, which must be one of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise OptionError(f"{name} must be an int of at least 1, got {value!r}")
    return int(value)


def optional(name: str, value: int | None) -> int | None:
    """Likewise, or `None`."""
    return None if value is None else at_least_one(name, value)
