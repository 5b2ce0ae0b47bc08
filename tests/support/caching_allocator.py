"""A model of torch's caching allocator on CUDA: which bytes it reserves for a sequence of requests.

Every rule is one of `c10/cuda/CUDACachingAllocator.cpp`, whose function is named beside it. There
is one stream, as blocks of one stream are never given to another. Of equally large free blocks the
one at the lowest address is taken: here the addresses of segments rise, while a driver may use old
ones again.

Each segment is a row of blocks without gaps. A block is *allocated*, *free*, or *unmapped*: a range
of addresses of an expandable segment without memory. Two neighbours that are both free, or both
unmapped, are merged at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
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


# Addresses of an expandable segment, where the device's memory is not known: more than any has.
# torch reserves 9/8 of the device's memory.
_ADDRESSES: Final = 2**44
# Settings that change what is reserved, and that the model does not know.
_NOT_MODELLED: Final = frozenset(
    {"roundup_power2_divisions", "large_segment_size_mb", "max_non_split_rounding_mb"}
)


class AllocatorOutOfMemoryError(Exception):
    """A request that fails on the device, too: after all that was cached was released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """What `PYTORCH_CUDA_ALLOC_CONF` sets.

    Attributes:
        expandable: `expandable_segments`.
        max_split_bytes: `max_split_size_mb`; larger blocks are not split. `None`: all are.
        collect_above: `garbage_collection_threshold`; a share of the cap above which free segments
            are released before the cap is reached. 0: never.
        not_modelled: names of settings that change what is reserved, but not in the model.
    """

    expandable: bool = False
    max_split_bytes: int | None = None
    collect_above: float = 0.0
    not_modelled: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Mapping[str, str]) -> AllocatorSettings:
        """From what `cuda_allocator_settings` has read.

        >>> read = AllocatorSettings.of({"expandable_segments": "True", "max_split_size_mb": "128"})
        >>> read.expandable, read.max_split_bytes
        (True, 134217728)
        """
        most = settings.get("max_split_size_mb")
        not_modelled = sorted(_NOT_MODELLED & settings.keys())
        if settings.get("backend", "native") != "native":
            not_modelled.append("backend")
        return cls(
            expandable=settings.get("expandable_segments") == "True",
            max_split_bytes=None if most is None else int(most) * 2**20,
            collect_above=float(settings.get("garbage_collection_threshold", 0)),
            not_modelled=tuple(not_modelled),
        )


