"""`MemoryPool`: memory that is limited together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPool:
    """Memory that is limited together.

    Attributes:
        name: what it is, for people: `"machine"`, a control group's folder, `"/dev/shm"`,
            `"cuda:0"`.
        limit_bytes: its size.
        used_bytes: bytes in use that cannot be reclaimed, this job's included.
        own_bytes: bytes of `used_bytes` that this job uses itself.

    >>> pool = MemoryPool(name="machine", limit_bytes=100, used_bytes=70, own_bytes=20)
    >>> pool.free_bytes, pool.usable_bytes
    (30, 50)
    """

    name: str
    limit_bytes: int
    used_bytes: int
    own_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken in addition to what is used now."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def usable_bytes(self) -> int:
        """Bytes that this job can use in all: what is free, and what it uses already."""
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.own_bytes))
