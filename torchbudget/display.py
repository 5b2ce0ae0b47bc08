"""Progress bars or lines of a log, tables of text, and figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from torchbudget.distributed import Ranks
from torchbudget.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EVERY_S: Final = 10  # a line in a log


def aligned(rows: Sequence[Sequence[str]], *, right: int | None = None) -> list[str]:
    r"""The lines of a table, its columns two blanks apart.

    Args:
        rows: of cells, as many in each.
        right: the column from which on cells stand at the right, as numbers do; `None`: none.

    >>> print(*aligned([("name", "bytes"), ("ids", "8")], right=1), sep="\n")
    name  bytes
    ids       8
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if right is None else right
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def new_figure(columns: int = 1, *, width: float = 8) -> tuple[Figure, list[Any]]:
    """An empty figure without a window, and its axes side by side.

    Args:
        columns: of axes.
        width: in inches.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError.of("matplotlib", "plot") from error
    figure = Figure(figsize=(width, 4), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


@contextmanager
def counting(
    *,
    unit: str,
    total: int | None = None,
    description: str | None = None,
    leave: bool = True,
    shown: bool = True,
) -> Iterator[Callable[[int], object]]:
    """Show a bar that advances by the number with which the yielded function is called.

    Without tqdm, or without a terminal, there is no bar: no iteration should fail because of a
    missing bar. A count with a description then writes lines to standard error, each at the first
    call that comes ten seconds or more after the line before.

    Args:
        unit: of the counts, in the plural.
        total: sum of the counts; `None` if it is unknown.
        description: shown before the bar; without it there are no lines.
        leave: keep the bar on the screen at the end.
        shown: show anything at all.
    """
    bar: Any = None
    if shown and find_spec("tqdm") is not None:
        from tqdm.auto import tqdm

        bar = tqdm(total=total, desc=description, unit=f" {unit}", disable=None, leave=leave)
    has_lines = shown and description and (bar is None or bar.disable)
    done, begun_s = 0, time.monotonic()
    said_s = begun_s

    def advance(count: int) -> None:
        nonlocal done, said_s
        done, now_s = done + count, time.monotonic()
        if has_lines and now_s - said_s >= _EVERY_S:
            said_s = now_s
            of = "" if total is None else f" of {total:,}"
            say([f"{description}: {done:,}{of} {unit} in {now_s - begun_s:.0f} s"])
        if bar is not None:
            bar.update(count)

    with nullcontext() if bar is None else bar:
        yield advance


def say(lines: Iterable[str]) -> None:
    """Write lines for people to standard error, where bars are shown, too; only on rank 0."""
    if not Ranks().rank:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
