"""The model of torch's allocator against the real one."""

from __future__ import annotations

import random

import pytest
import torch

from tests.support.caching_allocator import AllocatorSettings, Block, CachingAllocator
from torchbudget.machine.allocators import cuda_allocator_settings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(5))
def test_the_real_allocator_reserves_exactly_as_much(seed: int) -> None:
    """A random sequence, with the settings of this process."""
    rng = random.Random(seed)
    torch.cuda.empty_cache()
    allocator = CachingAllocator(AllocatorSettings.of(cuda_allocator_settings()))
    before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    if any(before):
        pytest.skip("tensors of other tests live: this one compares with an empty allocator")
    live: list[tuple[torch.Tensor, Block]] = []
    for _ in range(2000):
        if live and rng.random() < 0.5:
            tensor, block = live.pop(rng.randrange(len(live)))
            allocator.free(block)
            del tensor
        elif allocator.allocated_bytes < 2**30:
            size = int(2 ** rng.uniform(0, 27))
            tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            live.append((tensor, allocator.malloc(size)))
            del tensor
        assert torch.cuda.memory_allocated() == allocator.allocated_bytes
        assert torch.cuda.memory_reserved() == allocator.reserved_bytes
    live.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 0
