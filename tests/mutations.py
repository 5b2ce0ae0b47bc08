"""Do the tests notice when the code is wrong?

Each mutation changes one place of `plan/`, `data/`, `train/` or `cost/`: a comparison is moved or
turned, a constant moved, a statement or an argument dropped, `and` exchanged with `or`, `+` with
`-`. In a copy of the tree, the tests that import the changed module are run until one fails, those
that name most of it first. A mutation that no test notices is a hole in the tests, unless it
changes nothing that can be seen: a person decides that.

    python tests/mutations.py --count 300 --seed 0 --record mutations.jsonl

The run can be stopped and started again: what is in the record is not run anew. A failure counts if
the same test passes without the mutation. Where the seconds of a mutation are spent before all its
tests were run, it is undecided.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
ROOMS: Final = ("plan", "data", "train", "cost")
NOT_NOTICED: Final = "not noticed"
UNDECIDED: Final = "undecided"
# They start processes of their own, and take minutes.
_LEFT_OUT: Final = ("tests/test_benchmarks.py", "tests/test_examples.py")

_PASSING_ON: Final = ("torchbudget", "torchbudget.readers", "torchbudget.transforms")

_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """One change of one place.

    Attributes:
        path: of the module, from the root of the tree.
        line: where the change begins.
        kind: of the change.
        start: of the text that is replaced, in bytes.
        stop: its end.
        new: what replaces it.
    """

    path: str
    line: int
    kind: str
    start: int
    stop: int
    new: str

    def applied(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.start] + self.new.encode() + source[self.stop :]

    @property
    def room(self) -> str:
        """The folder below `torchbudget/`."""
        return self.path.split("/")[1]

    @property
    def name(self) -> str:
        """The same in every run over the same tree."""
        return f"{self.path}:{self.line} {self.kind} [{self.start}:{self.stop}] {self.new}"


# ---------------------------------------------------------------------- what is changed


def mutations_of(root: Path, path: Path) -> Iterator[Mutation]:
    """Every mutation of a module of a tree."""
    source = path.read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    for node in _reached(ast.parse(source)):
        for kind, new in _changes(node):
            yield Mutation(
                path=str(path.relative_to(root)),
                line=node.lineno,
                kind=kind,
                start=lines[node.lineno - 1] + node.col_offset,
                stop=lines[node.end_lineno - 1] + node.end_col_offset,
                new=new,
            )


def _reached(node: ast.AST) -> Iterator[Any]:
    """The nodes below one, less those that no test could see: types, texts, what is printed."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, (ast.JoinedStr, ast.Raise)):
                continue
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, ast.FunctionDef) and child.name in ("__repr__", "__str__"):
                continue
            if hasattr(child, "lineno"):
                yield child
            yield from _reached(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The kind of each change of a node, and the text in its place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        turned = _COMPARISONS[type(node.ops[0])]()
        yield "comparison", _in_brackets(ast.Compare(node.left, [turned], node.comparators))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", repr(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", repr(node.value * 1.1)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", _in_brackets(ast.BoolOp(other, node.values))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)):
        sign = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield "+/-", _in_brackets(ast.BinOp(node.left, sign, node.right))
    elif isinstance(node, ast.Call):
        for number, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                other_call = copy.copy(node)
                other_call.keywords = node.keywords[:number] + node.keywords[number + 1 :]
                yield f"argument {keyword.arg}", ast.unparse(other_call)
    elif _is_droppable(node):
        yield "statement", "pass"


def _is_droppable(node: ast.AST) -> bool:
    """Whether it is a statement without which all names are still defined."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, (ast.Call, ast.YieldFrom))
    if isinstance(node, ast.Assign):
        return not isinstance(node.targets[0], (ast.Name, ast.Tuple))
    return isinstance(node, ast.AugAssign)


def _in_brackets(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


# ---------------------------------------------------------------------- which tests are run


@cache
def _modules(root: Path) -> dict[str, Path]:
    """The modules of the library and of the tests."""
    found = {}
    for path in [*root.glob("torchbudget/**/*.py"), *root.glob("tests/**/*.py")]:
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _imports(root: Path, module: str) -> frozenset[str]:
    """What a module imports, also in the scripts that it has as texts, for other processes."""
    nodes = list(ast.walk(ast.parse(_modules(root)[module].read_text())))
    for text in [n.value for n in nodes if isinstance(n, ast.Constant)]:
        if isinstance(text, str) and "import" in text and "\n" in text:
            with suppress(SyntaxError):
                nodes += ast.walk(ast.parse(text))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(_defining(root, node.module, alias.name) for alias in node.names)
    if "torchbudget" in found:  # as a whole: `tb.PadCollate`
        found.update(_imports_of_names(root, "torchbudget").values())
    return frozenset(found & _modules(root).keys()) - {"torchbudget"}


@cache
def _imports_of_names(root: Path, module: str) -> dict[str, str]:
    """The module that each imported name comes from."""
    nodes = ast.walk(ast.parse(_modules(root)[module].read_text()))
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in froms for alias in node.names}


def _defining(root: Path, module: str, name: str) -> str:
    """The module that a name is imported from, where another one passes it on."""
    if f"{module}.{name}" in _modules(root):
        return f"{module}.{name}"
    if module in _PASSING_ON:
        return _imports_of_names(root, module).get(name, module)
    return module


@cache
def _reached_from(root: Path, test: str) -> set[str]:
    """The modules that a test imports, and those that they do."""
    found, waiting = {test}, [test]
    while waiting:
        new = _imports(root, waiting.pop()) - found
        found |= new
        waiting += new
    return found


def tests_of(root: Path, path: str, seconds: dict[str, float]) -> list[str]:
    """The test files that import a module: those of its name first, then by what they name."""
    changed = ".".join(Path(path).with_suffix("").parts)
    stem = changed.rsplit(".", 1)[-1]
    definitions = (ast.ClassDef, ast.FunctionDef)
    nodes = ast.walk(ast.parse(_modules(root)[changed].read_text()))
    names = {node.name for node in nodes if isinstance(node, definitions)}
    ranked = []
    for test, file in _modules(root).items():
        name = str(file.relative_to(root))
        if file.name.startswith("test_") and changed in _reached_from(root, test):
            words = set(re.findall(r"\w+", file.read_text()))
            ranked.append((stem not in file.stem, -len(words & names), seconds.get(name, 0), name))
    return [name for *_, name in sorted(ranked) if name not in _LEFT_OUT]


# ---------------------------------------------------------------------- running them


class Copy:
    """A copy of the tree, in which one module at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("torchbudget", "tests", "examples", "docs"):
            shutil.copytree(ROOT / name, folder / name)
        for name in ("pyproject.toml", "conftest.py", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, folder / name)

    def failure(self, tests: list[str], limit_s: float) -> str | None:
        """The first test that fails; `None`: all pass.

        Raises:
            subprocess.TimeoutExpired: they take longer.
        """
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider",
            "--hypothesis-seed=0", "--timeout=120", *tests,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=self.folder, env=environment, timeout=limit_s, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode in (0, 5):  # 5: all were left out
            return None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        return failed[1] if failed else "a crash"

    def tried(self, mutation: Mutation, seconds: dict[str, float], limit_s: float) -> str:
        """The test that notices a mutation, or one of the two outcomes below."""
        module = self.folder / mutation.path
        source = module.read_bytes()
        module.write_bytes(mutation.applied(source))
        end, failed = time.monotonic() + limit_s, None
        try:
            for test in tests_of(self.folder, mutation.path, seconds):
                began = time.monotonic()
                failed = self.failure([test], max(end - began, 1))
                if failed is not None:
                    break
                seconds[test] = time.monotonic() - began
        except subprocess.TimeoutExpired:
            return UNDECIDED
        finally:
            module.write_bytes(source)
        if failed is None:
            return NOT_NOTICED
        again = failed if "::" in failed else test  # a file that broke off names no test
        with suppress(subprocess.TimeoutExpired):
            if self.failure([again], 600) is None:
                return failed
        return UNDECIDED  # it fails without the mutation, too


# ---------------------------------------------------------------------- the table


def table_of(found: list[dict[str, Any]]) -> str:
    """Noticed, not and undecided in each room, and each that was not."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for one in found:
        rooms[one["path"].split("/")[1]][one["outcome"]] += 1
    lines = [f"{'room':<8}{'noticed':>9}{'not':>6}{'undecided':>11}"]
    for room, counts in [*sorted(rooms.items()), ("all", sum(rooms.values(), Counter()))]:
        missed, undecided = counts[NOT_NOTICED], counts[UNDECIDED]
        noticed = counts.total() - missed - undecided
        lines.append(f"{room:<8}{noticed:>9}{missed:>6}{undecided:>11}")
    for one in found:
        if one["outcome"] == NOT_NOTICED:
            lines += ["", f"{one['path']}:{one['line']}: {one['kind']}: {one['old']}"]
            lines.append(f"    -> {one['new']}")
    return "\n".join(lines)


def main() -> None:
    """Try so many mutations, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300, help="mutations, over all rooms")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    parser.add_argument("--limit-s", type=float, default=1800, help="seconds for each mutation")
    parser.add_argument("--record", type=Path, default=Path("mutations.jsonl"))
    options = parser.parse_args()
    lines = options.record.read_text().splitlines() if options.record.exists() else []
    known = {one["name"]: one for one in map(json.loads, lines)}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, options.record.open("a") as record:
        tree = Copy(Path(folder))  # of which all is read: the tree itself may change meanwhile
        every = [
            mutation
            for room in options.rooms
            for path in sorted((tree.folder / "torchbudget" / room).rglob("*.py"))
            for mutation in mutations_of(tree.folder, path)
        ]
        chosen = random.Random(options.seed).sample(every, min(options.count, len(every)))
        for mutation in chosen:
            if mutation.name not in known:
                source = (tree.folder / mutation.path).read_bytes()
                found = {
                    "name": mutation.name,
                    **asdict(mutation),
                    "old": " ".join(source[mutation.start : mutation.stop].decode().split()),
                    "outcome": tree.tried(mutation, seconds, options.limit_s),
                }
                known[mutation.name] = found
                print(json.dumps(found), file=record, flush=True)
                print(f"{found['outcome']}: {mutation.name}", flush=True)
    print(table_of([known[mutation.name] for mutation in chosen]))


if __name__ == "__main__":
    main()
