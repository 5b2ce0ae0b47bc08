"""Docstrings open with a verb or a noun, so that their first words say what is meant."""

from __future__ import annotations

import ast
from pathlib import Path

OPENINGS = (
    "What",
    "Where",
    "Those",
    "Of",
    "That",
    "As",
    "Likewise",
    "By which",
    "From what",
    "As many",
)
LIBRARY = Path(__file__).parents[1] / "torchbudget"


def test_no_docstring_hides_its_noun() -> None:
    files = sorted(LIBRARY.rglob("*.py"))
    assert files
    hidden = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if f"{text} ".startswith(tuple(f"{word} " for word in OPENINGS)):
                    hidden.append(f"{path.name}:{node.body[0].lineno}: {text.splitlines()[0]}")
    assert not hidden, "\n".join(hidden)
