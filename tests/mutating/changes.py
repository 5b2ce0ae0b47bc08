"""The changes of a module that its tests should notice."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

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
        last_line: where it ends.
        kind: of the change.
        start: of the text that is replaced, in bytes.
        stop: its end.
        new: what replaces it.
    """

    path: str
    line: int
    last_line: int
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
                last_line=node.end_lineno,
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
        yield "constant", repr(node.value * 1.1 or 0.1)
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
