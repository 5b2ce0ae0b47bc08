"""Control groups, versions 1 and 2: what they allow this process, and what of it is used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from torchbudget.errors import MachineError
from torchbudget.machine.kernel_files import ROOT, read_fields, read_lines, read_number
from torchbudget.machine.pools import MemoryPool

# Version 1 writes "no limit" as the largest whole number of pages in 63 bits, which depends on the
# page size; a limit of 4 EiB is never set on purpose.
_NO_LIMIT_BYTES: Final = 2**62


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
    version, folders = _memory_groups(root)
    pools = []
    for folder in folders:
        stat = read_fields(folder / "memory.stat")
        if version == 1:
            limits = [read_number(folder / "memory.limit_in_bytes")]
            if folder == folders[-1]:
                limits.append(stat.get("hierarchical_memory_limit"))
            use_file = folder / "memory.usage_in_bytes"
            reclaimable = {"total_inactive_file", "total_active_file"}
        else:
            limits = [read_number(folder / "memory.max"), read_number(folder / "memory.high")]
            use_file = folder / "memory.current"
            reclaimable = {"inactive_file", "active_file", "slab_reclaimable"}
        limit_bytes = min((limit for limit in limits if limit is not None), default=_NO_LIMIT_BYTES)
        if limit_bytes >= _NO_LIMIT_BYTES:
            continue
        charged_bytes = read_number(use_file)
        if charged_bytes is None:
            raise MachineError(
                f"{folder} limits memory, but {use_file} does not exist; state the budget's bytes"
            )
        reclaimable_bytes = sum(stat.get(key, 0) for key in reclaimable)
        pools.append(
            MemoryPool(
                name=str(folder),
                limit_bytes=limit_bytes,
                used_bytes=max(0, charged_bytes - reclaimable_bytes),
                own_bytes=own_bytes,
            )
        )
    return tuple(pools)


def _memory_groups(root: Path) -> tuple[int, list[Path]]:
    """The version of the memory controller, and the folders of this process's groups.

    The folders go from the process's own group up to the mount point, as far as memory is charged
    upwards.
    """
    version, path = 0, PurePosixPath("/")
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, text = line.split(":", 2)
        if "memory" in controllers.split(","):
            version, path = 1, PurePosixPath(text)
            break  # a controller belongs to one hierarchy, and version 2 then has no memory
        if not controllers:
            version, path = 2, PurePosixPath(text)
    if version == 0:
        return version, []

    # The mount that starts highest in the hierarchy shows the most ancestors.
    mounts = sorted(_cgroup_mounts(root, version), key=lambda mount: len(mount[0].parts))
    for mount_root, mount_point in mounts:
        # A path with ".." lies outside this process's namespace: its groups have no name here.
        if path.is_relative_to(mount_root) and ".." not in path.parts:
            folder = mount_point / path.relative_to(mount_root)
            if folder.is_dir():
                ancestors = [folder]
                while ancestors[-1] != mount_point and _charges_upwards(ancestors[-1].parent):
                    ancestors.append(ancestors[-1].parent)
                return version, ancestors
    # A container sees its own group at the mount's root, but `/proc` may show its path outside.
    return version, [mount_point for _, mount_point in mounts[:1]]


def _charges_upwards(folder: Path) -> bool:
    """Whether `folder` is charged for its children: optional in version 1 before Linux 5.11."""
    return read_number(folder / "memory.use_hierarchy") != 0


def _cgroup_mounts(root: Path, version: int) -> Iterator[tuple[PurePosixPath, Path]]:
    """The mounts of the memory hierarchy: its folder that is mounted, and where.

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
        controls_memory = "memory" in options.split(",")
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controls_memory:
            yield PurePosixPath(mount_root), root / mount_point.lstrip("/")
