"""A sampler over 300 lengths, and a loader of their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

TOKENS = PaddedCost(unit_bytes=1)
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 300), 1, 400).astype(np.int64)

# Python 3.12 and later warn of every fork under pytest-xdist, which has threads.
forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def sampler_of(sizes: Any = LENGTHS, budget: Any = 1000, **options: Any) -> Any:
    return MemoryBudgetBatchSampler(sizes, options.pop("cost", TOKENS), budget, **options)


def loader_of(sampler: Any, **options: Any) -> DataLoader[int]:
    """Sample k is the number k."""
    numbers: Any = range(len(LENGTHS))
    return DataLoader(numbers, batch_sampler=sampler, collate_fn=list, **options)


def counted(batches: Iterable[list[int]]) -> Counter[int]:
    """How often each index comes."""
    return Counter(index for batch in batches for index in batch)
