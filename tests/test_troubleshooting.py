"""docs/troubleshooting.md: every error and warning, in the words that the code has."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest

from tests.support import provocations
from tests.support.provocations import PROVOCATIONS, RANKS, collected
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from torchbudget import errors

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
CLASSES = [name for name, value in vars(errors).items() if isinstance(value, type)]
ROOTS = ("TorchBudgetError", "TorchBudgetWarning")  # never raised themselves
NAMES = [name for name in CLASSES if name not in ROOTS]


def section(name: str) -> str:
    """The text below the heading of a class."""
    found = re.search(rf"^### `{name}`\n(.*?)(?=^#|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found, f"docs/troubleshooting.md has no section ### `{name}`"
    return found[1]


@pytest.mark.parametrize("name", NAMES)
def test_every_class_is_explained(name: str) -> None:
    """Its message, its cause and its fix."""
    labels = re.findall(r"^- \*\*(.+?):\*\* \S", section(name), re.MULTILINE)
    assert labels == ["Message", "Cause", "Fix"]


def test_the_page_explains_nothing_else() -> None:
    named = re.findall(r"^### `(\w+)`", PAGE, re.MULTILINE)
    assert sorted(named) == sorted(NAMES)
    assert all(f"`{name}`" in PAGE for name in ROOTS)


def quoted(name: str) -> list[str]:
    """The messages below the heading of a class."""
    message = section(name).split("- **Cause:**")[0]
    return [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", message)]


def test_its_messages_are_those_of_the_code() -> None:
    """What is quoted between two `…` stands in a string of the code."""
    texts = {
        node.value
        for path in sorted((ROOT / "torchbudget").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    code = "\n".join(texts)
    for name in NAMES:
        pieces = [piece for one in quoted(name) for piece in one.split("…")]
        missing = [piece for piece in pieces if piece not in code]
        assert not missing, f"{name}: the code has no {missing}"


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    """Markers of what its provocation needs."""
    found = [pytest.mark.distributed] if name in RANKS else []
    return [*found, pytest.mark.peer] if name == "ShardedTwiceError" else found


def says(text: str, message: str) -> bool:
    """Whether a text has a quoted message, to its end; never one too short to be told apart."""
    pieces = message.split("…")
    pattern = ".*".join(map(re.escape, pieces)) + r"\Z"
    is_telling = max(len(piece.strip()) for piece in pieces) >= 12
    return is_telling and bool(re.search(pattern, text, re.DOTALL))


@pytest.mark.parametrize("name", [pytest.param(one, marks=marks_of(one)) for one in NAMES])
def test_what_a_user_does_meets_it(name: str, tmp_path: Path) -> None:
    """That class, none derived from it, and no other; in words that its section quotes."""
    assert name in PROVOCATIONS, f"tests/support/provocations.py provokes no {name}"
    if name == "ShardedTwiceError":
        pytest.importorskip("accelerate")
    if name in RANKS:
        met = run_ranks(script("planning.provoke"), tmp_path, RANKS[name], name)
    else:
        met = [collected(name, tmp_path)]
    for found in met:
        assert {kind for kind, _ in found} == {name}
        texts = [text for _, text in found]
        assert any(says(text, message) for text in texts for message in quoted(name)), texts


HERE = {name for name in PROVOCATIONS if name.endswith("Warning") and name not in RANKS}
# Found by a thread of the monitor's own, which nobody's line has called.
IN_A_THREAD = {"MonitorWarning", "MemoryLimitWarning"}


@pytest.mark.parametrize("name", sorted(HERE - IN_A_THREAD))
def test_a_warning_points_at_the_users_line(name: str, tmp_path: Path) -> None:
    """However deep inside it is found: not at a line of the package, or of torch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PROVOCATIONS[name](tmp_path)
    places = [one.filename for one in caught if one.category.__name__ == name]
    assert set(places) == {provocations.__file__}
