"""A progress bar around an iteration, where tqdm is installed and there is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield from items
        return
    with tqdm(total=total, desc=description, unit=f" {unit}", disable=None, leave=leave) as bar:
        for item in items:
            yield item
            bar.update(count(item))
