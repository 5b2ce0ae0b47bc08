"""Real memory control groups for tests: made beside this process's own, and always removed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.commands import ENVIRONMENT

SHM = Path("/dev/shm")
# The shell joins the group before it becomes Python, so that all of Python's memory is charged
# there: what a process holds stays with the group that it had when it took it.
JOIN = 'echo $$ > "$0" && exec "$@"'

# Code that holds as many bytes as its argument says, prints a line, and ends after another.
HOLD = """
import sys
taken = bytearray(b"\\1") * int(sys.argv[1])
print("ready", flush=True)
input()
"""


def skip_on_tmpfs(folder: Path) -> None:
    """Skip a test that needs files with a page cache."""
    if subprocess.check_output(["stat", "-f", "-c", "%T", str(folder)]) == b"tmpfs\n":
        pytest.skip(f"{folder} is a tmpfs")


@dataclass(frozen=True)
class MemoryGroup:
    version: int
    folder: Path

    @property
    def kills(self) -> int:
        """How many processes of the group the kernel has killed for memory."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = (self.folder / name).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def kill_all(self) -> None:
        """End every process of the group."""
        for pid in (self.folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    @contextlib.contextmanager
    def python(self, code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
        """Run `code` in the group, and kill it at the end."""
        with subprocess.Popen(
            ["sh", "-c", JOIN, self.folder / "cgroup.procs", sys.executable, "-c", code]
            + [str(argument) for argument in arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def output(self, code: str, *arguments: object) -> str:
        """What `code` prints in the group; it must end well."""
        with self.python(code, *arguments) as process:
            output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        return output


@contextlib.contextmanager
def memory_group(limit_bytes: int, parent: MemoryGroup | None = None) -> Iterator[MemoryGroup]:
    """A group with a limit and no swap; skips where this machine does not let us make one."""
    version, above = _place() if parent is None else (parent.version, parent.folder)
    group = MemoryGroup(version, above / f"torchbudget-test-{uuid.uuid4().hex}")
    limit, swap = {
        1: ("memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", str(limit_bytes))),
        2: ("memory.max", ("memory.swap.max", "0")),
    }[version]
    try:
        if parent is not None and version == 2:
            (above / "cgroup.subtree_control").write_text("+memory")
        group.folder.mkdir()
        (group.folder / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.folder.rmdir()
        pytest.skip(f"cannot make a memory cgroup in {above}: {error.strerror}")
    try:
        if (group.folder / swap[0]).exists():
            (group.folder / swap[0]).write_text(swap[1])
        yield group
    finally:
        for _ in range(100):
            try:
                group.folder.rmdir()
                break
            except OSError:  # the kernel is still burying the last process
                time.sleep(0.1)
        assert not group.folder.exists()


def _place() -> tuple[int, Path]:
    """The version, and the folder in which a group may be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups, mount = dict(line.split(":", 2)[1:] for line in lines), Path("/sys/fs/cgroup")
    if "memory" in groups:
        return 1, mount / "memory" / groups["memory"].lstrip("/")
    # Version 2 lets no group have both processes and limited children: a sibling it is.
    own = mount / groups.get("", "/").lstrip("/")
    return 2, own if own == mount else own.parent
