"""Control groups, versions 1 and 2: what they allow this process, and what of it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from torchbudget.errors import MachineError
from torchbudget.machine.kernel_files import ROOT, read_fields, read_lines, read_number
from torchbudget.machine.pools import MemoryPool

# Version 1 writes "no limit" as the largest whole number of pages in 63 bits, which depends on the
# page size; a limit of 4 EiB is never set on purpose.
_NO_LIMIT_BYTES: Final = 2**62


class _Files(NamedTuple):
    """What the files of a group are called."""

    limits: tuple[str, ...]
    used: str
    reclaimable: frozenset[str]  # fields of memory.stat


_FILES: Final = {
    0: _Files((), "", frozenset()),
    1: _Files(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        frozenset({"total_inactive_file", "total_active_file"}),
    ),
    2: _Files(
        ("memory.max", "memory.high"),
        "memory.current",
        frozenset({"inactive_file", "active_file", "slab_reclaimable"}),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvents:
    """What has happened in control groups since they were made.

    Attributes:
        stalled_s: seconds in which some process of the group waited for memory (version 2, the
            `total` of `memory.pressure`); None: not known.
        refusals: how often a limit was hit and memory had to be reclaimed (`failcnt`, which
            some kernels leave at 0, or `max` of `memory.events`).
        kills: processes that were killed for memory.
    """

    stalled_s: float | None
    refusals: int
    kills: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlGroups:
    """The control groups that charge a process's memory, to be read again and again.

    Attributes:
        version: of the memory controller; 0: there is none.
        folders: of its groups, from its own up to the topmost that is visible.
    """

    version: int
    folders: tuple[Path, ...]

    @classmethod
    def of(cls, pid: int | None = None, *, root: Path = ROOT) -> ControlGroups:
        """Those of a process.

        Args:
            pid: the process; None is this one.
            root: the folder that `/proc` and the groups' mount points are looked up in.
        """
        version, folders = groups_of("memory", "self" if pid is None else str(pid), root=root)
        return cls(version=version, folders=folders)

    def pools(self, *, own_bytes: int = 0) -> tuple[MemoryPool, ...]:
        """See `cgroup_memory`."""
        names = _FILES[self.version]
        pools = []
        for folder in self.folders:
            limits = [read_number(folder / name) for name in names.limits]
            if self.version == 1 and folder == self.folders[-1]:
                stat = read_fields(folder / "memory.stat")
                limits.append(stat.get("hierarchical_memory_limit"))
            limit_bytes = min((one for one in limits if one is not None), default=_NO_LIMIT_BYTES)
            if limit_bytes >= _NO_LIMIT_BYTES:
                continue
            stat = read_fields(folder / "memory.stat")
            use_file = folder / names.used
            charged_bytes = read_number(use_file)
            if charged_bytes is None:
                raise MachineError(
                    f"{folder} limits memory, but {use_file} does not exist; state the budget's "
                    "bytes"
                )
            reclaimable_bytes = sum(stat.get(key, 0) for key in names.reclaimable)
            pools.append(
                MemoryPool(
                    name=str(folder),
                    limit_bytes=limit_bytes,
                    used_bytes=max(0, charged_bytes - reclaimable_bytes),
                    own_bytes=own_bytes,
                )
            )
        return tuple(pools)

    def events(self) -> GroupEvents:
        """What has happened in them so far; where a file cannot be read, nothing."""
        if self.version == 1:  # each group counts what hits its own limit
            # Without swap, a limit of memory and swap together is the one that is hit.
            names = ("memory.failcnt", "memory.memsw.failcnt")
            failures = [_number(folder / name) for folder in self.folders for name in names]
            control = [_fields(folder / "memory.oom_control") for folder in self.folders]
            kills = sum(one.get("oom_kill", 0) for one in control)
            return GroupEvents(stalled_s=None, refusals=sum(failures), kills=kills)
        # Version 2 counts a group's events in its ancestors too.
        events = [_fields(folder / "memory.events") for folder in self.folders]
        return GroupEvents(
            stalled_s=_stalled_s(self.folders[0] / "memory.pressure") if self.folders else None,
            refusals=max((one.get("max", 0) for one in events), default=0),
            kills=max((one.get("oom_kill", 0) for one in events), default=0),
        )


def cgroup_memory(*, own_bytes: int = 0, root: Path = ROOT) -> tuple[MemoryPool, ...]:
    """The control groups that limit this process: its own first, then every visible ancestor.

    Versions 1 and 2, and hybrid set-ups, where the memory controller belongs to one of the two.
    Groups without a limit are left out. A limit is

    - version 1: `memory.limit_in_bytes`; for the topmost group that is visible also the tightest
      limit above it, out of `memory.stat`, which is all that a container sees of it;
    - version 2: the lower of `memory.max` and `memory.high`: beyond the latter no process is
      killed, but the kernel slows every allocation down until training stands still.

    Used is what is charged to the group, less the page cache on the kernel's lists of file pages
    and (version 2) reclaimable slabs, as in the machine's own "available" memory. Files in tmpfs
    are on the lists of anonymous pages, and count as used.

    Args:
        own_bytes: bytes that this job uses.
        root: the folder that `/proc` and the groups' mount points are looked up in.

    Returns:
        One pool a group; empty where no control group limits memory.

    Raises:
        MachineError: a group has a limit, but its use cannot be read.

    Sources:
        https://docs.kernel.org/admin-guide/cgroup-v1/memory.html,
        https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    return ControlGroups.of(root=root).pools(own_bytes=own_bytes)


