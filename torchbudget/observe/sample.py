"""`MemorySample`: what memory does at one moment, read from the machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from torchbudget.errors import MachineError
from torchbudget.machine.cgroups import ControlGroups, GroupEvents
from torchbudget.machine.cuda import device_in_use
from torchbudget.machine.device import DeviceMemory, device_memory, is_cpu
from torchbudget.machine.high_water import RESIDENT, Mark
from torchbudget.machine.host import machine_memory, shared_memory
from torchbudget.machine.pools import MemoryPool
from torchbudget.machine.process_tree import ProcessMemory, ProcessTree
from torchbudget.machine.shared_files import untouched_shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Memory at one moment, or the most of each number over a time.

    A number is `None` where it was not read, or where there is no such memory.

    Attributes:
        time_s: seconds since the monitor began; of several moments, the last one.
        processes: the watched process and its descendants, such as workers.
        resident_bytes: Σ of their resident memory, in which shared pages count in each.
        host_bytes: what they take together, each byte counted once: what `MemoryBudget.host` is
            compared with. It is read rarely, since the kernel visits every page for it.
        unreclaimable_bytes: the part of it that is no file's, so that the kernel cannot drop it:
            what a control group's limit kills for. Read with it.
        process_bytes: resident memory of the watched process.
        process_peak_bytes: the most of it so far, as the kernel keeps it (`VmHWM`).
        worker_peak_bytes: the most of any descendant that is there, in all its life.
        shared_bytes: in use in `/dev/shm`, by whomever.
        cgroup_bytes: in use, and not reclaimable, in the control group that has the least left.
        machine_bytes: in use, and not reclaimable, on the whole machine.
        allocated_bytes: of living tensors on the CUDA device; in a peak, the most.
        reserved_bytes: by torch's allocator there; in a peak, the most.
        outside_bytes: that the process uses there outside the allocator.
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
        """What the process uses on the CUDA device: reserved, and outside the allocator."""
        if self.reserved_bytes is None:
            return None
        return self.reserved_bytes + (self.outside_bytes or 0)

    def row(self) -> list[float]:
        """The numbers in the order of the attributes; NaN for `None`."""
        values = (getattr(self, name) for name in COLUMNS)
        return [np.nan if value is None else value for value in values]

    @classmethod
    def of_row(cls, row: Any) -> MemorySample:
        """The sample of such a row."""
        numbers: dict[str, Any] = {
            name: None if np.isnan(value) else int(value)
            for name, value in zip(COLUMNS[1:], row[1:], strict=True)
        }
        return cls(time_s=float(row[0]), **numbers)

    def known(self) -> dict[str, float]:
        """The numbers that are not `None`, by name."""
        values = ((name, getattr(self, name)) for name in COLUMNS)
        return {name: value for name, value in values if value is not None}


COLUMNS = tuple(field.name for field in fields(MemorySample))


class MemoryReader:
    """Reads samples of one process and its descendants.

    Args:
        pid: the process; `None`: the calling one.
        device: the CUDA device, or the CPU; `None`: the CUDA device in use as soon as the process
            uses CUDA. That is the current one; where nothing is reserved on it, or another thread
            than this one reads first, it is the device that most is reserved on. CUDA is never
            initialised here, and never read for another process.

    Attributes:
        whole_is_exact: whether the shares of all pages could be read so far.
        pools: as they were at the last sample, by the names that it has for them.
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
        self.whole_is_exact = True
        self.pools: dict[str, MemoryPool] = {}

    def read(self, time_s: float, *, whole: bool) -> MemorySample:
        """Read now.

        Args:
            time_s: of the sample.
            whole: read `host_bytes` too.

        Raises:
            MachineError: the process has ended, or the machine does not provide a reading.
        """
        tree = self._tree.read(shares=whole)
        if not tree[0].resident_bytes:
            raise MachineError(f"process {tree[0].pid} has ended")
        if whole and not all(process.is_proportional for process in tree):
            self.whole_is_exact = False
        self.pools = self._read_pools()
        peaks = [one.peak_resident_bytes for one in tree[1:] if one.peak_resident_bytes is not None]
        return MemorySample(
            time_s=time_s,
            processes=len(tree),
            resident_bytes=sum(process.resident_bytes for process in tree),
            process_bytes=tree[0].resident_bytes,
            process_peak_bytes=self._peak(tree[0]),
            worker_peak_bytes=max(peaks, default=None),
            **(_read_job(tree) if whole else {}),
            **{f"{name}_bytes": pool.used_bytes for name, pool in self.pools.items()},
            **self._read_device(),
        )

    def events(self) -> GroupEvents:
        """What has happened in the process's control groups since the reader was made."""
        before, now = self._events_before, self._groups.events()
        stalled_s = None
        if now.stalled_s is not None and before.stalled_s is not None:
            stalled_s = now.stalled_s - before.stalled_s
        return GroupEvents(
            stalled_s=stalled_s,
            refusals=now.refusals - before.refusals,
            kills=now.kills - before.kills,
        )

    def device(self, *, prefers_current: bool = True) -> torch.device | str:
        """The device whose memory a batch takes: the CUDA device, or the CPU.

        Args:
            prefers_current: as `device_in_use`; for the thread that trains.
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
        """Whether the device is the CPU for certain: said to be, or torch is built for no other."""
        if self._device is not None:
            return is_cpu(self._device)
        builds = (torch.version.cuda, torch.version.hip)
        return not torch.cuda.is_initialized() and builds == (None, None)

    def _peak(self, process: ProcessMemory) -> int | None:
        if not self._is_own:
            return process.peak_resident_bytes
        if self._resident is None:
            return None
        # The kernel counts pages on each processor: its mark may lag behind by some of them.
        return max(self._resident.most()[0], process.resident_bytes)

    def _read_pools(self) -> dict[str, MemoryPool]:
        pools = {"machine": machine_memory()}
        shared, groups = shared_memory(), self._groups.pools()
        if shared is not None:
            pools["shared"] = shared
        if groups:
            pools["cgroup"] = min(groups, key=lambda pool: pool.free_bytes)
        return pools

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
        memory = self._memory
        figures = memory.source.figures()
        return {
            "allocated_bytes": figures.allocated_bytes,
            "reserved_bytes": figures.reserved_bytes,
            "outside_bytes": memory.outside_bytes(figures),
        }

    def device_peaks(self) -> dict[str, int]:
        """The most that the allocator reserved and that tensors took; empty without CUDA."""
        if self._on_device is None:
            return {}
        reserved_bytes, allocated_bytes = self._on_device.most()
        return {"reserved_bytes": reserved_bytes, "allocated_bytes": allocated_bytes}


def _read_job(tree: Sequence[ProcessMemory]) -> dict[str, int]:
    """What processes take together, batches on their way between them included."""
    untouched_bytes = untouched_shared_bytes(tree)
    return {
        "host_bytes": untouched_bytes + sum(one.proportional_bytes for one in tree),
        "unreclaimable_bytes": untouched_bytes + sum(one.unreclaimable_bytes for one in tree),
    }
