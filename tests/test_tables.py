"""Text: tables and the progress bar."""

from __future__ import annotations

import sys

import pytest

from torchbudget.progress import with_bar
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


def test_without_tqdm_the_items_come_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as if it were not installed
    assert list(with_bar("abc", total=3, unit="letters")) == ["a", "b", "c"]


def test_the_bar_advances_by_the_counts_after_each_item(monkeypatch: pytest.MonkeyPatch) -> None:
    tqdm_auto = pytest.importorskip("tqdm.auto", reason="the progress extra")
    updates, closed = [], []

    class Bar(tqdm_auto.tqdm):
        def update(self, n: float = 1) -> None:
            updates.append((n, self.total))

        def close(self) -> None:
            closed.append(True)
            super().close()

    monkeypatch.setattr(tqdm_auto, "tqdm", Bar)
    words = ["one", "three", "seven"]
    items = with_bar(words, total=15, unit="letters", description="words", count=len)
    assert next(items) == "one"
    assert not updates
    assert next(items) == "three"
    assert updates == [(3, 15)]
    items.close()
    assert closed
