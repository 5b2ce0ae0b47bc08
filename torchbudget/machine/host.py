"""The memory of the host: the machine, its control groups, `/dev/shm`, and what else is limited."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import psutil

from torchbudget.errors import MachineError
from torchbudget.machine.process_tree import (
    ROOT,
    process_tree,
    read_fields,
    read_lines,
    read_number,
)

SHM: Final = "/dev/shm"
# Version 1 writes "no limit" as the largest whole number of pages in 63 bits, which depends on the
# page size; a limit of 4 EiB is never set on purpose.
_NO_LIMIT_BYTES: Final = 2**62


# By version: the files of a group's limits, the file of its use, and the reclaimable fields of its
# memory.stat.
_FILES: Final = {
    1: (
        ["memory.limit_in_bytes"],
        "memory.usage_in_bytes",
        ["total_inactive_file", "total_active_file"],
    ),
    2: (
        ["memory.max", "memory.high"],
        "memory.current",
        ["inactive_file", "active_file", "slab_reclaimable"],
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPool:
    """Memory that is limited together.

    Attributes:
        name: its name in messages: `"machine"`, a control group's folder, `"/dev/shm"`,
            `"cuda:0"`.
        limit_bytes: its size.
        used_bytes: bytes in use that cannot be reclaimed, this job's included.
        own_bytes: bytes of `used_bytes` that this job uses itself.

    >>> pool = MemoryPool(name="machine", limit_bytes=100, used_bytes=70, own_bytes=20)
    >>> pool.free_bytes, pool.usable_bytes
    (30, 50)
    """

    name: str
    limit_bytes: int
    used_bytes: int
    own_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken in addition to what is used now."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def usable_bytes(self) -> int:
        """Bytes that this job can use in all: what is free, and what it uses already."""
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.own_bytes))


def host_memory() -> tuple[MemoryPool, ...]:
    """Return the machine and every control group that limits this process, the machine first.

    The kernel kills when any one of them is full, so what this job can use is
    `min(pool.usable_bytes for pool in host_memory())`.

    Raises:
        MachineError: a reading is missing.
    """
    own_bytes = sum(process.unreclaimable_bytes for process in process_tree())
    return (machine_memory(own_bytes=own_bytes), *ControlGroups.of().pools(own_bytes=own_bytes))


def machine_memory(*, own_bytes: int = 0) -> MemoryPool:
    """Return the memory of the whole machine, whatever a container may use of it, without swap.

    Args:
        own_bytes: bytes that this job uses.

    >>> machine_memory().free_bytes <= machine_memory().limit_bytes
    True
    """
    memory = psutil.virtual_memory()
    return MemoryPool(
        name="machine",
        limit_bytes=memory.total,
        # `available` counts reclaimable page cache as free, and tmpfs as used.
        used_bytes=max(0, memory.total - memory.available),
        own_bytes=own_bytes,
    )


def shared_memory(*, root: Path = ROOT) -> MemoryPool | None:
    """Return `/dev/shm`, through which workers send their batches; a worker that fills it dies.

    Args:
        root: the folder that `/dev/shm` is looked up in.

    Returns:
        The pool; None where `/dev/shm` does not exist, or has no limit of its own.
    """
    try:
        system = os.statvfs(root / "dev/shm")
    except FileNotFoundError:
        return None
    if system.f_blocks == 0:  # a tmpfs that was mounted with size=0 grows without limit
        return None
    return MemoryPool(
        name=SHM,
        limit_bytes=system.f_blocks * system.f_frsize,
        used_bytes=(system.f_blocks - system.f_bavail) * system.f_frsize,
    )


def process_limits() -> tuple[MemoryPool, ...]:
    """Return the limits that `ulimit` sets on this process, in bytes of address space.

    `RLIMIT_DATA` bounds heap and private mappings, `RLIMIT_AS` all mappings. What is reserved and
    not used counts too: torch with CUDA maps far more than it uses. Each process has its own.
    """
    status = read_fields(ROOT / "proc/self/status")
    pools = []
    for name, field in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
        limit_bytes = resource.getrlimit(getattr(resource, name))[0]
        if limit_bytes != resource.RLIM_INFINITY and field in status:
            used = status[field]
            pools.append(
                MemoryPool(name=name, limit_bytes=limit_bytes, used_bytes=used, own_bytes=used)
            )
    return tuple(pools)


def usable_processors(*, root: Path = ROOT) -> int:
    """Return the number of processors that this process may use at once, at least 1.

    Those that it may be scheduled on, or what the quotas of its control groups, its own and those
    above it, pay for where that is less.

    Sources:
        https://docs.kernel.org/scheduler/sched-bwc.html,
        https://docs.kernel.org/admin-guide/cgroup-v2.html

    >>> 1 <= usable_processors() <= os.cpu_count()
    True
    """
    _, folders = groups_of("cpu", root=root)
    quota = min(map(_quota, folders), default=math.inf)
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), quota)))


def _quota(folder: Path) -> float:
    """Return the processors that one control group's processes may use at once."""
    for line in read_lines(folder / "cpu.max"):  # version 2: "200000 100000", or "max 100000"
        allowed, _, period = line.partition(" ")
        return int(allowed) / int(period) if allowed.isdecimal() else math.inf
    allowed_us = read_number(folder / "cpu.cfs_quota_us")  # "-1" is none
    period_us = read_number(folder / "cpu.cfs_period_us")
    return allowed_us / period_us if allowed_us and period_us else math.inf


