"""Runs the Python examples of `README.md`, of `docs/*.md` and of the library's docstrings.

One test per file: its examples share a namespace, which pytest-xdist would split if each were a
test of its own. Every docstring starts with the names of its module and of `torchbudget`.
"""

from __future__ import annotations

import contextlib
import doctest
import gc
import os
import tempfile
import warnings
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

# pytest-xdist starts a process per core: more threads in each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As `configure_allocators` states: convolutions are warned of without them.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
os.environ.setdefault("LRU_CACHE_CAPACITY", "32")

import torch
import torch._dynamo  # optimizers import it when they are first used
from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.example import SybilFailure
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser
from sybil.python import import_path

import torchbudget

ROOT = Path(__file__).parent

_OPTIONS = doctest.ELLIPSIS
_PAGES = Sybil([PythonCodeBlockParser(doctest_optionflags=_OPTIONS), SkipParser()])
_MODULES = Sybil([DocTestParser(optionflags=_OPTIONS)])

collect_ignore_glob = ["docs/_build/*"]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The README, the pages in `docs/` themselves, and every module of the library."""
    if file_path == ROOT / "README.md" or (
        file_path.parent == ROOT / "docs" and file_path.suffix == ".md"
    ):
        return ExampleFile.from_parent(parent, path=file_path)
    if file_path.is_relative_to(ROOT / "torchbudget") and file_path.suffix == ".py":
        return ExampleFile.from_parent(parent, path=file_path)
    return None


@pytest.fixture(scope="module", autouse=True)
def _imported_stays() -> None:
    """What is imported by now stays: searching it anew at each `gc.collect()` takes 0.3 s."""
    gc.collect()
    gc.freeze()


class ExampleFile(pytest.File):
    """A page or a module; without examples it has no test."""

    def collect(self) -> Iterator[pytest.Item]:
        """One test, without running or importing anything yet."""
        is_module = self.path.suffix == ".py"
        if ">>>" in self.path.read_text("utf-8") or not is_module:
            yield Examples.from_parent(self, name="docstrings" if is_module else "examples")


class Examples(pytest.Item):
    """All examples of a file, in order."""

    def runtest(self) -> None:
        """Run them in an empty folder, which they may write to; restores torch's generator."""
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.MonkeyPatch.context() as patch,
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
        ):
            patch.chdir(folder)
            # Python 3.12 and later warn of every fork under pytest-xdist, which has threads.
            warnings.filterwarnings("ignore", ".*multi-threaded.*fork", DeprecationWarning)
            # torchdata 0.11 calls it on importing its StatefulDataLoader with newer torch.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            # Warns of a step that needs slightly more than predicted, and plans for it.
            warnings.filterwarnings("ignore", ".*replan", torchbudget.errors.MeasureWarning)
            if self.path.suffix == ".py":
                self._run_docstrings()
            else:
                self._run_page()

    def _run_page(self) -> None:
        for example in _PAGES.parse(self.path):
            with contextlib.suppress(SkipTest):
                example.evaluate()

    def _run_docstrings(self) -> None:
        document = _MODULES.parse(self.path)
        document.evaluators.clear()  # Sybil's own import keeps one namespace for all docstrings
        fresh = {**vars(torchbudget), **vars(import_path(self.path))}
        starts = sorted(s for s, *_ in PythonDocStringDocument.extract_docstrings(document.text))
        current = -1
        for example in document:
            if (docstring := bisect(starts, example.start)) != current:
                current = docstring
                document.namespace.clear()
                document.namespace.update(fresh)
            example.evaluate()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The expected and the actual output of an example; a traceback for other errors."""
        if isinstance(excinfo.value, SybilFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """The name in pytest's output."""
        return self.path, None, self.nodeid
