"""Files that are there as a whole or not at all, also after a loss of power."""

from __future__ import annotations

import errno
import json
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from torchbudget.distributed import Ranks
from torchbudget.errors import StateMismatchError


def write_whole(
    path: Path,
    write: Callable[[IO[bytes]], object],
    *,
    check: Callable[[Path], object] = lambda _: None,
    by_several: bool = False,
) -> None:
    """Write a file beside, and put it in the place of the former once it is on the disk.

    Args:
        path: of the file, in a folder that exists.
        write: what it is to have, into an open file.
        check: called with what was written, before it takes its place; raises if it is no good.
        by_several: processes may write it at the same time, so that each needs a name of its own
            for what it writes; one that is killed then leaves that behind.

    Raises:
        OSError: it cannot be written; the former is whole.
    """
    own = f"{uuid.uuid4().hex}." if by_several else ""
    partial = path.with_name(f"{path.name}.{own}part")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        check(partial)
        partial.replace(path)
        _sync_folder(path.parent)  # until then, a loss of power could undo the renaming
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, where they do not exist yet."""
    new = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in new:  # until then, a loss of power could take it away with what is in it
        _sync_folder(one.parent)


class PieceFolder:
    """Objects in a folder that all ranks see, in numbered pieces; a piece counts on all ranks.

    Files are pickled: open no folder that others may write to.

    Args:
        folder: is made where it does not exist.
        key: describes the work that the pieces are of.
        ranks: all of them make one.

    Raises:
        StateMismatchError: the pieces in the folder have another key.
    """

    def __init__(self, folder: Path, key: Mapping[str, str], ranks: Ranks) -> None:
        self._folder, self._key, self._ranks = folder, dict(key), ranks
        ranks.each(lambda: make_folder(folder))
        self._names = ranks.each(lambda: [] if ranks.rank else self._begin())[0]
        self._number = len({name.split("-")[0] for name in self._names})

    def _begin(self) -> list[str]:
        """Check the key, remove pieces that a rank lacks and return the names of the others."""
        path = self._folder / "key.json"
        if path.exists():
            found = json.loads(path.read_text())
            if differing := [name for name, one in self._key.items() if found.get(name) != one]:
                raise StateMismatchError(
                    f"{self._folder} belongs to another {', '.join(differing)}: {differing[0]} is "
                    f"{self._key[differing[0]]!r}, was {found.get(differing[0])!r}; give another "
                    "folder, or remove this one"
                )
        else:
            text = json.dumps(self._key)
            write_whole(path, lambda file: file.write(text.encode()))
        files = sorted(self._folder.glob("*-of-*.piece"))
        whole: list[str] = []
        for number, (_, group) in enumerate(groupby(files, lambda one: one.name.split("-")[0])):
            names = [one.name for one in group]
            first = f"{number:06}-{names[0].split('-')[1]}-of-{len(names)}.piece"
            if names[0] != first:
                break
            whole += names
        for one in files[len(whole) :]:
            one.unlink()
        return whole

    def add(self, piece: object) -> None:
        """Write this rank's part of the next piece."""
        number, ranks = f"{self._number:06}", self._ranks
        names = [f"{number}-{rank}-of-{len(ranks)}.piece" for rank in range(len(ranks))]
        write_whole(self._folder / names[ranks.rank], lambda file: pickle.dump(piece, file))
        self._names += names
        self._number += 1

    def pieces(self) -> Iterator[Any]:
        """Read the parts of all ranks, the last piece first; once all ranks have written theirs."""
        for name in reversed(self._names):
            yield pickle.loads((self._folder / name).read_bytes())  # noqa: S301


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(folder)
