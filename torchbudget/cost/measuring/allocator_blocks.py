"""The blocks that torch's caching allocator cuts segments into, and the pools that they are in."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

# c10/core/AllocatorConfig.h: kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kRoundLarge,
# and the default of large_segment_size, formerly kLargeBuffer.
BLOCK_BYTES: Final = 512
SMALL_BYTES: Final = 2**20
SMALL_SEGMENT_BYTES: Final = 2 * 2**20
MEDIUM_BYTES: Final = 10 * 2**20
LARGE_SEGMENT_BYTES: Final = 20 * 2**20
LARGE_STEP_BYTES: Final = 2 * 2**20


@dataclass(slots=True, eq=False)
class Block:
    """A range of addresses.

    Attributes:
        address: of its first byte.
        size: bytes.
        pool: of small requests, or of large ones.
        segment: the address at which its segment begins.
        state: "allocated", "free" or "unmapped".
        before: the block that ends where this one begins.
        after: the block that begins where this one ends.
        freed_at: how many searches the pool had seen when it became free.
    """

    address: int
    size: int
    pool: Pool
    segment: int
    state: str = "free"
    before: Block | None = None
    after: Block | None = None
    freed_at: int = 0

    @property
    def growable_bytes(self) -> int:
        """Its size, with the unmapped addresses after it."""
        after = self.after
        return self.size + (after.size if after is not None and after.state == "unmapped" else 0)

    @property
    def is_whole(self) -> bool:
        """Whether it is a segment of its own."""
        return self.before is None and self.after is None

    def split(self, size: int) -> Block:
        """Keep the first bytes, and return the rest as a block in the same state."""
        rest = Block(
            self.address + size, self.size - size, self.pool, self.segment, self.state, self
        )
        rest.after, self.after, self.size = self.after, rest, size
        if rest.after is not None:
            rest.after.before = rest
        return rest

    def absorb_after(self) -> None:
        """Take in the next block."""
        after = self.after
        if after is not None:
            self.size += after.size
            self.after = after.after
            if self.after is not None:
                self.after.before = self


@dataclass(slots=True, eq=False)
class Pool:
    """The blocks of small requests, or those of large ones.

    Attributes:
        page_bytes: what an expandable segment grows by.
        free: blocks by size, then by address.
        unmapped: blocks by address.
        searches: for a free block so far.
    """

    page_bytes: int
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)
    searches: int = 0

    def insert(self, block: Block) -> None:
        """Insert a block that is free or unmapped."""
        if block.state == "free":
            block.freed_at = self.searches
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block that is free or unmapped."""
        # A pair is less than any triple that begins with it; no two blocks share an address.
        if block.state == "free":
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def insert_merged(self, block: Block) -> Block:
        """Merge a block with neighbours in the same state (`try_merge_blocks`), and insert it."""
        after, before = block.after, block.before
        if after is not None and after.state == block.state:
            self.remove(after)
            block.absorb_after()
        if before is not None and before.state == block.state:
            self.remove(before)
            before.absorb_after()
            block = before
        self.insert(block)
        return block


def segment_bytes(size: int) -> int:
    """What is asked of the device for a block (`get_allocation_size`)."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MEDIUM_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // LARGE_STEP_BYTES) * LARGE_STEP_BYTES
