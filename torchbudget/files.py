"""Files that are there as a whole or not at all, also after a loss of power."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO


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


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot
            raise
    finally:
        os.close(folder)
