from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torchbudget.data.sizes.key import size_of, sizes_of_all
from torchbudget.errors import SizesError

counts = st.one_of(st.integers(0, 5), st.integers(0, 2**63 - 1))
sizes = st.one_of(
    counts,
    counts.map(np.int64),
    counts.map(torch.tensor),
    st.integers(-2, 2),
    st.integers(2**63, 2**65),
    st.booleans(),
    st.booleans().map(np.bool_),
    st.booleans().map(torch.tensor),
    st.floats(0, 9),
    st.tuples(counts, counts | st.booleans()),
    st.none(),
)


def given_size(sample: Any) -> Any:
    return sample


@given(st.one_of(st.lists(sizes, min_size=1, max_size=6), st.lists(counts, min_size=1)))
@example([3, True])
@example([torch.tensor(True), 7])
@example([2.0, 3])
@example([(2, 3), (2, True)])
def test_sizes_of_many_samples_are_those_of_each(samples: list[Any]) -> None:
    """What a function says of a sample alone is its size among others; or it is an error."""
    try:
        each = np.array([size_of(one, given_size, 0) for one in samples], np.int64)
    except (SizesError, ValueError):  # of other axes than those before it
        with pytest.raises(SizesError):
            sizes_of_all(samples, given_size, 0)
    else:
        found = sizes_of_all(samples, given_size, 0)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, each)
