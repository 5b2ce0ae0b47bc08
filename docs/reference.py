"""Writes signatures and first lines of docstrings into `docs/api.md`: `python docs/reference.py`.

So the page can be read where nobody builds it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from textwrap import fill
from typing import Any, Final

PAGE: Final = Path(__file__).parent / "api.md"
_BEGIN, _END = "<!--- in short -->\n", "<!--- end -->\n\n"
_BLOCK: Final = re.compile(rf"(?:{_BEGIN}.*?{_END})?(```{{eval-rst}}\n.*?```\n)", re.DOTALL)
_NAME: Final = re.compile(
    r"^\.\. (currentmodule|autoclass|autofunction|autoexception):: ([\w.]+)(\(\))?", re.MULTILINE
)


def with_summaries(page: str) -> str:
    """The page, with a list of what each block of Sphinx documents before it."""
    module = ""

    def summed_up(block: re.Match[str]) -> str:
        nonlocal module
        lines = []
        for kind, name, is_returned in _NAME.findall(block[1]):
            if kind == "currentmodule":
                module = name
                continue
            path = name if name.startswith("torchbudget.") else f"{module}.{name}"
            lines.append(_line(path, shows_arguments=not is_returned))
        found = "\n".join(lines)
        return f"{_BEGIN}{found}\n\n{_END}{block[1]}" if lines else block[1]

    return _BLOCK.sub(summed_up, page)


def _line(path: str, *, shows_arguments: bool) -> str:
    """The name, its arguments if users call it, and the first line of its docstring."""
    module, _, name = path.rpartition(".")
    value = getattr(importlib.import_module(module), name)
    shown = name if module == "torchbudget" else path
    summary = (inspect.getdoc(value) or "").partition("\n")[0]
    arguments = _arguments(value) if shows_arguments else ""
    return fill(f"- `{shown}{arguments}`: {summary}", 118, subsequent_indent="  ")


def _arguments(value: Any) -> str:
    """The parameters with their defaults, of functions and of classes that users make."""
    if inspect.isclass(value) and issubclass(value, Exception):
        return ""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return ""
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return re.sub(r"<function (\S+) at \w+>", r"\1", str(inspect.Signature(plain)))


if __name__ == "__main__":
    PAGE.write_text(with_summaries(PAGE.read_text("utf-8")), "utf-8")
