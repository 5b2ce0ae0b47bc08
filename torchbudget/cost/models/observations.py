"""What training has shown of a measured cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Observations:
    """What `observe` has found: the one mutable part of a cost.

    Attributes:
        margin: the least that covers every step.
        steps: how many were observed.
        largest_bytes: the largest fitted bytes of any, where an allocator keeps what it reserved;
            what was taken by one that has none.
        planned_margin: the margin of the cost that batches are planned with by now.
        retries: allocations that succeeded once the cache was flushed.
    """

    margin: float = 0.0
    steps: int = 0
    largest_bytes: int = 0
    planned_margin: float = 0.0
    retries: int = 0
