"""Text: tables and the progress bar."""

from __future__ import annotations

import sys

import pytest

from torchbudget import display
from torchbudget.display import aligned, counting


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


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a terminal or without tqdm, what has a description says how far it is."""
    monkeypatch.setattr(display, "_EVERY_S", 0)
    for has_tqdm in (True, False):
        if not has_tqdm:
            monkeypatch.setitem(sys.modules, "tqdm", None)
        with display.counting(unit="shapes", description="measuring") as advance:
            advance(3)
            advance(1)
        with display.counting(unit="samples", total=1000, description="sizes") as advance:
            advance(7)
        with display.counting(unit="batches") as advance:
            advance(7)
        with display.counting(unit="shapes", description="hidden", shown=False) as advance:
            advance(7)
        told = "measuring: 3 shapes in 0 s\nmeasuring: 4 shapes in 0 s\nsizes: 7 of 1,000 samples "
        assert capfd.readouterr().err == f"{told}in 0 s\n"
    monkeypatch.setattr(display, "_EVERY_S", 10)
    with display.counting(unit="shapes", description="measuring") as advance:
        advance(3)
    assert not capfd.readouterr().err
