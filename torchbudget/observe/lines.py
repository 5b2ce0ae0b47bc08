"""Records in a file of JSON lines; the format is described in the guide, "Observing"."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1


class LineFile:
    """A file that lines are appended to, each in one write to the kernel.

    Nothing is buffered in this process: a process that is forked meanwhile has nothing to write a
    second time, and what was written survives this one's end.

    Args:
        path: of the file, which is made where it does not exist.

    Attributes:
        lost: lines that could not be written.
        error: why the last of them could not.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._is_torn = _is_torn(path)  # the last line has no end, perhaps of a writer before
        self.lost = 0
        self.error: OSError | None = None

    def write(self, record: Mapping[str, Any]) -> bool:
        """Append a record; whether that succeeded."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            if self._is_torn:
                line = b"\n" + line
            written = os.write(self._file, line)
            self._is_torn = written < len(line)
            if self._is_torn:
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except OSError as error:
            self.lost += 1
            self.error = error
            return False
        return True

    def close(self) -> None:
        """Close it."""
        os.close(self._file)


def _is_torn(path: str | Path) -> bool:
    """Whether a file, and nothing like a pipe or a device, ends within a line."""
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or not status.st_size:
        return False
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:  # it can be written to only: a blank line is left out
        return True


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file that a `MemoryMonitor` wrote, in order.

    Lines that a full disk or a crash cut short are left out.
    """
    records = []
    for line in Path(path).read_text("utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and "event" in record:
            records.append(record)
    return records
