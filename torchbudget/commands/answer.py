"""What a command answers, and how it says that it was used wrongly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command prints on stdout, and whether its answer is yes.

    Attributes:
        text: for stdout.
        failed: what was checked and does not hold, for stderr; empty where all is well.
        code: that the process is to end with, where it is another program's.
    """

    text: str = ""
    failed: tuple[str, ...] = ()
    code: int = 0

    @property
    def exit_code(self) -> int:
        """0, 1 where a check failed, or another program's."""
        return self.code or int(bool(self.failed))


class UsageError(Exception):
    """A command was used wrongly: a file that cannot be read, an argument that says nothing."""


def as_json(value: Any) -> str:
    """A result for other programs."""
    return json.dumps(value, indent=2, allow_nan=False, default=str)
