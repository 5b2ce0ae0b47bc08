"""docs/troubleshooting.md: every error and warning, in the words that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchbudget import errors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]
ROOTS = ("TorchBudgetError", "TorchBudgetWarning")  # never raised themselves


def section(name: str) -> str:
    """The text below the heading of a class."""
    found = re.search(rf"^### `{name}`\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"docs/troubleshooting.md has no section ### `{name}`"
    return found[1]


@pytest.mark.parametrize("name", [name for name in CLASSES if name not in ROOTS])
def test_every_class_is_explained(name: str) -> None:
    """Its message, its cause and what to do."""
    labels = re.findall(r"^- \*\*(.+?):\*\* \S", section(name), re.MULTILINE)
    assert labels == ["Message", "Cause", "What to do"]


def test_the_page_explains_nothing_else() -> None:
    named = re.findall(r"^### `(\w+)`", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(set(CLASSES) - set(ROOTS))
    assert all(f"`{name}`" in PAGE for name in ROOTS)


def trees(folder: str) -> Iterator[ast.Module]:
    """Of all its files, and of scripts that stand in them as text."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        yield tree
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and "\nimport " in str(node.value):
                try:
                    yield ast.parse(str(node.value))
                except SyntaxError:
                    continue  # text that is no script


def test_its_messages_are_those_of_the_code() -> None:
    """What is quoted between two `…` stands in a string of the code."""
    texts = {
        node.value
        for tree in trees("torchbudget")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    code = "\n".join(texts)
    for name in set(CLASSES) - set(ROOTS):
        message = section(name).split("- **Cause:**")[0]
        quoted = re.findall(r"`([^`]+)`", message)
        pieces = [piece for one in quoted for piece in " ".join(one.split()).split("…")]
        missing = [piece for piece in pieces if piece not in code]
        assert not missing, f"{name}: the code has no {missing}"


def names_within(node: ast.AST | None) -> set[str]:
    """Names of classes in an expression, as `errors.X`, `X` or the text "X"."""
    found: set[str] = set()
    for part in ast.walk(node) if node is not None else ():
        if isinstance(part, ast.Name):
            found.add(part.id)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Constant):
            found.add(str(part.value))
    return found


def provoked() -> set[str]:
    """Names that a test expects: in `raises` and `warns`, in `except`, or in a comparison."""
    found: set[str] = set()
    for tree in trees("tests"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if node.func.attr in ("raises", "warns") and node.args:
                    found |= names_within(node.args[0])
            elif isinstance(node, ast.ExceptHandler):
                found |= names_within(node.type)
            elif isinstance(node, ast.Compare):
                found |= names_within(node)
    return found


def test_a_test_provokes_every_class() -> None:
    assert set(CLASSES) - set(ROOTS) - provoked() == set()
