"""Which batches of a plan a trial reads, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.data.loading.tried_model import _to_try
from torchbudget.plan.batch_shapes import BatchShapes

ROWS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 300)), min_size=1, max_size=60)


@given(ROWS, ROWS)
def test_the_smallest_twice_and_the_largest_of_the_first_epoch(first: Any, second: Any) -> None:
    """By elements, samples and padded size; each once, and none of a later epoch."""
    samples, sizes = np.array([*first, *second], np.int64).T
    ends = (len(first), len(first) + len(second))
    shapes = BatchShapes(samples, sizes[:, None], samples[:, None] * sizes[:, None], ends)
    tried = _to_try(shapes)
    assert set(tried) <= set(range(len(first)))
    elements = samples[: len(first)] * np.maximum(sizes[: len(first)], 1)
    assert tried[0] == tried[1]
    assert elements[tried[0]] == elements.min()
    assert len(set(tried[1:])) == len(tried) - 1
    for numbers in (elements, samples[: len(first)], sizes[: len(first)]):
        assert numbers[tried].max() == numbers.max()
    assert len(set(tried)) >= min(len(first), 8)
