"""The model of CUDA's caching allocator: laws of any sequence, and figures of torch's source."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchbudget.cost.measuring.allocator_blocks import Block
from torchbudget.cost.measuring.caching_allocator import (
    AllocatorOutOfMemoryError,
    AllocatorSettings,
    CachingAllocator,
)
from torchbudget.units import GiB, KiB, MiB

DEFAULT = AllocatorSettings()
EXPANDABLE = AllocatorSettings(expandable=True)
PAGE = 20 * 2**20

SIZES = st.one_of(
    st.integers(1, 4 * 2**10),
    st.integers(1, 3 * 2**20),
    st.integers(2**20, 30 * 2**20),
    st.sampled_from([2**20, 2**20 + 1, 10 * 2**20 - 512, 10 * 2**20, 20 * 2**20, 200 * 2**20]),
)
# An int is a request, a float frees the live block at that share of them, None empties the cache.
REQUESTS = st.lists(
    st.one_of(SIZES, SIZES, st.floats(0, 1, exclude_max=True), st.none()), max_size=80
)
SETTINGS = st.one_of(
    st.just(DEFAULT),
    st.just(EXPANDABLE),
    st.builds(AllocatorSettings, max_split_bytes=st.sampled_from([20 * 2**20, 64 * 2**20])),
    st.builds(AllocatorSettings, collect_above=st.floats(0.1, 0.9)),
)


def serve(allocator: CachingAllocator, request: int | float | None, live: list[Block]) -> None:
    """Allocate, free, or empty the cache; a request that fails leaves all as it is."""
    if request is None:
        allocator.empty_cache()
    elif isinstance(request, int):
        live.append(allocator.malloc(request))
    elif live:
        allocator.free(live.pop(int(request * len(live))))


@example([1000, 0.0], [])
@given(REQUESTS, REQUESTS)
def test_peaks_are_the_most_since_they_were_reset(
    before: list[int | float | None], after: list[int | float | None]
) -> None:
    """What was allocated and reserved at the reset counts, and what was before it does not."""
    allocator, live = CachingAllocator(), list[Block]()
    for request in before:
        serve(allocator, request, live)
    allocator.reset_peaks()
    allocated, reserved = [allocator.allocated_bytes], [allocator.reserved_bytes]
    for request in after:
        serve(allocator, request, live)
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    assert allocator.peak_allocated_bytes == max(allocated)
    assert allocator.peak_reserved_bytes == max(reserved)


def check(allocator: CachingAllocator, live: list[Block]) -> None:
    """Blocks cover their segments once, and add up to what is reserved."""
    bytes_ = {"allocated": 0, "free": 0, "unmapped": 0}
    allocated = []
    for row in allocator.segments():
        for one, other in pairwise(row):
            assert one.address + one.size == other.address
            assert other.before is one
            assert one.state != other.state or one.state == "allocated"
        for block in row:
            bytes_[block.state] += block.size
            allocated += [block] * (block.state == "allocated")
    assert {*map(id, allocated)} == {*map(id, live)}
    assert bytes_["allocated"] == allocator.allocated_bytes
    assert bytes_["allocated"] + bytes_["free"] == allocator.reserved_bytes
    assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    assert allocator.peak_allocated_bytes >= allocator.allocated_bytes


@given(SETTINGS, REQUESTS)
def test_bytes_are_conserved_and_no_two_blocks_overlap(
    settings: AllocatorSettings, requests: list[int | float | None]
) -> None:
    """What is allocated and what is free is what is reserved, after every request."""
    allocator = CachingAllocator(settings)
    live: list[Block] = []
    for request in requests:
        serve(allocator, request, live)
        check(allocator, live)
        if isinstance(request, int):
            assert live[-1].size >= request


@given(SETTINGS, REQUESTS)
def test_after_everything_is_freed_and_released_nothing_is_reserved(
    settings: AllocatorSettings, requests: list[int | float | None]
) -> None:
    """No block is lost, and neighbours that are free are one block."""
    allocator = CachingAllocator(settings)
    live: list[Block] = []
    for request in requests:
        serve(allocator, request, live)
    for block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.allocated_bytes == allocator.reserved_bytes == 0
    assert not [*allocator.segments()]


@given(SETTINGS, REQUESTS)
def test_one_sequence_has_one_result(
    settings: AllocatorSettings, requests: list[int | float | None]
) -> None:
    """Two allocators give the same blocks."""
    histories = []
    for _ in range(2):
        allocator = CachingAllocator(settings)
        live: list[Block] = []
        history = []
        for request in requests:
            serve(allocator, request, live)
            history.append((allocator.reserved_bytes, [(b.address, b.size) for b in live]))
        histories.append(history)
    assert histories[0] == histories[1]


@given(SETTINGS, REQUESTS, st.integers(1, 500), st.booleans())
def test_a_limit_is_kept_or_a_request_fails_after_a_release(
    settings: AllocatorSettings,
    requests: list[int | float | None],
    limit_mib: int,
    cap: bool,
) -> None:
    """A device's limit is never passed; a cap is by 18 MiB at most, where segments grow.

    torch compares a cap with a request rounded up to 2 MiB, and then maps pages of 20 MiB. A
    request fails only after what is free was released, and changes nothing else.
    """
    limit = MiB(limit_mib)
    allocator = CachingAllocator(settings, **{"cap_bytes" if cap else "device_bytes": limit})
    live: list[Block] = []
    for request in requests:
        before = allocator.num_alloc_retries, allocator.allocated_bytes
        try:
            serve(allocator, request, live)
        except AllocatorOutOfMemoryError:
            assert allocator.num_alloc_retries == before[0] + 1
            assert allocator.allocated_bytes == before[1]
        check(allocator, live)
        slack = MiB(18) if cap and settings.expandable else 0
        assert allocator.reserved_bytes <= limit + slack


@given(REQUESTS)
def test_a_cache_that_was_emptied_is_no_larger(requests: list[int | float | None]) -> None:
    """What expandable segments keep is less than a page around each living block and its gaps."""
    allocator = CachingAllocator(EXPANDABLE)
    live: list[Block] = []
    for request in requests:
        serve(allocator, request, live)
    allocator.empty_cache()
    assert allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.reserved_bytes <= allocator.allocated_bytes + 2 * PAGE * len(live)
    allocator.empty_cache()
    check(allocator, live)


@dataclass(frozen=True)
class Figures:
    """Bytes reserved for one request, by default segments and by expandable ones."""

    asked: int
    allocated: int
    default: int
    expandable: int


@pytest.mark.parametrize(
    "one",
    [
        Figures(1, 512, MiB(2), MiB(2)),
        Figures(513, 1024, MiB(2), MiB(2)),
        Figures(MiB(1), MiB(1), MiB(2), MiB(2)),
        Figures(MiB(1) + 1, MiB(1) + 512, MiB(20), MiB(20)),
        Figures(MiB(10) - 512, MiB(10) - 512, MiB(20), MiB(20)),
        Figures(MiB(10), MiB(10), MiB(10), MiB(20)),
        Figures(MiB(21), MiB(21), MiB(22), MiB(40)),
        Figures(GiB(1), GiB(1), GiB(1), MiB(1040)),
    ],
    ids=lambda one: f"{one.asked}",
)
def test_one_request(one: Figures) -> None:
    """`kMinBlockSize`, `kSmallSize`, `kSmallBuffer`, `kMinLargeAlloc`, `kRoundLarge`, and pages."""
    for settings, reserved in ((DEFAULT, one.default), (EXPANDABLE, one.expandable)):
        allocator = CachingAllocator(settings)
        block = allocator.malloc(one.asked)
        assert allocator.reserved_bytes == reserved
        split = settings.expandable or reserved - one.allocated > MiB(1) or reserved == MiB(2)
        assert block.size == (one.allocated if split else reserved)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    """`should_split`: 9.5 MiB and another 10 MiB leave half a MiB of a 20 MiB segment unsplit."""
    allocator = CachingAllocator()
    first = allocator.malloc(MiB(9.5))
    second = allocator.malloc(MiB(10))
    assert (first.size, second.size) == (MiB(9.5), MiB(10.5))
    assert allocator.reserved_bytes == MiB(20)


def test_the_best_fit_is_the_smallest_block_at_the_lowest_address() -> None:
    """`BlockComparatorSize`, whatever the order in which blocks were freed."""
    allocator = CachingAllocator()
    blocks = [allocator.malloc(MiB(size)) for size in (40, 30, 30, 50)]
    addresses = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(MiB(29)).address == addresses[1]


def test_ever_larger_requests_keep_the_old_segments() -> None:
    """The note on expandable segments in torch's source: default ones do not fit and stay."""
    peaks = []
    for settings in (DEFAULT, EXPANDABLE):
        allocator = CachingAllocator(settings)
        for size in range(100, 200, 10):
            allocator.free(allocator.malloc(MiB(size)))
        peaks.append(allocator.peak_reserved_bytes)
    assert peaks == [sum(MiB(size) for size in range(100, 200, 10)), MiB(200)]


