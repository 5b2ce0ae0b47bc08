"""What a loader may use of the host: bytes in all, bytes of `/dev/shm`, open files."""

from __future__ import annotations

from dataclasses import dataclass

from torchbudget.budget import MemoryBudget
from torchbudget.data.loading.parts import HostBytes
from torchbudget.machine.host import SHM, shared_memory
from torchbudget.machine.limits import free_descriptors
from torchbudget.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """The limits of one rank.

    Attributes:
        host_bytes: of all its processes.
        shared_bytes: of `/dev/shm`; `None`: it has no limit of its own.
        descriptors: files that this process may open yet.
    """

    host_bytes: int
    shared_bytes: int | None
    descriptors: int

    @classmethod
    def of(cls, budget: MemoryBudget, host_bytes: int, ranks: int) -> HostLimits:
        """Those of a budget, and of this machine now.

        Args:
            budget: of which `shared` counts, where it is less than what is free.
            host_bytes: of the budget.
            ranks: that share the machine's `/dev/shm`.
        """
        pool = shared_memory()
        free = None if pool is None else pool.free_bytes // ranks
        given = [size for size in (budget.shared, free) if size is not None]
        return cls(
            host_bytes=host_bytes,
            shared_bytes=min(given, default=None),
            descriptors=free_descriptors(),
        )

    def exceeded_by(self, needs: HostBytes) -> str:
        """What a loader would exceed, for people; empty where it fits."""
        if needs.total_bytes > self.host_bytes:
            return (
                f"the host's budget: {format_bytes(needs.total_bytes)} of "
                f"{format_bytes(self.host_bytes)}"
            )
        if self.shared_bytes is not None and needs.shared_bytes > self.shared_bytes:
            needed, given = format_bytes(needs.shared_bytes), format_bytes(self.shared_bytes)
            return f"{SHM}: {needed} of {given}"
        if needs.descriptors > self.descriptors:
            return f"open files: {needs.descriptors} of {self.descriptors} (ulimit -n)"
        return ""