class CachingAllocator:
    """A model of torch's caching allocator; see the module.

    A request takes time that is logarithmic in the number of free blocks, except that Python's
    lists move their elements.

    Args:
        settings: as in the environment.
        cap_bytes: what `torch.cuda.set_per_process_memory_fraction` allows; `None`: no cap.
        device_bytes: what the device has for this allocator; `None`: unlimited.

    Attributes:
        allocated_bytes: in allocated blocks.
        reserved_bytes: taken from the device.
        peak_allocated_bytes: the most since `reset_peaks`.
        peak_reserved_bytes: the most since `reset_peaks`.
        num_alloc_retries: requests for which all that was cached was released.
        num_ooms: requests that failed.

    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(3 * 2**20)
    >>> allocator.allocated_bytes // 2**20, allocator.reserved_bytes // 2**20
    (3, 20)
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        cap_bytes: int | None = None,
        device_bytes: int | None = None,
    ) -> None:
        self.settings = AllocatorSettings() if settings is None else settings
        self.cap_bytes, self.device_bytes = cap_bytes, device_bytes
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.num_alloc_retries = self.num_ooms = 0
        self._small = Pool(SMALL_SEGMENT_BYTES)
        self._large = Pool(LARGE_SEGMENT_BYTES)
        self._heads: dict[int, Block] = {}  # the first block of each segment
        self._next_address = _ADDRESSES

    def reset_peaks(self) -> None:
        """Forget the peaks so far, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def segments(self) -> Iterator[list[Block]]:
        """The blocks of each segment in the order of their addresses."""
        for block in self._heads.values():
            row = [block]
            while row[-1].after is not None:
                row.append(row[-1].after)
            yield row

    def malloc(self, num_bytes: int) -> Block:
        """Allocate a block of at least 1 byte (`malloc`).

        Raises:
            AllocatorOutOfMemoryError: there is no room, even after all that is cached was released.
        """
        size = max(-(-num_bytes // BLOCK_BYTES), 1) * BLOCK_BYTES  # round_size
        pool = self._small if size <= SMALL_BYTES else self._large  # get_pool
        block = self._find_free(pool, size) or self._new_block(pool, size)
        block.state = "allocated"
        if self._splits(block, size):
            rest = block.split(size)
            rest.state = "free"
            pool.insert(rest)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Free an allocated block, which stays reserved (`free_block`)."""
        self.allocated_bytes -= block.size
        block.state = "free"
        block.pool.insert_merged(block)

    def empty_cache(self) -> None:
        """Give back all that is free: whole segments, or whole pages (`release_cached_blocks`)."""
        for pool in (self._large, self._small):
            for *_, block in list(pool.free):
                if self.settings.expandable:
                    self._unmap(block)
                elif block.is_whole:
                    self._release(block)

    def _splits(self, block: Block, size: int) -> bool:
        """Whether the rest of a block is split off (`should_split`)."""
        rest = block.size - size
        if self.settings.expandable or block.pool is self._small:
            return rest >= BLOCK_BYTES
        most = self.settings.max_split_bytes
        return rest > SMALL_BYTES and (most is None or size < most)

    def _find_free(self, pool: Pool, size: int) -> Block | None:
        """Take the best fit: the smallest free block, at the lowest address (`get_free_block`)."""
        pool.searches += 1
        at = bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        if self.settings.expandable:
            # A block that can grow counts as large as it can become.
            while at + 1 < len(pool.free) and (
                pool.free[at + 1][2].growable_bytes < pool.free[at][2].growable_bytes
            ):
                at += 1
        block, most = pool.free[at][2], self.settings.max_split_bytes
        if most is not None and (
            (size < most <= block.size)
            or (size >= most and block.size >= size + LARGE_SEGMENT_BYTES)
        ):
            return None
        del pool.free[at]
        return block

    def _new_block(self, pool: Pool, size: int) -> Block:
        """A block of new memory; if there is none, cached memory is released first (`malloc`)."""
        self._collect_garbage()
        block = self._take(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._take(pool, size)
        if block is None:
            self.empty_cache()
            self.num_alloc_retries += 1
            block = self._take(pool, size)
        if block is None:
            self.num_ooms += 1
            raise AllocatorOutOfMemoryError(
                f"{size:,} bytes, of {self.reserved_bytes:,} reserved ones "
                f"{self.allocated_bytes:,} are allocated"
            )
        return block

    def _take(self, pool: Pool, size: int) -> Block | None:
        """A free block of new memory, in no pool; `None` where there is none (`alloc_block`)."""
        needed = segment_bytes(size)
        # For expandable segments, too, whose pages may be more than this, or less.
        if self.cap_bytes is not None and self.reserved_bytes + needed > self.cap_bytes:
            return None
        if self.settings.expandable:
            return self._take_expandable(pool, size)
        if not self._reserve(needed):
            return None
        return self._new_segment(pool, needed)

    def _reserve(self, num_bytes: int) -> bool:
        if self.device_bytes is not None and self.reserved_bytes + num_bytes > self.device_bytes:
            return False
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _new_segment(self, pool: Pool, size: int, state: str = "free") -> Block:
        block = Block(self._next_address, size, pool, self._next_address, state)
        self._heads[block.address] = block
        self._next_address += size
        return block

    def _release(self, block: Block) -> None:
        """Give back a whole segment (`release_block`)."""
        block.pool.remove(block)
        del self._heads[block.address]
        self.reserved_bytes -= block.size

    # ------------------------------------------------------------------ expandable segments

    def _take_expandable(self, pool: Pool, size: int) -> Block | None:
        """Map pages until a free block is large enough (`try_allocate_expandable_block`)."""
        block = self._find_expandable(pool, size)
        if block.state == "unmapped":
            grown = self._map(block, min(block.size, size))
            if grown is None:
                return None
            block = grown
        while block.size < size and block.after is not None:
            grown = self._map(block.after, min(size - block.size, block.after.size))
            if grown is None:
                return None
            block = grown
        pool.remove(block)
        return block

    def _find_expandable(self, pool: Pool, size: int) -> Block:
        """The first of the lowest blocks in a row that have room (`find_expandable_block`)."""
        for _, block in pool.unmapped:
            before = block.before
            first = before if before is not None and before.state == "free" else block
            last, room = first, first.size
            while room < size and last.after is not None and last.after.state != "allocated":
                last = last.after
                room += last.size
            if room >= size:
                return first
        addresses = _ADDRESSES
        if self.device_bytes is not None:
            addresses = self.device_bytes + self.device_bytes // 8
        pages = -(-max(addresses, size) // pool.page_bytes)
        block = self._new_segment(pool, pages * pool.page_bytes, "unmapped")
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map the first pages of an unmapped block; `None` where there is no memory (`map_block`).

        Returns:
            The free block that they became a part of.
        """
        pool = block.pool
        mapped = min(-(-size // pool.page_bytes) * pool.page_bytes, block.size)
        if not self._reserve(mapped):
            return None
        pool.remove(block)
        if mapped < block.size:
            pool.insert(block.split(mapped))
        block.state = "free"
        return pool.insert_merged(block)

    def _unmap(self, block: Block) -> None:
        """Give back the pages that lie wholly inside a free block (`unmap_block`)."""
        pool, page = block.pool, block.pool.page_bytes
        start = block.address - block.segment
        begin, end = -(-start // page) * page, (start + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if end < start + block.size:
            pool.insert(block.split(end - start))
        if begin > start:
            inner = block.split(begin - start)
            pool.insert(block)
            block = inner
        self.reserved_bytes -= end - begin
        block.state = "unmapped"
        block = pool.insert_merged(block)
        if block.is_whole:  # release_expandable_segment
            pool.remove(block)
            del self._heads[block.address]

    # ------------------------------------------------------------------ settings

    def _collect_garbage(self) -> None:
        """Release old free segments near the cap (`garbage_collect_cached_blocks`)."""
        if self.cap_bytes is None or not self.settings.collect_above or self.settings.expandable:
            return
        wanted = self.reserved_bytes - int(self.settings.collect_above * self.cap_bytes)
        idle = {b: self._large.searches - b.freed_at for *_, b in self._large.free if b.is_whole}
        while wanted > 0 and idle:
            threshold = sum(idle.values()) / len(idle)
            old = [block for block, age in idle.items() if age >= threshold]
            for block in old:
                wanted -= block.size
                del idle[block]
                self._release(block)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release blocks too large to be split (`release_available_cached_blocks`).

        Returns:
            Whether they were as many bytes as are needed.
        """
        most = self.settings.max_split_bytes
        if most is None or self.settings.expandable:
            return False
        needed = max(size, most)
        at = bisect_left(pool.free, (needed,))
        if at < len(pool.free):
            if not pool.free[at][2].is_whole:
                return False
            self._release(pool.free[at][2])
            return True
        while needed > 0 and pool.free and pool.free[-1][0] >= most and pool.free[-1][2].is_whole:
            needed -= pool.free[-1][0]
            self._release(pool.free[-1][2])
        return needed <= 0