def test_a_block_that_can_grow_counts_as_what_it_can_become() -> None:
    """`expandable_size` in `get_free_block`: of two free blocks, not the one at the end."""
    allocator = CachingAllocator(EXPANDABLE)
    first, between = allocator.malloc(MiB(12)), allocator.malloc(MiB(20))
    address = first.address
    allocator.free(first)
    last = between.after
    assert last is not None
    assert last.size == MiB(8)
    # The free block at the end is smaller, but could be any size.
    assert allocator.malloc(MiB(7)).address == address


def test_a_retry_releases_what_is_free_and_is_counted() -> None:
    """`num_alloc_retries` counts a flush that succeeded; `num_ooms` what failed after one."""
    allocator = CachingAllocator(cap_bytes=MiB(100))
    allocator.free(allocator.malloc(MiB(60)))
    kept = allocator.malloc(MiB(70))
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (1, 0)
    assert allocator.reserved_bytes == MiB(70)
    with pytest.raises(AllocatorOutOfMemoryError, match="31,457,792 bytes, of 73,400,320 reserved"):
        allocator.malloc(MiB(30) + 1)
    assert (allocator.num_alloc_retries, allocator.num_ooms) == (2, 1)
    allocator.free(kept)


def test_a_cap_is_passed_where_whole_pages_are_mapped() -> None:
    """22 MiB are below a cap of 22 MiB; they take two pages."""
    allocator = CachingAllocator(EXPANDABLE, cap_bytes=MiB(22))
    allocator.malloc(MiB(22))
    assert allocator.reserved_bytes == MiB(22) + MiB(18)


