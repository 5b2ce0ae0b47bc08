"""What is public, that importing it does nothing, and that the texts about it are true."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchbudget
from torchbudget import errors, readers, transforms

ROOT = Path(__file__).parents[1]

MODULES = {"errors", "readers", "transforms"}  # public, and imported with the package


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


def test_a_star_import_brings_them_all() -> None:
    namespace: dict[str, Any] = {}
    exec("from torchbudget import *", namespace)  # noqa: S102
    assert set(torchbudget.__all__) <= set(namespace)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_documented_and_ours(name: str) -> None:
    """Classes and functions are the library's own, and say what they are in one line first."""
    value = attrgetter(name)(torchbudget)
    assert value.__module__.startswith("torchbudget")
    assert value.__name__ == name.rpartition(".")[2]
    doc = inspect.getdoc(value)
    assert doc
    first = doc.splitlines()[0]
    assert first.endswith((".", "`", ":")), first


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


@pytest.mark.parametrize("name", documented_names())
def test_what_the_reference_documents_is_there(name: str) -> None:
    """A record stands in the module that defines it, which users import it from."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    assert module.count(".") < 2 or value.__module__ == module


def public_methods() -> list[Any]:
    return [
        pytest.param(member, id=f"{name}.{attribute}")
        for name in PUBLIC
        if inspect.isclass(owner := attrgetter(name)(torchbudget))
        for attribute, member in vars(owner).items()
        if not attribute.startswith("_")
        and (callable(member) or isinstance(member, (property, classmethod, staticmethod)))
    ]


@pytest.mark.parametrize("member", public_methods())
def test_every_public_method_is_documented(member: Any) -> None:
    assert inspect.getdoc(member)


def test_every_module_is_documented_and_imports() -> None:
    """Each module can be imported by itself, and its docstring says what it is for."""
    for module in pkgutil.walk_packages(torchbudget.__path__, "torchbudget."):
        if not module.name.endswith("__main__"):
            assert importlib.import_module(module.name).__doc__, module.name


# ---------------------------------------------------------------------- errors


def tree_of(text: str) -> dict[str, tuple[str, str | None]]:
    """The drawn tree: each name's parent and the built-in that stands beside it."""
    drawing = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert drawing
    found: dict[str, tuple[str, str | None]] = {}
    path: list[str] = []
    for line in drawing.group(1).splitlines():
        if not line.strip():
            continue
        entry = re.match(r"((?:│   |    )*(?:├── |└── )?)(\w+)(?:\s+\((\w+)\))?", line)
        assert entry, line
        depth = len(entry.group(1)) // 4
        path[depth:] = [entry.group(2)]
        found[entry.group(2)] = (path[depth - 1] if depth else "", entry.group(3))
    return found


def test_the_drawn_tree_is_that_of_the_classes() -> None:
    """Names, parents and built-in bases of the docstring's drawing are those of the module."""
    drawn = tree_of(errors.__doc__ or "")
    classes = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert set(drawn) == set(classes)
    for name, (parent, builtin) in drawn.items():
        bases = [base.__name__ for base in classes[name].__bases__]
        expected = [parent or "Exception", builtin]
        if name == "TorchBudgetWarning":
            expected = ["UserWarning", None]
            assert builtin == "UserWarning"
        assert bases == [base for base in expected if base], name


def test_the_errors_on_top_are_those_that_most_callers_catch() -> None:
    on_top = {"OversizeError", "StateMismatchError", "TorchBudgetError"}
    assert on_top == set(torchbudget.__all__) & set(error_names())


def test_errors_are_caught_by_their_root_and_by_built_ins() -> None:
    """One `except TorchBudgetError` catches all; warnings are no errors of that tree."""
    for name in tree_of(errors.__doc__ or ""):
        value = getattr(errors, name)
        root = errors.TorchBudgetWarning if "Warning" in name else errors.TorchBudgetError
        assert issubclass(value, root)
    assert not issubclass(errors.TorchBudgetWarning, errors.TorchBudgetError)


def test_a_missing_extra_names_the_extra() -> None:
    error = errors.MissingExtraError.of("matplotlib", "plot")
    assert isinstance(error, ImportError)
    assert "matplotlib is not installed" in str(error)
    assert "pip install 'torchbudget[plot]'" in str(error)


# ---------------------------------------------------------------------- importing

PROBE = """
import json, os, sys, threading, warnings
warnings.simplefilter("error")
import torch, torch.utils.data, torch.distributed, numpy, psutil

class Watched(dict):
    def _note(self):
        frame = sys._getframe(2)
        while frame:  # also where other code reads it for the library
            if "/torchbudget/" in frame.f_code.co_filename:
                reads.append(frame.f_code.co_filename)
                return
            frame = frame.f_back
    def __getitem__(self, key):
        self._note()
        return super().__getitem__(key)
    def get(self, key, default=None):
        self._note()
        return super().get(key, default)
    def __contains__(self, key):
        self._note()
        return super().__contains__(key)

reads = []
os.environ = Watched(os.environ)
os.getenv = os.environ.get
before, threads = set(sys.modules), threading.active_count()
state, files = torch.get_rng_state(), set(os.listdir("."))
defaults = torch.get_default_dtype(), torch.get_num_threads(), numpy.random.get_state()[1].tolist()
import torchbudget
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "reads": reads,
    "cuda": torch.cuda.is_initialized(),
    "distributed": torch.distributed.is_initialized(),
    "threads": threading.active_count() - threads,
    "rng": torch.equal(torch.get_rng_state(), state),
    "files": sorted(set(os.listdir(".")) - files),
    "same": defaults == (torch.get_default_dtype(), torch.get_num_threads(),
                         numpy.random.get_state()[1].tolist()),
    "handlers": len(__import__("logging").getLogger("torchbudget").handlers),
}))
"""

OPTIONAL = {
    "tqdm", "matplotlib", "pandas", "datasets", "pyarrow", "tensorboard", "torchdata",
    "transformers", "accelerate", "lightning", "PIL", "scipy",
}  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What an import did in a process of its own, beyond what torch, NumPy and psutil do."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", PROBE],
        cwd=tmp_path_factory.mktemp("import"),
        env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": "/"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_importing_initialises_no_device(imported: Any) -> None:
    assert not imported["cuda"]
    assert not imported["distributed"]


def test_importing_needs_no_optional_package(imported: Any) -> None:
    """Beyond the three dependencies nothing that has to be installed is loaded."""
    assert not OPTIONAL & set(imported["modules"])
    assert "torchbudget" in imported["modules"]


def test_importing_reads_no_environment(imported: Any) -> None:
    assert imported["reads"] == []


def test_importing_leaves_everything_as_it_was(imported: Any) -> None:
    """No thread, no file, no handler; generators and defaults stay."""
    assert imported["threads"] == 0
    assert imported["files"] == []
    assert imported["handlers"] == 0
    assert imported["rng"]
    assert imported["same"]


# ---------------------------------------------------------------------- the version


def test_the_version_is_one_that_installers_read() -> None:
    """A release, or a development state before it, as the packaging rules spell them."""
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|(a|b|rc)\d+)?", torchbudget.__version__)


def test_the_changelog_knows_the_version() -> None:
    """A release has its own heading; before it, changes are listed as unreleased."""
    headings = re.findall(
        r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    version = torchbudget.__version__
    assert headings
    assert headings[0] == "Unreleased" or headings[0] == version
    if "dev" not in version:
        assert version in headings


def test_the_package_is_typed() -> None:
    assert (ROOT / "torchbudget" / "py.typed").exists()
