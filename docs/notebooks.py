"""Writes notebooks from pages of the docs, whose code the tests run: `python docs/notebooks.py`.

A notebook has the page's text and code, without outputs and without what only the tests read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import jupytext

DOCS: Final = Path(__file__).parent
NOTEBOOKS: Final = {
    "quickstart": "quickstart",
    "graphs": "packed",
    "speech": "speech",
}


def notebook_of(page: str) -> str:
    """The notebook of a page, as text."""
    text = (DOCS / f"{page}.md").read_text("utf-8")
    text = re.sub(r"<!---.*?-->\n*", "", text, flags=re.DOTALL)  # the tests' own
    text = re.sub(r"```text\n.*?```\n*", "", text, flags=re.DOTALL)  # outputs
    text = re.sub(r"\[\]\((\w[\w-]*)\.md(#[\w-]+)?\)", _titled, text)
    text = re.sub(r"\]\((\w[\w-]*\.md)", r"](../docs/\1", text)
    found = jupytext.reads(text, "md")
    found.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    for number, cell in enumerate(found.cells):
        cell.metadata, cell["id"] = {}, f"cell-{number}"
    written: str = jupytext.writes(found, "ipynb")
    return written + "\n"


def _titled(link: re.Match[str]) -> str:
    """A link without a text, which Sphinx gives one, with the title of the page."""
    page, anchor = link.groups()
    title = (DOCS / f"{page}.md").read_text("utf-8").partition("\n")[0].lstrip("# ")
    return f"[{title}]({page}.md{anchor or ''})"


def main() -> None:
    """Write all notebooks."""
    for page, name in NOTEBOOKS.items():
        path = DOCS.parent / "examples" / f"{name}.ipynb"
        path.write_text(notebook_of(page), "utf-8")


if __name__ == "__main__":
    main()
