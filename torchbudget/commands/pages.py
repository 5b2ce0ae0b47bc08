"""What commands write: figures, and one HTML page with figures inside it as data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from torchbudget.commands.answer import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE: Final = """\
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { border-bottom: 1px solid #999; padding: 0.2rem 0.8rem; text-align: right }
th:first-child, td:first-child { text-align: left; white-space: pre }
figure { margin: 1.5rem 0 } img { max-width: 100% } pre { white-space: pre-wrap }"""


def page(title: str, *parts: str) -> str:
    """A page of parts that are HTML already.

    Args:
        title: as text.
        parts: what the functions below return.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head>",
            f"<body><h1>{escape(title)}</h1>",
            *parts,
            "</body></html>\n",
        ]
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row and first column are headings."""
    return "\n".join(["<table>", *_rows(rows), "</table>"])


def _rows(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        cells = [
            f"<th>{escape(cell)}</th>" if number == 0 or column == 0 else f"<td>{escape(cell)}</td>"
            for column, cell in enumerate(row)
        ]
        yield f"<tr>{''.join(cells)}</tr>"


def paragraph(text: str) -> str:
    """Text, in which HTML means nothing."""
    return f"<p>{escape(text)}</p>"


def picture(figure: Figure, caption: str) -> str:
    """A figure as SVG inside the page, the same bytes for the same figure."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "torchbudget"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    text = escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def save(path: Path, text: str) -> None:
    """Write a page.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, in the format of the path's suffix.

    Raises:
        UsageError: it cannot be written, or there is no such format.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error
