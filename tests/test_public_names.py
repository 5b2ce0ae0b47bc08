"""What is public, that importing it does nothing, and that the texts about it are true."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import sys
import warnings
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

import torchbudget
from tests.support import provocations
from tests.support.commands import ROOT, python
from tests.support.provocations import PROVOCATIONS, RANKS, collected
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from torchbudget import errors, readers, transforms

MODULES = {"errors", "readers", "transforms"}  # public, and imported with the package
CHANGING = {"Peak"}  # is filled in where its context ends
# Few fields, in an order that everybody expects; or no user makes one.
BY_POSITION = {"Mixture", "Peak", "Probe", "StepPlan", "Piece", "Grid", "Surface"}


def error_names() -> list[str]:
    return [name for name, value in vars(errors).items() if inspect.isclass(value)]


# What users import, as they write it after `torchbudget.`
PUBLIC = [
    *(name for name in torchbudget.__all__ if name != "__version__" and name not in MODULES),
    *(f"errors.{name}" for name in error_names()),
    *(f"readers.{name}" for name in readers.__all__),
    *(f"transforms.{name}" for name in transforms.__all__),
]


@pytest.mark.parametrize("module", [torchbudget, readers, transforms], ids=lambda m: m.__name__)
def test_all_is_sorted_and_complete(module: ModuleType) -> None:
    """`__all__` is every public name of the module, once, in order."""
    names = module.__all__
    assert names == sorted(set(names))
    found = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    if module is torchbudget:
        found |= {"__version__", *MODULES}
    assert found == set(names)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented_and_ours(name: str) -> None:
    """Classes and functions are the library's own, and say what they are in one line first."""
    value = attrgetter(name)(torchbudget)
    assert value.__module__.startswith("torchbudget")
    assert value.__name__ == name.rpartition(".")[2]
    first = (inspect.getdoc(value) or "").partition("\n")[0]
    assert first.endswith((".", "`", ":")), first
    methods = vars(value).items() if inspect.isclass(value) else ()
    for attribute, member in methods:
        is_method = callable(member) or isinstance(member, (property, classmethod, staticmethod))
        assert attribute.startswith("_") or not is_method or inspect.getdoc(member), attribute


def documented_names() -> list[str]:
    """What the reference documents, by the module that users import it from."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    found: list[str] = []
    module = ""
    for directive, argument in re.findall(r"^\.\. (\w+):: ([\w.]+)", page, re.MULTILINE):
        if directive == "currentmodule":
            module = argument
        else:
            found.append(argument if "." in argument else f"{module}.{argument}")
    return found


def test_the_reference_documents_every_public_name_once() -> None:
    documented = documented_names()
    assert len(documented) == len(set(documented))
    # An error that stands on top too is documented with the others.
    expected = {f"torchbudget.{name}" for name in PUBLIC if f"errors.{name}" not in PUBLIC}
    assert expected <= set(documented)


def test_the_reference_is_current() -> None:
    """After a change of a signature or a docstring, `python docs/reference.py` writes it anew."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert runpy.run_path(str(ROOT / "docs" / "reference.py"))["with_summaries"](page) == page


@pytest.mark.parametrize("name", documented_names())
def test_what_the_reference_documents_is_there(name: str) -> None:
    """A record stands in the module that defines it, which users import it from.

    Values do not change, and their fields are named, so that others can be added later on.
    """
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    assert module.count(".") < 2 or value.__module__ == module
    if dataclasses.is_dataclass(value):
        assert value.__dataclass_params__.frozen is (attribute not in CHANGING)
        by_name = all(field.kw_only for field in dataclasses.fields(value) if field.init)
        assert by_name is (attribute not in BY_POSITION)


def test_every_module_is_documented_and_imports() -> None:
    """Each module can be imported by itself, and its docstring says what it is for."""
    for module in pkgutil.walk_packages(torchbudget.__path__, "torchbudget."):
        if not module.name.endswith("__main__"):
            assert importlib.import_module(module.name).__doc__, module.name


# Nothing that hides its noun.
OPENINGS = ("What", "Where", "Those", "Of", "That", "As", "Likewise", "By which", "From what")


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """So that their first words say what is meant."""
    hidden = []
    for path in sorted((ROOT / "torchbudget").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if text.startswith(tuple(f"{word} " for word in OPENINGS)):
                    hidden.append(f"{path.name}:{node.body[0].lineno}: {text.splitlines()[0]}")
    assert not hidden, "\n".join(hidden)


# ---------------------------------------------------------------------- errors


def drawn(value: type, branch: str = "", indent: str = "") -> list[tuple[str, str | None]]:
    """The lines of a class and of those derived from it: branches, name, and built-in base."""
    builtins = [base.__name__ for base in value.__bases__ if base.__module__ == "builtins"]
    lines = [(branch + value.__name__, builtins[0] if builtins else None)]
    derived = [one for one in value.__subclasses__() if one.__module__ == errors.__name__]
    for one in derived:
        is_last = one is derived[-1]
        own = indent + ("└── " if is_last else "├── ")
        lines += drawn(one, own, indent + ("    " if is_last else "│   "))
    return lines


def test_the_drawn_tree_is_that_of_the_classes() -> None:
    """Names, parents and built-in bases; one `except TorchBudgetError` catches all errors."""
    drawing = (errors.__doc__ or "").split("```")[1]
    found = re.findall(r"^([│├└─ ]*\w+) *(?:\((\w+)\))?", drawing.partition("\n")[2], re.MULTILINE)
    expected = [*drawn(errors.TorchBudgetError), *drawn(errors.TorchBudgetWarning)]
    expected[0] = "TorchBudgetError", None
    assert found == [(name, base or "") for name, base in expected]
    assert {name.split()[-1] for name, _ in found} == set(error_names())


# ---------------------------------------------------------------------- importing

OPTIONAL = {
    "tqdm", "matplotlib", "pandas", "datasets", "pyarrow", "tensorboard", "torchdata",
    "transformers", "accelerate", "lightning", "PIL", "scipy",
}  # fmt: skip


def test_importing_does_nothing(tmp_path: Path) -> None:
    """Beyond what torch, NumPy and psutil do.

    It initialises no device, loads no optional package, reads no environment, starts no thread,
    writes no file and adds no handler; generators and defaults stay.
    """
    script = ROOT / "tests" / "support" / "script_import.py"
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "HOME": "/"}
    flags = ["-B", "-P"] if sys.version_info >= (3, 11) else ["-B"]
    done = python(*flags, script, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    modules = set(found.pop("modules"))
    assert "torchbudget" in modules
    assert not OPTIONAL & modules
    assert found.pop("same")
    assert not any(found.values()), found


# ---------------------------------------------------------------------- the version


def test_the_changelog_knows_the_version() -> None:
    """A release has its own heading; before it, changes are listed as unreleased."""
    version = torchbudget.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", version)
    page = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## \[(.+?)\]", page, re.MULTILINE)
    assert headings[0] in ("Unreleased", version)
    assert "dev" in version or version in headings


def test_the_package_is_typed() -> None:
    assert (ROOT / "torchbudget" / "py.typed").exists()


# ---------------------------------------------------------------------- docs/troubleshooting.md


PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
ROOTS = ("TorchBudgetError", "TorchBudgetWarning")  # never raised themselves
NAMES = [name for name in error_names() if name not in ROOTS]


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
