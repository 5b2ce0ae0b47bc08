"""Text: tables and the progress bar."""

from __future__ import annotations

import sys

import pytest

from torchbudget.progress import counting
from torchbudget.tables import aligned


def test_columns_are_aligned() -> None:
    """To the left, or to the right from one column on; nothing is left at the end of a line."""
    assert aligned([("a", "long"), ("bb", "")]) == ["a   long", "bb"]
    assert aligned([("a", "1", "2"), ("bb", "10", "333")], right=1) == [
        "a    1    2",
        "bb  10  333",
    ]
    with pytest.raises(ValueError, match="shorter"):
        aligned([("a", "b"), ("c",)])


def test_the_bar_advances_by_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tqdm, or where it is not asked for, none is made."""
    tqdm_auto = pytest.importorskip("tqdm.auto", reason="the progress extra")
    updates, closed = [], []

    class Bar(tqdm_auto.tqdm):
        def update(self, n: float = 1) -> None:
            updates.append((n, self.total))

        def close(self) -> None:
            closed.append(True)
            super().close()

    monkeypatch.setattr(tqdm_auto, "tqdm", Bar)
    with counting(total=15, unit="letters") as advance:
        advance(3)
    assert (updates, closed) == ([(3, 15)], [True])
    with counting(unit="letters", shown=False) as advance:
        advance(3)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    with counting(unit="letters") as advance:
        advance(3)
    assert len(updates) == 1
