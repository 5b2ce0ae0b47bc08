"""The files of a training: each is there as a whole or not at all, after a loss of power too."""

from __future__ import annotations

import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import torch

from torchbudget.errors import StateError
from torchbudget.files import write_whole

_VERSION: Final = 4


class RunFolder:
    """`last.pt`, `best.pt` and `statistics.jsonl`, which the first rank writes.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._statistics = path / "statistics.jsonl"
        self._loads = False  # whether a checkpoint was loaded back

    def read(self) -> dict[str, Any] | None:
        """The last checkpoint; `None` if there is none.

        Raises:
            StateError: it is damaged, or no checkpoint of `fit`.
            OSError: it cannot be read.
        """
        path = self.path / "last.pt"
        return _read(path) if path.exists() else None

    def save(self, state: Mapping[str, Any]) -> None:
        """Write `last.pt`, after all statistics; the first time, check that it can be loaded.

        Raises:
            StateError: the state can be saved, but not be loaded.
        """
        if self._statistics.exists():  # a checkpoint must not reach the disk before their lines
            with self._statistics.open("rb") as file:
                os.fsync(file.fileno())
        whole = {"version": _VERSION, "id": secrets.token_hex(8), **state}
        check = (lambda _: None) if self._loads else _read
        self._write("last.pt", lambda file: torch.save(whole, file), check=check)
        self._loads = True

    def save_best(self, state: Mapping[str, Any]) -> None:
        """Write `best.pt`: a model's parameters and buffers."""
        self._write("best.pt", lambda file: torch.save(state, file))

    def _write(self, name: str, write: Callable[[IO[bytes]], object], **options: Any) -> None:
        path = self.path / name
        with _naming(path):
            write_whole(path, write, **options)

    def write_record(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append a line to the statistics; numbers that are not finite are no JSON, but null."""
        finite = {
            name: None if isinstance(one, float) and not math.isfinite(one) else one
            for name, one in record.items()
        }
        line = json.dumps({"kind": kind, **finite}, allow_nan=False) + "\n"
        path = self._statistics
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line)

    def forget_after(self, last: Mapping[str, int]) -> None:
        """Drop the lines of steps that will be repeated, and lines that a fault has cut off.

        Args:
            last: for each kind, the number of the last record that is kept.
        """
        if not self._statistics.exists():
            return
        text = self._statistics.read_text("utf-8", errors="replace")
        kept = "".join(f"{line}\n" for line in text.split("\n") if _is_kept(line, last))
        if kept != text:
            self._write(self._statistics.name, lambda file: file.write(kept.encode()))


def _is_kept(line: str, last: Mapping[str, int]) -> bool:
    try:
        record = json.loads(line)
        return bool(record["number"] <= last[record["kind"]])
    except ValueError:
        return False
    except (KeyError, TypeError):  # not the state of a training
        return True


def _read(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not compare the check sums
        if damaged is not None:
            raise zipfile.BadZipFile(f"the check sum of {damaged} is wrong")
        loaded: dict[str, Any] = torch.load(path, "cpu", weights_only=True)
        if loaded["version"] != _VERSION:
            raise ValueError(f"version {loaded['version']}, not {_VERSION}")
    except (OSError, MemoryError):
        raise  # the file may be whole
    except Exception as error:  # a damaged pickle raises anything
        raise StateError(
            f"{path} cannot be loaded ({type(error).__name__}: {error}). If it is new, a callback "
            "or an optimizer has values other than tensors, numbers and strings in its state. If "
            "not, it is damaged or belongs to another fit: restore a copy of it, or remove it to "
            "train from the beginning"
        ) from error
    return loaded


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name and the next step to an error of the system."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises one of its own instead
        raise OSError(
            f"{path} cannot be written ({error.__context__ or error}); the previous checkpoint is "
            "intact: free disk space, and call fit again with this folder to continue from it"
        ) from error
