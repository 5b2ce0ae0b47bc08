"""What is free in a pool of memory, and what this job can use of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.machine.pools import MemoryPool

amounts = st.integers(0, 2**50)
pools = st.builds(
    MemoryPool, name=st.just("pool"), limit_bytes=amounts, used_bytes=amounts, own_bytes=amounts
)


@given(pool=pools)
def test_usable_is_what_is_free_and_the_jobs_own(pool):
    """0 <= free <= usable <= limit, and usable = free + own where own is part of the use."""
    assert 0 <= pool.free_bytes <= pool.usable_bytes <= pool.limit_bytes
    if pool.own_bytes <= pool.used_bytes <= pool.limit_bytes:
        assert pool.usable_bytes == pool.free_bytes + pool.own_bytes


@given(pool=pools, taken=amounts)
def test_what_the_job_takes_does_not_change_what_it_can_use(pool, taken):
    """Usable is the same before and after the job allocates: it compares with a peak."""
    after = MemoryPool(
        name=pool.name,
        limit_bytes=pool.limit_bytes,
        used_bytes=pool.used_bytes + taken,
        own_bytes=min(pool.own_bytes, pool.used_bytes) + taken,
    )
    assert after.usable_bytes == pool.usable_bytes


def test_a_pool_is_frozen():
    """Readings are values: a reading cannot be changed after it was taken."""
    with pytest.raises(AttributeError):
        MemoryPool(name="pool", limit_bytes=1, used_bytes=0).own_bytes = 0
