"""`MonitorReport`: what a monitor has seen, as a record and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchbudget.machine.cgroups import GroupEvents
from torchbudget.observe.limits import MemoryLimit
from torchbudget.observe.sample import MemorySample
from torchbudget.tables import aligned
from torchbudget.units import format_bytes

_NOTICED: Final = 0.02  # a share of a process's memory
_TITLES: Final = {
    "host_bytes": "job, each byte once",
    "unreclaimable_bytes": "job, unreclaimable",
    "resident_bytes": "job, resident",
    "process_peak_bytes": "process",
    "worker_peak_bytes": "largest worker",
    "shared_bytes": "/dev/shm",
    "cgroup_bytes": "control group",
    "machine_bytes": "machine",
    "allocated_bytes": "device, tensors",
    "reserved_bytes": "device, reserved",
    "outside_bytes": "device, outside the allocator",
}


def memory_rows(
    peak: Mapping[str, float], snapshots: Sequence[tuple[str, Mapping[str, float]]]
) -> list[list[str]]:
    """A table as text: a row of headings, and one for each number that was read.

    Args:
        peak: numbers by their names in `MemorySample`; what was not read is left out.
        snapshots: by their own names, likewise.
    """
    columns = [("peak", peak), *snapshots]
    rows = [["", *(name for name, _ in columns)]]
    for name, title in _TITLES.items():
        cells = [format_bytes(int(one[name])) if name in one else "" for _, one in columns]
        if any(cells):
            rows.append([title, *cells])
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReport:
    """What a `MemoryMonitor` has seen, to be printed or read.

    Attributes:
        peak: the most of each number.
        limits: each limit, and the most that was used of it.
        snapshots: by their names, in order.
        events: of the process's control groups, since the monitor began.
        is_exact: whether `host_bytes` counts each byte once. Otherwise the kernel did not show
            which pages are shared, and it counts only those that cannot be.
        seconds: that it has run.
        samples: that were read.
        processor_s: processor time that reading them took.
        lost_lines: that could not be written to the file.
    """

    peak: MemorySample
    limits: tuple[MemoryLimit, ...]
    snapshots: tuple[tuple[str, MemorySample], ...]
    events: GroupEvents
    is_exact: bool
    seconds: float
    samples: int
    processor_s: float
    lost_lines: int

    def known(self) -> dict[str, Any]:
        """The numbers of the end of the file of lines."""
        events = {k: value for k, value in asdict(self.events).items() if value is not None}
        return {
            "time_s": self.seconds,
            "peak": {k: value for k, value in self.peak.known().items() if k != "time_s"},
            "is_exact": self.is_exact,
            "samples": self.samples,
            "processor_s": self.processor_s,
            "lost_lines": self.lost_lines,
            **events,
        }

    def __str__(self) -> str:
        """A table for people: the peak, and then each snapshot."""
        snapshots = [(name, sample.known()) for name, sample in self.snapshots]
        return "\n".join([*aligned(memory_rows(self.peak.known(), snapshots)), *self._notes()])

    def _notes(self) -> list[str]:
        notes = [
            f"{limit.share:.0%} of the limit {limit.name}: {format_bytes(limit.used_bytes)} of "
            f"{format_bytes(limit.limit_bytes)}"
            for limit in self.limits
        ]
        unseen_bytes = (self.peak.process_peak_bytes or 0) - self.peak.process_bytes
        if unseen_bytes > _NOTICED * self.peak.process_bytes:
            notes.append(
                f"the process peaked {format_bytes(unseen_bytes)} higher than in any sample, for "
                "too short a time to be in the rows of the job"
            )
        events = self.events
        if events.stalled_s:
            notes.append(f"waited for memory: {events.stalled_s:.1f} s")
        if events.refusals:
            notes.append(f"the control group's limit was hit {events.refusals:,} times")
        if events.kills:
            notes.append(f"the kernel killed {events.kills:,} processes of the control group")
        if not self.is_exact:
            notes.append("shared pages could not be told apart, and are left out of the job's sum")
        if self.lost_lines:
            notes.append(f"{self.lost_lines:,} lines could not be written")
        share = self.processor_s / self.seconds if self.seconds else 0.0
        notes.append(
            f"{self.samples:,} samples in {self.seconds:.1f} s, which took {share:.2%} of one "
            "processor"
        )
        return notes
