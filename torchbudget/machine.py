"""What this machine has, and how much of it is used now.

The only file that reads psutil, `/proc`, control groups and CUDA's memory. Every function reads at
the moment of the call, keeps nothing, and returns frozen values in bytes.

Memory that is limited together is a `MemoryPool`: the machine's, each control group's that this
process stands in, `/dev/shm`'s, a GPU's. *This job* is this process and its descendants (the
workers of a `DataLoader`, for instance).
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import psutil
import torch

from torchbudget.errors import MachineError, OptionError

# Of glibc's malloc.h.
_M_MMAP_THRESHOLD: Final = -3
_ROOT: Final = Path("/")
# Version 1 writes "no limit" as the largest whole number of pages in 63 bits, which depends on the
# page size; nobody sets a limit of 4 EiB on purpose.
_NO_LIMIT_BYTES: Final = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPool:
    """Memory that is limited together.

    Attributes:
        name: what it is, for people: `"machine"`, a control group's folder, `"/dev/shm"`,
            `"cuda:0"`.
        limit_bytes: bytes there are in all.
        used_bytes: bytes that somebody uses and that cannot be reclaimed, this job's included.
        held_bytes: bytes of `used_bytes` that this job holds.

    >>> pool = MemoryPool(name="machine", limit_bytes=100, used_bytes=70, held_bytes=20)
    >>> pool.free_bytes, pool.usable_bytes
    (30, 50)
    """

    name: str
    limit_bytes: int
    used_bytes: int
    held_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken in addition to what is used now."""
        return max(0, self.limit_bytes - self.used_bytes)

    @property
    def usable_bytes(self) -> int:
        """Bytes that this job can use in all: what is free and what it holds already."""
        return max(0, self.limit_bytes - max(0, self.used_bytes - self.held_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """The memory of one process.

    Attributes:
        pid: the process.
        resident_bytes: pages in memory; a page that several processes map counts in each.
        peak_resident_bytes: the most that `resident_bytes` ever was; None where the kernel does
            not keep it.
        proportional_bytes: pages in memory, each divided by the number of processes that map it,
            so that a sum over processes counts it once.
        held_bytes: the part of `proportional_bytes` that cannot be reclaimed: anonymous pages and
            shared memory, but not the pages of files, which can be read again.
    """

    pid: int
    resident_bytes: int
    peak_resident_bytes: int | None
    proportional_bytes: int
    held_bytes: int


def host_memory() -> tuple[MemoryPool, ...]:
    """The machine and every control group that bounds this process, the machine first.

    The kernel kills when any one of them is full, so what this job can use is
    `min(pool.usable_bytes for pool in host_memory())`.

    Raises:
        MachineError: a reading is missing.
    """
    held_bytes = sum(process.held_bytes for process in process_tree())
    return (machine_memory(held_bytes=held_bytes), *cgroup_memory(held_bytes=held_bytes))


def machine_memory(*, held_bytes: int = 0) -> MemoryPool:
    """The memory of the whole machine, whatever a container may use of it; swap is left out.

    Args:
        held_bytes: bytes that this job holds.

    >>> machine_memory().free_bytes <= machine_memory().limit_bytes
    True
    """
    memory = psutil.virtual_memory()
    return MemoryPool(
        name="machine",
        limit_bytes=memory.total,
        # `available` counts reclaimable page cache as free, and tmpfs as used.
        used_bytes=max(0, memory.total - memory.available),
        held_bytes=held_bytes,
    )


def cgroup_memory(*, held_bytes: int = 0, root: Path = _ROOT) -> tuple[MemoryPool, ...]:
    """The control groups that bound this process: its own first, then every visible ancestor.

    Versions 1 and 2, and hybrid set-ups, where the memory controller belongs to one of the two.
    Groups without a limit are left out. A limit is

    - version 1: `memory.limit_in_bytes`; for the topmost group that is visible also the tightest
      limit above it, out of `memory.stat`, which is all that a container sees of it;
    - version 2: the lower of `memory.max` and `memory.high`: beyond the latter nobody is killed,
      but the kernel slows every allocation down until training stands still.

    Used is what is charged to the group, less the page cache on the kernel's lists of file pages
    and (version 2) reclaimable slabs: the same that the machine's own "available" memory takes for
    free. Files in tmpfs are on the lists of anonymous pages, and count as used.

    Args:
        held_bytes: bytes that this job holds.
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
        stat = _fields(folder / "memory.stat")
        if version == 1:
            limits = [_bytes(folder / "memory.limit_in_bytes")]
            if folder == folders[-1]:
                limits.append(stat.get("hierarchical_memory_limit"))
            use_file = folder / "memory.usage_in_bytes"
            reclaimable = {"total_inactive_file", "total_active_file"}
        else:
            limits = [_bytes(folder / "memory.max"), _bytes(folder / "memory.high")]
            use_file = folder / "memory.current"
            reclaimable = {"inactive_file", "active_file", "slab_reclaimable"}
        limit_bytes = min((limit for limit in limits if limit is not None), default=_NO_LIMIT_BYTES)
        if limit_bytes >= _NO_LIMIT_BYTES:
            continue
        charged_bytes = _bytes(use_file)
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
                held_bytes=held_bytes,
            )
        )
    return tuple(pools)


def shared_memory(*, root: Path = _ROOT) -> MemoryPool | None:
    """`/dev/shm`, through which workers hand their batches over; a worker that fills it dies.

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
        name="/dev/shm",  # noqa: S108  (a name, not a file to write)
        limit_bytes=system.f_blocks * system.f_frsize,
        used_bytes=(system.f_blocks - system.f_bavail) * system.f_frsize,
    )


def cuda_memory(device: str | torch.device = "cuda") -> MemoryPool:
    """The memory of one GPU.

    Held is what this process's caching allocator has reserved. Its CUDA context, about half a GiB
    that tensors cannot use, is not held, nor are libraries that allocate on their own; both count
    as used. Where `torch.cuda.set_per_process_memory_fraction` bounds the allocator, what it may
    not take is used, too.

    The first call in a process initialises CUDA, which it cannot share with forked children.

    Args:
        device: `"cuda"` means the current device.

    Raises:
        OptionError: `device` is none of CUDA's.
        MachineError: there is no such device, or CUDA does not answer.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is None or wanted.type != "cuda":
        raise OptionError(
            f"expected a CUDA device such as 'cuda:0', got {str(device)!r}; "
            "for another device, state the budget's bytes"
        )
    if not torch.cuda.is_available():
        reason = (
            f"torch {torch.__version__} is built without CUDA"
            if torch.version.cuda is None and torch.version.hip is None
            else "torch finds no driver or no device"
        )
        raise MachineError(f"cannot read the memory of {wanted}: {reason}")
    if wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise MachineError(
            f"cannot read the memory of {wanted}: there are {torch.cuda.device_count()} CUDA "
            "devices, counted from 0"
        )
    try:
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        reserved_bytes = torch.cuda.memory_reserved(index)
    except RuntimeError as error:
        raise MachineError(f"cannot read the memory of {wanted}: {error}") from error
    # The oldest versions of torch that are supported can set the fraction, but not tell it.
    get_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if get_fraction is not None:
        cap_bytes = int(total_bytes * get_fraction(index))
        free_bytes = min(free_bytes, max(0, cap_bytes - reserved_bytes))
    return MemoryPool(
        name=f"cuda:{index}",
        limit_bytes=total_bytes,
        used_bytes=total_bytes - free_bytes,
        held_bytes=reserved_bytes,
    )


def process_memory(pid: int | None = None, *, root: Path = _ROOT) -> ProcessMemory:
    """The memory of one process.

    Args:
        pid: the process; None is this one.
        root: the folder that `/proc` is looked up in.

    Raises:
        MachineError: there is no such process, or no `/proc`.

    >>> memory = process_memory()
    >>> 0 < memory.held_bytes <= memory.proportional_bytes <= memory.resident_bytes
    True
    """
    folder = root / "proc" / ("self" if pid is None else str(pid))
    status = _fields(folder / "status")
    if "Pid" not in status:
        raise MachineError(f"cannot read {folder / 'status'}: no such process, or no Linux /proc")
    resident_bytes = status.get("VmRSS", 0)  # no such line once a process has ended
    held_bytes = status.get("RssAnon", 0) + status.get("RssShmem", 0)
    shares: dict[str, int] = {}
    with suppress(MachineError):  # another user's process shows its status only
        shares = _fields(folder / "smaps_rollup")
    if "Pss_Anon" in shares:
        held_bytes = shares["Pss_Anon"] + shares.get("Pss_Shmem", 0)
    return ProcessMemory(
        pid=status["Pid"],
        resident_bytes=resident_bytes,
        peak_resident_bytes=status.get("VmHWM"),
        proportional_bytes=shares.get("Pss", resident_bytes),
        held_bytes=held_bytes,
    )


def reset_peak_memory(*, root: Path = _ROOT) -> bool:
    """Let this process's high-water mark of resident memory begin anew, at what it holds now.

    Returns:
        Whether the kernel allowed it, which takes Linux with a `/proc` that may be written to.
    """
    try:
        (root / "proc" / "self" / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


@dataclass(slots=True, eq=False)
class Peak:
    """What `peak_memory` found; known once its context is left.

    Attributes:
        bytes: the most that the process held on the device. On CUDA: reserved by torch's allocator,
            and everything beside it that is not free (contexts, other processes).
        reserved_bytes: on CUDA, the part of it that torch's allocator reserved.
        allocated_bytes: on CUDA, the most that living tensors took.
        sampled: whether it was only looked at every millisecond.
        retries: on CUDA, how many allocations failed at first, or for good: torch's
            `num_alloc_retries` and `num_ooms`.
    """

    bytes: int = 0
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    sampled: bool = False
    retries: int = 0


@contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """The most bytes that this process holds on `device` inside the context.

    On the CPU that is the high-water mark of resident memory, reset before; where the kernel does
    not let it be reset, a thread looks at the resident memory every millisecond.
    """
    peak = Peak()
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = _failed_allocations(device)
        yield peak
        torch.cuda.synchronize(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        outside_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
        peak.reserved_bytes = torch.cuda.max_memory_reserved(device)
        peak.bytes = peak.reserved_bytes + outside_bytes
        peak.allocated_bytes = torch.cuda.max_memory_allocated(device)
        peak.retries = _failed_allocations(device) - before
    elif reset_peak_memory():
        yield peak
        peak.bytes = _fields(_ROOT / "proc" / "self" / "status")["VmHWM"]
    else:
        peak.sampled = True
        yield from _sampled(peak)


def _failed_allocations(device: torch.device) -> int:
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("num_alloc_retries", 0) + stats.get("num_ooms", 0))


def _sampled(peak: Peak) -> Iterator[Peak]:
    process = psutil.Process()
    left = threading.Event()

    def look() -> None:
        while True:
            peak.bytes = max(peak.bytes, process.memory_info().rss)
            if left.wait(0.001):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        left.set()
        thread.join()


def trim_malloc(threshold_bytes: int = 2**17) -> bool:
    """Make glibc give freed memory back: what there is now, and blocks from a threshold on at once.

    By default glibc raises that threshold to up to 32 MiB as blocks are freed, and keeps what is
    smaller: under ragged shapes the free blocks fit nobody, and a process was seen to hold 2.3
    times what its tensors take. Mapped blocks cost page faults instead. It lasts as long as the
    process; `MALLOC_MMAP_THRESHOLD_` in the environment does the same from its start.

    Args:
        threshold_bytes: blocks of at least this size are given back when they are freed.

    Returns:
        Whether it was done, which takes glibc.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, malloc_trim = library.mallopt, library.malloc_trim
    except (AttributeError, OSError):
        return False
    done = bool(mallopt(_M_MMAP_THRESHOLD, threshold_bytes))
    malloc_trim(ctypes.c_size_t(0))
    return done


def process_tree(pid: int | None = None) -> tuple[ProcessMemory, ...]:
    """The memory of a process, first, and of each of its descendants.

    Descendants that end meanwhile are left out.

    Args:
        pid: the process; None is this one.

    Raises:
        MachineError: there is no such process, or no `/proc`.
    """
    readings = [process_memory(pid)]
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    for descendant in descendants:
        with suppress(MachineError):
            readings.append(process_memory(descendant.pid))
    return tuple(readings)


def _memory_groups(root: Path) -> tuple[int, list[Path]]:
    """The version of the memory controller, and the folders of this process's groups.

    The folders go from the process's own group up to the mount point, as far as memory is charged
    upwards.
    """
    version, path = 0, PurePosixPath("/")
    for line in _lines(root / "proc/self/cgroup"):
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
    # A container sees its own group at the mount's root, but may still be told its path outside.
    return version, [mount_point for _, mount_point in mounts[:1]]


def _charges_upwards(folder: Path) -> bool:
    """Whether `folder` is charged for its children: before Linux 5.11, version 1 let it choose."""
    return _bytes(folder / "memory.use_hierarchy") != 0


def _cgroup_mounts(root: Path, version: int) -> Iterator[tuple[PurePosixPath, Path]]:
    """The mounts of the memory hierarchy: its folder that is mounted, and where.

    A line of mountinfo reads: id, parent, device, root, mount point, options, any number of tags,
    a hyphen, type, source, options of the file system; blanks inside a field are octal escapes.
    """
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        mount_root, mount_point = (
            re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
            for field in mount.split()[3:5]
        )
        kind, _, options = system.split()[:3]
        controls_memory = "memory" in options.split(",")
        if kind == "cgroup2" if version == 2 else kind == "cgroup" and controls_memory:
            yield PurePosixPath(mount_root), root / mount_point.lstrip("/")


def _lines(path: Path) -> list[str]:
    """The lines of a file of the kernel's; none where there is no such file.

    Raises:
        MachineError: the file exists, but cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error


def _bytes(path: Path) -> int | None:
    """A file that holds one number; None where there is no such file, or it says "max"."""
    text = "".join(_lines(path))
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """A file of lines such as `inactive_file 4096` or `VmRSS:    12 kB`; the latter in bytes."""
    fields = {}
    for line in _lines(path):
        key, _, rest = line.partition(" " if ":" not in line else ":")
        value, _, unit = rest.strip().partition(" ")
        if value.isdecimal():
            fields[key] = int(value) * (1024 if unit == "kB" else 1)
    return fields
