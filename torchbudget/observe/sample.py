"""`MemorySample`: the memory of a job at one moment, and its reader."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from typing import Any

import torch

from torchbudget.errors import MachineError
from torchbudget.machine.device import DeviceMemory, device_in_use, device_memory, is_cpu
from torchbudget.machine.host import ControlGroups, MemoryPool, machine_memory, shared_memory
from torchbudget.machine.process_tree import RESIDENT, Mark, ProcessTree, untouched_shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Memory at one moment, or the maximum of each number over a time.

    A number is `None` if it was not read, or if there is no such memory.

    Attributes:
        time_s: seconds since the monitor began; of several samples, those of the last one.
        processes: number of processes: the watched one and its descendants, such as workers.
        resident_bytes: sum of the processes' resident memory; shared pages count in each.
        host_bytes: memory of all processes together, each byte counted once. `MemoryBudget.host`
            is compared with it. It is read rarely, since the kernel visits every page for it.
        unreclaimable_bytes: the part of `host_bytes` that belongs to no file, so that the kernel
            cannot drop it. If it reaches a control group's limit, the kernel kills processes. Read
            with `host_bytes`.
        process_bytes: resident memory of the watched process.
        process_peak_bytes: the kernel's peak of `process_bytes` so far (`VmHWM`).
        worker_peak_bytes: the kernel's peak of the largest living descendant.
        shared_bytes: bytes in use in `/dev/shm`, by all processes of the machine.
        cgroup_bytes: bytes in use, and not reclaimable, in the control group with the least room
            left.
        machine_bytes: bytes in use, and not reclaimable, on the whole machine.
        allocated_bytes: bytes of living tensors on the CUDA device.
        reserved_bytes: bytes that torch's allocator has reserved there.
        outside_bytes: bytes that the process uses there outside the allocator.
    """

    time_s: float
    processes: int = 0
    resident_bytes: int = 0
    host_bytes: int | None = None
    unreclaimable_bytes: int | None = None
    process_bytes: int = 0
    process_peak_bytes: int | None = None
    worker_peak_bytes: int | None = None
    shared_bytes: int | None = None
    cgroup_bytes: int | None = None
    machine_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    outside_bytes: int | None = None

    @property
    def device_bytes(self) -> int | None:
        """Bytes that the process uses on the CUDA device: reserved, and outside the allocator."""
        if self.reserved_bytes is None:
            return None
        return self.reserved_bytes + (self.outside_bytes or 0)

    def known(self) -> dict[str, float]:
        """The numbers that are not `None`, by name."""
        values = ((name, getattr(self, name)) for name in NAMES)
        return {name: value for name, value in values if value is not None}

    def merged(self, other: MemorySample) -> MemorySample:
        """The larger of each number of two samples."""
        mine, others = self.known(), other.known()
        larger: Any = {k: max(mine.get(k, v), v) for k, v in others.items()}
        return MemorySample(**{**mine, **larger})


NAMES = tuple(field.name for field in fields(MemorySample))


