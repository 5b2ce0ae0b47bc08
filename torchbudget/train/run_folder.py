"""The files of a training: each is there as a whole or not at all, after a loss of power too."""

from __future__ import annotations

import json
import math
import os
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from torchbudget.errors import StateError
from torchbudget.files import write_whole

_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.Size)


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
        """The last checkpoint; `None` where there is none.

        Raises:
            StateError: it is damaged, or no checkpoint of `fit`.
            OSError: it cannot be read.
        """
        path = self.path / "last.pt"
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not compare the check sums
            if damaged is not None:
                raise zipfile.BadZipFile(f"the check sum of {damaged} is wrong")
            loaded = torch.load(path, "cpu", weights_only=True)
            if not isinstance(loaded, dict) or not isinstance(loaded.get("run"), dict):
                raise TypeError("it has no state of a run")
        except (OSError, MemoryError):
            raise  # the file may be whole
        except Exception as error:  # a damaged pickle raises anything
            raise StateError(
                f"{path} is damaged, or no checkpoint of fit ({type(error).__name__}: {error}); "
                "put a whole copy in its place, or remove it to train from the beginning"
            ) from error
        return loaded

    def save(self, state: Any) -> None:
        """Write `last.pt`, after all statistics; the first time, check that it can be loaded.

        Raises:
            StateError: the state can be saved, but not be loaded.
        """
        self._sync_statistics()
        self._write(
            "last.pt",
            lambda file: torch.save(state, file),
            check=lambda path: None if self._loads else _check_loads(path, state),
        )
        self._loads = True

    def save_best(self, state: Mapping[str, Any]) -> None:
        """Write `best.pt`: a model's parameters and buffers."""
        self._write("best.pt", lambda file: torch.save(state, file))

    def _write(self, name: str, write: Callable[[IO[bytes]], object], **options: Any) -> None:
        path = self.path / name
        with _naming(path):
            write_whole(path, write, **options)

    # ------------------------------------------------------------------ statistics

    def write_record(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append a line to the statistics; numbers that are not finite are no JSON, but null."""
        finite = {name: None if _is_not_finite(one) else one for name, one in record.items()}
        line = json.dumps({"kind": kind, **finite}, allow_nan=False) + "\n"
        path = self._statistics
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line)

    def forget_after(self, last: Mapping[str, int]) -> None:
        """Drop the lines of what will come again, and lines that a fault has cut off.

        Args:
            last: for each kind, the number of the last record that is kept.
        """
        if not self._statistics.exists():
            return
        text = self._statistics.read_text("utf-8", errors="replace")
        kept = "".join(f"{line}\n" for line in text.split("\n") if _is_kept(line, last))
        if kept != text:
            self._write(self._statistics.name, lambda file: file.write(kept.encode()))

    def _sync_statistics(self) -> None:
        """A checkpoint must not reach the disk before the lines of its steps."""
        if self._statistics.exists():
            with _naming(self._statistics), self._statistics.open("rb") as file:
                os.fsync(file.fileno())


def _is_not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _is_kept(line: str, last: Mapping[str, int]) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    known = isinstance(record, dict) and record.get("kind") in last
    return not known or bool(record["number"] <= last[record["kind"]])


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Inside, an error of the system names the file, and says what is left."""
    handled = sys.exc_info()[1]  # by the caller
    try:
        yield
    except Exception as error:
        cause = _system_error(error, handled)
        if cause is None:
            raise
        raise OSError(
            cause.errno,
            f"cannot be written ({cause.strerror}); the checkpoint before is whole: make room, and "
            "call fit again with this folder, which goes on from there",
            str(path),
        ) from error


def _system_error(error: BaseException | None, handled: BaseException | None) -> OSError | None:
    """The system's error; `torch.save` raises one of its own instead, while it handles that one."""
    while error is not None and error is not handled and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) and error is not handled else None


def _check_loads(path: Path, state: Any) -> None:
    try:
        torch.load(path, "cpu", weights_only=True, mmap=True)
    except Exception as error:
        found = [
            f"{keystr(place)} is a {type(leaf).__module__}.{type(leaf).__qualname__}"
            for place, leaf in tree_flatten_with_path(state)[0]
            if type(leaf) not in _PLAIN and not isinstance(leaf, (Tensor, torch.device))
        ]
        raise StateError(
            "the checkpoint could not be loaded again, since torch.load(weights_only=True) takes "
            f"tensors, numbers and texts alone: {'; '.join(found) or error}"
        ) from error