def _number(path: Path) -> int:
    with suppress(MachineError):
        return read_number(path) or 0
    return 0


def _fields(path: Path) -> dict[str, int]:
    with suppress(MachineError):
        return read_fields(path)
    return {}


def _stalled_s(path: Path) -> float | None:
    """Out of lines such as `some avg10=0.00 avg60=0.00 avg300=0.00 total=1234`, microseconds."""
    with suppress(MachineError):  # the kernel may have been told not to count
        for line in read_lines(path):
            kind, *_, total = line.split()
            if kind == "some":
                return int(total.removeprefix("total=")) / 1e6
    return None


def groups_of(
    controller: str, process: str = "self", *, root: Path = ROOT
) -> tuple[int, tuple[Path, ...]]:
    """The version of a controller, and the folders of a process's groups.

    The folders go from the process's own group up to the topmost that is visible; of memory, as far
    as it is charged upwards.

    Args:
        controller: `"memory"` or `"cpu"`.
        process: its number, or `"self"`.
        root: the folder that `/proc` and the groups' mount points are looked up in.

    Returns:
        Version 0 and no folders where there is no such controller.
    """
    version, path = 0, PurePosixPath("/")
    for line in read_lines(root / "proc" / process / "cgroup"):
        _, controllers, text = line.split(":", 2)
        if controller in controllers.split(","):
            version, path = 1, PurePosixPath(text)
            break  # a controller belongs to one hierarchy, and version 2 then does not have it
        if not controllers:
            version, path = 2, PurePosixPath(text)
    if version == 0:
        return version, ()

    # The mount that starts highest in the hierarchy shows the most ancestors.
    found = _cgroup_mounts(root, version, controller)
    mounts = sorted(found, key=lambda mount: len(mount[0].parts))
    for mount_root, mount_point in mounts:
        # A path with ".." lies outside this process's namespace: its groups have no name here.
        if path.is_relative_to(mount_root) and ".." not in path.parts:
            folder = mount_point / path.relative_to(mount_root)
            if folder.is_dir():
                ancestors = [folder]
                while ancestors[-1] != mount_point and _charges_upwards(ancestors[-1].parent):
                    ancestors.append(ancestors[-1].parent)
                return version, tuple(ancestors)
    # A container sees its own group at the mount's root, but `/proc` may show its path outside.
    return version, tuple(mount_point for _, mount_point in mounts[:1])


def _charges_upwards(folder: Path) -> bool:
    """Whether `folder` is charged for its children: optional in version 1 before Linux 5.11."""
    return read_number(folder / "memory.use_hierarchy") != 0


def _cgroup_mounts(
    root: Path, version: int, controller: str
) -> Iterator[tuple[PurePosixPath, Path]]:
    """The mounts of a controller's hierarchy: its folder that is mounted, and where.

    A line of mountinfo reads: id, parent, device, root, mount point, options, any number of tags,
    a hyphen, type, source, options of the file system; blanks inside a field are octal escapes.
    """
    for line in read_lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        mount_root, mount_point = (
            re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
            for field in mount.split()[3:5]
        )
        kind, _, options = system.split()[:3]
        controls = controller in options.split(",")
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controls:
            yield PurePosixPath(mount_root), root / mount_point.lstrip("/")
