"""Tables of text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.tables import aligned

cells = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.tuples(*[cells] * n), min_size=1)), st.data()
)
def test_cells_are_found_where_their_column_is(
    rows: list[tuple[str, ...]], data: st.DataObject
) -> None:
    """Each column has one place in all lines, and as many characters as its longest cell."""
    right = data.draw(st.integers(0, len(rows[0])) | st.none())
    lines = aligned(rows, right=right)
    first = 0
    for column, found in enumerate(zip(*rows, strict=True)):
        width = max(map(len, found))
        for line, cell in zip(lines, found, strict=True):
            there = line[first : first + width]
            at_right = right is not None and column >= right
            assert there.ljust(width) == (cell.rjust(width) if at_right else cell.ljust(width))
        first += width + 2


def test_nothing_is_left_at_the_end_of_a_line() -> None:
    assert aligned([("a", "long"), ("b", "")]) == ["a  long", "b"]


def test_rows_of_unequal_numbers_of_cells_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a", "b"), ("c",)])
