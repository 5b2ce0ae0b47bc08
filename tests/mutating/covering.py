"""Which tests would notice a change: those that run its lines, the quickest first."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

from coverage import CoverageData

from tests.mutating.changes import Mutation


def record(tree: Path, folder: Path) -> None:
    """Run the tests of a tree once, those marked slow left out, and record what each runs."""
    folder.mkdir(parents=True)
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "tests.mutating.recorder",
        "-p", "no:cacheprovider", "--hypothesis-seed=0", "--timeout=600",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tree), "TORCHBUDGET_RECORD": str(folder)}
    subprocess.run(command, cwd=tree, env=environment, check=False)


class Covering:
    """The tests of a record, by the lines that they run.

    Args:
        tree: whose tests were recorded.
        folder: of the record.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.tree = tree
        self.seconds: dict[str, float] = defaultdict(float)
        failed = set()
        for line in (folder / "tests.jsonl").read_text().splitlines():
            phase = json.loads(line)
            self.seconds[phase["test"]] += phase["seconds"]
            if not phase["passed"]:  # skipped ones as well
                failed.add(phase["test"])
        for test in failed:
            del self.seconds[test]
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for file in folder.glob("lines.*"):
            data = CoverageData(str(file))
            data.read()
            for module in data.measured_files():
                name = module.rpartition("/torchbudget/")[2]  # the tree was in another folder
                for line, tests in data.contexts_by_lineno(module).items():
                    self._lines[f"torchbudget/{name}"][line].update(tests)

    def tests_of(self, mutation: Mutation) -> list[str]:
        """Those that run the changed lines; where none does, as when importing, its module's."""
        lines = self._lines[mutation.path]
        changed = range(mutation.line, mutation.last_line + 1)
        found = set().union(*(lines[line] for line in changed if line in lines))
        found &= self.seconds.keys()
        if not found:
            found = set().union(*lines.values()) & self.seconds.keys()
        near = f"tests/{mutation.room}/"
        return sorted(found, key=lambda test: (not test.startswith(near), self.seconds[test], test))

    def files_of(self, mutation: Mutation) -> list[str]:
        """The files of tests that name what a module defines, those that name most of it first.

        What other processes run is not recorded: these may start them.
        """
        definitions = (ast.ClassDef, ast.FunctionDef)
        nodes = ast.walk(ast.parse((self.tree / mutation.path).read_text()))
        names = {node.name for node in nodes if isinstance(node, definitions)}
        stem = Path(mutation.path).stem
        ranked = []
        for file, words in _words(self.tree).items():
            common = len(words & names)
            if common or stem in Path(file).stem:
                ranked.append((stem not in Path(file).stem, -common, file))
        return [file for *_, file in sorted(ranked)]


@cache
def _words(tree: Path) -> dict[str, set[str]]:
    """The words of each file of tests."""
    files = (tree / "tests").rglob("test_*.py")
    return {str(f.relative_to(tree)): set(re.findall(r"\w+", f.read_text())) for f in files}
