"""`HostBytes`: what a `DataLoader` needs of the host, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from torchbudget.tables import aligned
from torchbudget.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """What a loader is predicted to need at the most, while it is iterated; as text, a table.

    Attributes:
        parts: what each part needs at its peak, by name, in bytes. Shared pages count once; files
            of data that are mapped do not count.
        shared_bytes: of `/dev/shm` among them.
        descriptors: files that this process has open for workers and batches.
        reclaimable_bytes: of mapped data files that a worker had in memory, which the kernel takes
            back when memory is short.
        basis: the batches by which it was predicted.
    """

    parts: tuple[tuple[str, int], ...]
    shared_bytes: int
    descriptors: int
    reclaimable_bytes: int
    basis: str

    @property
    def total_bytes(self) -> int:
        """All parts, in bytes."""
        return sum(size for _, size in self.parts)

    def table(self, budget_bytes: int | None = None) -> str:
        """A line for each part and the total, against a budget where one is given."""
        rows = [*self.parts, ("total", self.total_bytes)]
        lines = aligned([(name, format_bytes(size)) for name, size in rows], right=1)
        if budget_bytes is not None:
            lines[-1] += f"  {self.total_bytes / budget_bytes:.1%} of {format_bytes(budget_bytes)}"
        lines.append(
            f"{format_bytes(self.shared_bytes)} of it in /dev/shm; {self.descriptors} open files"
        )
        if self.reclaimable_bytes:
            lines.append(
                f"not counted: {format_bytes(self.reclaimable_bytes)} of mapped files, which the "
                "kernel takes back when memory is short"
            )
        lines.append(f"by {self.basis}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()
