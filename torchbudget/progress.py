"""A progress bar around an iteration, where tqdm is installed and there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def with_bar(
    items: Iterable[T],
    *,
    total: int | None,
    unit: str,
    description: str | None = None,
    leave: bool = True,
    count: Callable[[T], int] = lambda _: 1,
) -> Iterator[T]:
    """Yield the items, and show how far the iteration is.

    Without tqdm no bar is shown: no iteration should fail because of a missing bar.

    Args:
        items: to iterate over.
        total: what the counts sum to; `None` where that is unknown.
        unit: of the counts, in the plural.
        description: shown before the bar.
        leave: keep the bar on the screen at the end.
        count: how much an item advances the bar.
    """
    with counting(total=total, unit=unit, description=description, leave=leave) as advance:
        for item in items:
            yield item
            advance(count(item))


@contextmanager
def counting(
    *,
    unit: str,
    total: int | None = None,
    description: str | None = None,
    leave: bool = True,
    delay_s: float = 0,
) -> Iterator[Callable[[int], object]]:
    """Show a bar, as `with_bar`, that advances by what the yielded function is called with.

    Args:
        unit: of the counts, in the plural.
        total: what they sum to; `None` where that is unknown.
        description: shown before the bar.
        leave: keep the bar on the screen at the end.
        delay_s: show it only after so many seconds.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda _: None
        return
    with tqdm(
        total=total, desc=description, unit=f" {unit}", disable=None, leave=leave, delay=delay_s
    ) as bar:
        yield bar.update


def say(lines: Iterable[str]) -> None:
    """Write lines for people to standard error, where bars are shown, too."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