def test_garbage_is_collected_above_its_threshold_before_the_cap() -> None:
    """`garbage_collection_threshold:0.5`: old free segments go, without a retry."""
    allocator = CachingAllocator(AllocatorSettings(collect_above=0.5), cap_bytes=MiB(200))
    allocator.free(allocator.malloc(MiB(40)))
    allocator.free(allocator.malloc(MiB(70)))
    allocator.malloc(MiB(80))
    assert allocator.num_alloc_retries == 0
    assert allocator.reserved_bytes < MiB(190)


def test_oversize_blocks_are_neither_split_nor_given_to_small_requests() -> None:
    """`max_split_size_mb:64`: a 100 MiB block serves 90 MiB whole, and 30 MiB not at all."""
    allocator = CachingAllocator(AllocatorSettings(max_split_bytes=MiB(64)))
    allocator.free(allocator.malloc(MiB(100)))
    allocator.malloc(MiB(30))
    assert allocator.reserved_bytes == MiB(130)
    assert allocator.malloc(MiB(90)).size == MiB(100)
    assert allocator.reserved_bytes == MiB(130)


def test_small_and_large_requests_do_not_share_segments() -> None:
    """`get_pool`."""
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(MiB(20)))
    allocator.malloc(KiB(1))
    assert allocator.reserved_bytes == MiB(22)
