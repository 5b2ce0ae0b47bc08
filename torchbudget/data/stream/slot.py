"""How the processes that read a stream share its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Split: TypeAlias = Literal["none", "workers", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlot:
    """One of the processes that share a source.

    Attributes:
        worker: number of the `DataLoader` worker on its rank.
        workers: on each rank, at least 1.
        rank: of the process.
        ranks: number of them.
    """

    worker: int
    workers: int
    rank: int
    ranks: int

    def part(self, split: Split) -> tuple[int, int]:
        """The number of the part of the source that it reads, and the number of parts."""
        if split == "ranks":
            return self.rank * self.workers + self.worker, self.ranks * self.workers
        return (self.worker, self.workers) if split == "workers" else (0, 1)


def share_of(batches: int | None, worker: int, workers: int) -> int | None:
    """A worker's number of `batches`: a loader takes one from each worker in turn."""
    return None if batches is None else (batches + workers - 1 - worker) // workers