def free_descriptors() -> int:
    """Return how many more files this process may open.

    >>> free_descriptors() > 0
    True
    """
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return 2**31
    return max(0, allowed - sum(1 for _ in (ROOT / "proc/self/fd").iterdir()))


def allow_more_descriptors() -> None:
    """Let this process open as many files as the system lets it ask for: the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
        """Return the groups of a process.

        Args:
            pid: the process; None is this one.
            root: the folder that `/proc` and the groups' mount points are looked up in.
        """
        version, folders = groups_of("memory", "self" if pid is None else str(pid), root=root)
        return cls(version=version, folders=folders)

    def pools(self, *, own_bytes: int = 0) -> tuple[MemoryPool, ...]:
        """Return the groups that limit the process: its own, then every visible ancestor.

        Versions 1 and 2, and hybrid set-ups, where the memory controller belongs to one of the two.
        Groups without a limit are left out. A limit is

        - version 1: `memory.limit_in_bytes`; for the topmost group that is visible also the
          tightest limit above it, out of `memory.stat`, which is all that a container sees of it;
        - version 2: the lower of `memory.max` and `memory.high`: beyond the latter no process is
          killed, but the kernel slows every allocation down until training stands still.

        Groups of version 1 are taken to charge those above them (`memory.use_hierarchy`, always so
        from Linux 5.11 on).

        Used is what is charged to the group, less the page cache on the kernel's lists of file
        pages and (version 2) reclaimable slabs, as in the machine's own "available" memory. Files
        in tmpfs are on the lists of anonymous pages, and count as used.

        Args:
            own_bytes: bytes that this job uses.

        Returns:
            One pool a group; empty where no control group limits memory.

        Raises:
            MachineError: a group has a limit, but its use cannot be read.

        Sources:
            https://docs.kernel.org/admin-guide/cgroup-v1/memory.html,
            https://docs.kernel.org/admin-guide/cgroup-v2.html
        """
        pools = []
        for folder in self.folders:
            limit_names, use_name, reclaimable = _FILES[self.version]
            stat = read_fields(folder / "memory.stat")
            limits = [read_number(folder / name) for name in limit_names]
            if self.version == 1 and folder == self.folders[-1]:
                limits.append(stat.get("hierarchical_memory_limit"))
            limit_bytes = min((one for one in limits if one is not None), default=_NO_LIMIT_BYTES)
            if limit_bytes >= _NO_LIMIT_BYTES:
                continue
            charged_bytes = read_number(folder / use_name)
            if charged_bytes is None:
                raise MachineError(
                    f"{folder} limits memory, but {folder / use_name} does not exist; state the "
                    "budget's bytes"
                )
            used_bytes = max(0, charged_bytes - sum(stat.get(key, 0) for key in reclaimable))
            pools.append(
                MemoryPool(
                    name=str(folder),
                    limit_bytes=limit_bytes,
                    used_bytes=used_bytes,
                    own_bytes=own_bytes,
                )
            )
        return tuple(pools)

    def events(self) -> dict[str, float]:
        """Return the events in the groups since they were made, by name.

        - `stalled_s`: seconds in which some process of the group waited for memory (version 2, the
          `total` of `memory.pressure`); left out where it is not known.
        - `refusals`: how often a limit was hit and memory had to be reclaimed (`failcnt`, which
          some kernels leave at 0, or `max` of `memory.events`).
        - `kills`: processes that were killed for memory.

        Raises:
            MachineError: a file exists, but cannot be read.
        """
        if self.version == 1:  # each group counts what hits its own limit
            # Without swap, a limit of memory and swap together is the one that is hit.
            names = ("memory.failcnt", "memory.memsw.failcnt")
            failures = [read_number(folder / name) for folder in self.folders for name in names]
            control = [read_fields(folder / "memory.oom_control") for folder in self.folders]
            kills = sum(one.get("oom_kill", 0) for one in control)
            return {"refusals": sum(filter(None, failures)), "kills": kills}
        # Version 2 counts a group's events in its ancestors too.
        events = [read_fields(folder / "memory.events") for folder in self.folders]
        return {
            **(_stalled(self.folders[0] / "memory.pressure") if self.folders else {}),
            "refusals": max((one.get("max", 0) for one in events), default=0),
            "kills": max((one.get("oom_kill", 0) for one in events), default=0),
        }


def _stalled(path: Path) -> dict[str, float]:
    """Read a line such as `some avg10=0.00 avg60=0.00 avg300=0.00 total=1234`, in microseconds."""
    with suppress(MachineError):  # the kernel may have been told not to count
        for line in read_lines(path):
            kind, *_, total = line.split()
            if kind == "some":
                return {"stalled_s": int(total.removeprefix("total=")) / 1e6}
    return {}


def groups_of(
    controller: str, process: str = "self", *, root: Path = ROOT
) -> tuple[int, tuple[Path, ...]]:
    """Return the version of a controller, and the folders of a process's groups.

    The folders go from the process's own group up to the topmost that is visible.

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
                while ancestors[-1] != mount_point:
                    ancestors.append(ancestors[-1].parent)
                return version, tuple(ancestors)
    # A container sees its own group at the mount's root, but `/proc` may show its path outside.
    return version, tuple(mount_point for _, mount_point in mounts[:1])


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
