"""The command line, `python -m torchbudget`.

Results go to stdout, everything else to stderr. A command ends with 0; with 1 if the answer is no
(a check fails, sizes do not fit, a step cannot be measured); with 2 if it was used wrongly.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchbudget.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a command.

    Attributes:
        text: the result, for stdout.
        failed: failed checks, for stderr; empty if the answer is yes.
        code: another program's exit code, which is passed on.
    """

    text: str = ""
    failed: tuple[str, ...] = ()
    code: int = 0


class Command(NamedTuple):
    """One command.

    Attributes:
        help: one line for the list of commands.
        description: text for the command's own help.
        add_arguments: adds the command's arguments to its parser.
        run: answers, or raises a `TorchBudgetError` if the command was used wrongly.
    """

    help: str
    description: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], Answer]


def as_json(value: Any) -> str:
    """A result for other programs."""
    return json.dumps(value, indent=2, allow_nan=False, default=str)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix.

    Raises:
        OptionError: the file cannot be written, or there is no such format.
    """
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot write {path}: {error}") from error
