"""A cost that is a table of measured batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import TableCost
from torchbudget.errors import CostError
from torchbudget.units import MAX_BYTES

tables = st.lists(
    st.tuples(st.integers(1, 100), st.integers(1, 500), st.integers(1, 10**9)),
    min_size=1,
    max_size=9,
)


@given(tables, st.integers(1, 500), st.integers(0, 10**10))
def test_a_table_is_exact_and_monotone(rows: Any, size: int, budget: int) -> None:
    """And predicts nothing for batches that no measured one covers."""
    n, sizes, peaks = zip(*rows, strict=True)
    table = TableCost(numbers=n, sizes=tuple((s,) for s in sizes), peak_bytes=peaks)
    fits = int(table.capacity(size, budget))
    assert fits == 0 or table.batch_bytes(fits, size) <= budget
    assert table.batch_bytes(fits + 1, size) > budget
    covering = [p for m, s, p in rows if m >= 7 and s >= size]
    assert table.batch_bytes(7, size) == min(covering, default=MAX_BYTES)
    lengths = np.arange(1, max(sizes) + 9)
    assert (np.diff(table.batch_bytes(np.arange(1, 200), size) - MAX_BYTES) >= 0).all()
    assert (np.diff(table.batch_bytes(7, lengths) - MAX_BYTES) >= 0).all()


def test_columns_of_one_length() -> None:
    with pytest.raises(CostError, match="numbers and sizes must be as many as peaks"):
        TableCost(numbers=(1, 2), sizes=((1,), (2,)), peak_bytes=(10,))
    with pytest.raises(CostError, match="at least one"):
        TableCost(numbers=(), sizes=(), peak_bytes=())
