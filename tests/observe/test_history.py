"""A history that stays within its bytes and keeps every peak."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.observe.history import History

values = st.floats(0, 1e15) | st.just(np.nan)
rows = st.lists(st.tuples(values, values, values), min_size=1, max_size=200)


@given(rows, st.integers(0, 400))
def test_peaks_are_kept_whatever_the_resolution(added: list[tuple[float, ...]], room: int) -> None:
    """The largest of each number stays, rows stay in order, and their bytes within the bound."""
    history = History(3, room)
    for row in added:
        history.add(row)
    kept = history.rows()
    assert kept.nbytes <= max(room, 2 * 3 * 8)
    np.testing.assert_array_equal(history.most(), np.fmax.reduce(np.array(added)))
    parts = [added[i : i + history.stride] for i in range(0, len(added), history.stride)]
    expected = [np.fmax.reduce(np.array(part)) for part in parts]
    np.testing.assert_array_equal(kept, np.array(expected))


@given(rows, st.integers(0, 400))
def test_each_added_row_is_in_one_completed_row(added: list[tuple[float, ...]], room: int) -> None:
    """What is written while it is filled covers all rows but the last ones, once, in order."""
    history, written, begun = History(3, room), [], 0
    for end, row in enumerate(added, 1):
        completed = history.add(row)
        if completed is not None:
            expected = np.fmax.reduce(np.array(added[begun:end]))
            np.testing.assert_array_equal(completed, expected)
            assert end - begun <= history.stride
            begun = end
            written.append(completed)
    assert len(added) - begun < history.stride


def test_a_long_run_writes_few_rows() -> None:
    """A million samples in a kilobyte: about as many rows a doubling as there is room for."""
    history = History(1, 1024)
    written = sum(history.add([float(i)]) is not None for i in range(1_000_000))
    assert len(history.rows()) <= 128
    assert written < 128 * 14
    assert history.most() == 999_999
