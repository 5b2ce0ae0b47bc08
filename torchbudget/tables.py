"""Tables of text, for people."""

from __future__ import annotations

from collections.abc import Sequence


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