class MemoryReader:
    """Reads samples of one process and its descendants.

    Args:
        pid: the process; `None`: the calling one.
        device: the CUDA device, or the CPU; `None`: the CUDA device in use as soon as the process
            uses CUDA. That is the current one; where nothing is reserved on it, or another thread
            than this one reads first, it is the device with the most reserved bytes. The reader
            never initialises CUDA, and never reads it for another process.

    Attributes:
        is_exact: whether the shares of all pages could be read so far.
        limit_bytes: sizes of the machine's memories at the last sample, by name.
    """

    def __init__(self, pid: int | None, device: torch.device | str | None) -> None:
        self._device = device
        self._is_own = pid is None
        self._tree = ProcessTree(pid)
        self._resident = RESIDENT.begin() if pid is None else None
        self._thread = threading.get_ident()
        self._memory: DeviceMemory | None = None
        self._on_device: Mark | None = None
        self._groups = ControlGroups.of(pid)
        self._events_before = self._groups.events()
        self.is_exact = True
        self.limit_bytes: dict[str, int] = {}

    def read(self, time_s: float, *, whole: bool) -> MemorySample:
        """Read a sample now.

        Args:
            time_s: the time of the sample.
            whole: read `host_bytes` and `unreclaimable_bytes` too.

        Raises:
            MachineError: the process has ended, or the machine does not provide a reading.
        """
        tree = self._tree.read(shares=whole)
        if not tree[0].resident_bytes:
            raise MachineError(f"process {tree[0].pid} has ended")
        pools = self._read_pools()
        self.limit_bytes = {name: pool.limit_bytes for name, pool in pools.items()}
        numbers = {f"{name}_bytes": pool.used_bytes for name, pool in pools.items()}
        if whole:
            self.is_exact = self.is_exact and all(one.is_proportional for one in tree)
            untouched_bytes = untouched_shared_bytes(tree)  # batches between two processes
            numbers["host_bytes"] = untouched_bytes + sum(one.proportional_bytes for one in tree)
            unreclaimable_bytes = sum(one.unreclaimable_bytes for one in tree)
            numbers["unreclaimable_bytes"] = untouched_bytes + unreclaimable_bytes
        process_peak_bytes = tree[0].peak_resident_bytes
        if self._is_own:
            marks = () if self._resident is None else self._resident.most()
            # The kernel counts pages on each processor: its mark may lag behind by some of them.
            process_peak_bytes = max(*marks, tree[0].resident_bytes) if marks else None
        peaks = [one.peak_resident_bytes for one in tree[1:] if one.peak_resident_bytes is not None]
        return MemorySample(
            time_s=time_s,
            processes=len(tree),
            resident_bytes=sum(process.resident_bytes for process in tree),
            process_bytes=tree[0].resident_bytes,
            process_peak_bytes=process_peak_bytes,
            worker_peak_bytes=max(peaks, default=None),
            **numbers,
            **self._read_device(),
        )

    def events(self) -> dict[str, float]:
        """Events of the process's control groups since the reader was made, by name."""
        before = self._events_before
        return {k: value - before.get(k, 0) for k, value in self._groups.events().items()}

    def device(self, *, prefers_current: bool = True) -> torch.device | str:
        """The device whose memory a batch takes: the CUDA device, or the CPU.

        Args:
            prefers_current: see `device_in_use`; true in the thread that trains.
        """
        device = self._device
        if device is None:
            device = "cuda" if torch.cuda.is_initialized() else "cpu"
        if str(device) != "cuda" or not torch.cuda.is_initialized():
            return device
        index = device_in_use(prefers_current=prefers_current)
        return device if index is None else torch.device("cuda", index)

    @property
    def is_cpu(self) -> bool:
        """True if the device is stated to be the CPU, or torch is built for no other device."""
        if self._device is not None:
            return is_cpu(self._device)
        builds = (torch.version.cuda, torch.version.hip)
        return not torch.cuda.is_initialized() and builds == (None, None)

    def _read_pools(self) -> dict[str, MemoryPool]:
        groups = self._groups.pools()
        pools = {
            "machine": machine_memory(),
            "shared": shared_memory(),
            "cgroup": min(groups, key=lambda pool: pool.free_bytes, default=None),
        }
        return {name: pool for name, pool in pools.items() if pool is not None}

    def _read_device(self) -> dict[str, int]:
        if not self._is_own or not torch.cuda.is_initialized():
            return {}
        if self._memory is None:
            is_own_thread = threading.get_ident() == self._thread
            device = self.device(prefers_current=is_own_thread)
            # The current device of another thread says nothing.
            if is_cpu(device) or (str(device) == "cuda" and not is_own_thread):
                return {}
            self._memory = device_memory(device)
            self._on_device = self._memory.high_water.begin()
        figures = self._memory.source.figures()
        return {
            "allocated_bytes": figures.allocated_bytes,
            "reserved_bytes": figures.reserved_bytes,
            "outside_bytes": self._memory.outside_bytes(figures),
        }

    def device_peaks(self) -> dict[str, int]:
        """Peaks of the reserved bytes and of the tensors' bytes; empty without CUDA."""
        if self._on_device is None:
            return {}
        reserved_bytes, allocated_bytes = self._on_device.most()
        return {"reserved_bytes": reserved_bytes, "allocated_bytes": allocated_bytes}
