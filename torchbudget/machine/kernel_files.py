"""Reading the small text files of Linux's `/proc` and of control groups."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from torchbudget.errors import MachineError

ROOT: Final = Path("/")


def read_lines(path: Path) -> list[str]:
    """The lines of one of the kernel's files; none where there is no such file.

    Raises:
        MachineError: the file exists, but cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error


def read_number(path: Path) -> int | None:
    """A file with one number; None where there is no such file, or it says "max"."""
    text = "".join(read_lines(path))
    return int(text) if text.isdecimal() else None


def read_fields(path: Path) -> dict[str, int]:
    """A file of lines such as `inactive_file 4096` or `VmRSS:    12 kB`; the latter in bytes."""
    fields = {}
    for line in read_lines(path):
        key, _, rest = line.partition(" " if ":" not in line else ":")
        value, _, unit = rest.strip().partition(" ")
        if value.isdecimal():
            fields[key] = int(value) * (1024 if unit == "kB" else 1)
    return fields
