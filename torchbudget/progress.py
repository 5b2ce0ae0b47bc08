"""A progress bar, where tqdm is installed and there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def counting(
    *,
    unit: str,
    total: int | None = None,
    description: str | None = None,
    leave: bool = True,
    delay_s: float = 0,
    shown: bool = True,
) -> Iterator[Callable[[int], object]]:
    """Show a bar that advances by the number with which the yielded function is called.

    Without tqdm no bar is shown: no iteration should fail because of a missing bar.

    Args:
        unit: of the counts, in the plural.
        total: sum of the counts; `None` if it is unknown.
        description: shown before the bar.
        leave: keep the bar on the screen at the end.
        delay_s: show it only after so many seconds.
        shown: show it at all.
    """
    if not shown or find_spec("tqdm") is None:
        yield lambda _: None
        return
    from tqdm.auto import tqdm

    with tqdm(
        total=total, desc=description, unit=f" {unit}", disable=None, leave=leave, delay=delay_s
    ) as bar:
        yield bar.update


def say(lines: Iterable[str]) -> None:
    """Write lines for people to standard error, where bars are shown, too."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))
