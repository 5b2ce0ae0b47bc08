"""`MonitorReport`: one run of a `MemoryMonitor`, its own or read back from its file."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

from torchbudget.display import aligned
from torchbudget.errors import OptionError
from torchbudget.observe.sample import NAMES, MemorySample
from torchbudget.units import format_bytes

FORMAT: Final = 1
_LOADING: Final = "start fewer workers, or lower prefetch_factor: each prefetches that many"
_SHARED: Final = f"{_LOADING}; or mount a larger /dev/shm (docker run --shm-size)"
_PLANNING: Final = "lower the sampler's budget, or correct it: MemoryMonitor(…, replan=sampler)"
_KILLS: Final = f"the kernel kills a process when it is full: {_LOADING}; or lower the budget"
_LIMITS: Final = {  # name, and what to change
    "device": ("the device's memory (budget.device)", _PLANNING),
    "host": ("this job's memory (budget.host)", _LOADING),
    "shared": ("/dev/shm", _SHARED),
    "cgroup": ("the memory of this control group", _KILLS),
    "machine": ("the machine's memory", _KILLS),
}
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
_EVENTS: Final = {
    "stalled_s": "waited for memory: {:.1f} s",
    "refusals": "the control group's limit was hit {:,} times",
    "kills": "the kernel killed {:,} processes of the control group",
    "lost_lines": "{:,} lines could not be written",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """One limit of a job, and the memory in use; its text says what to change.

    Attributes:
        name: `"host"`, `"device"` or `"shared"`, as in a `MemoryBudget` (`"shared"` also without
            one, or with a larger one, by the size of `/dev/shm`); `"cgroup"` or `"machine"`.
        used_bytes: bytes in use.
        limit_bytes: bytes that may be used.
    """

    name: str
    used_bytes: int
    limit_bytes: int

    @property
    def share(self) -> float:
        """Used / limit."""
        return self.used_bytes / self.limit_bytes

    def __str__(self) -> str:
        what, advice = _LIMITS[self.name]
        used, limit = format_bytes(self.used_bytes), format_bytes(self.limit_bytes)
        return f"{what}: {used} of {limit} are used; {advice}"


def limits_of(
    sample: MemorySample, budget: Mapping[str, int], pools: Mapping[str, int], *, on_cpu: bool
) -> list[MemoryLimit]:
    """The limits that a sample can be compared with.

    Args:
        sample: the use of memory.
        budget: the job's stated bytes, by name.
        pools: sizes of the machine's memories in bytes, by name.
        on_cpu: whether the budget's device is the CPU.
    """
    used = {name: getattr(sample, f"{name}_bytes") for name in _LIMITS}
    if on_cpu:  # the kernel's peak, which no interval misses
        used["device"] = sample.process_peak_bytes or sample.process_bytes
    limits = []
    for name, used_bytes in used.items():
        amounts = [one[name] for one in (budget, pools) if name in one]
        if amounts and used_bytes is not None:  # /dev/shm may be smaller than its budget
            limit = MemoryLimit(name=name, used_bytes=used_bytes, limit_bytes=min(amounts))
            limits.append(limit)
    return limits


def largest_shares(limits: Sequence[MemoryLimit]) -> tuple[MemoryLimit, ...]:
    """The limits at the largest shares of them that were used, one for each name.

    A limit may change: of several control groups, it is the limit of the one with the least left.
    """
    largest = {limit.name: limit for limit in sorted(limits, key=lambda limit: limit.share)}
    return tuple(largest[name] for name in _LIMITS if name in largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReport:
    """One run of a `MemoryMonitor`, so far or from its file; `print` shows it as a table.

    Attributes:
        begin: the first record of the file: `pid`, `rank`, `unix_s`, `budget`, `on_cpu`.
        history: samples, in order; one may be the maximum of several.
        snapshots: names and samples, in order.
        peak: the maximum of each number.
        limits: each limit, when the largest share of it was in use.
        batches: records of the file's batches. A monitor's own report has none.
        end: the last record of the file, or its numbers so far: `time_s`, `samples`,
            `processor_s`, `lost_lines`, `is_exact`, `refusals`, `kills`, `stalled_s`. Empty for a
            run that was killed, or is still running.
    """

    begin: Mapping[str, Any]
    history: tuple[MemorySample, ...]
    snapshots: tuple[tuple[str, MemorySample], ...]
    peak: MemorySample
    limits: tuple[MemoryLimit, ...]
    batches: tuple[Mapping[str, Any], ...] = ()
    end: Mapping[str, Any]

    @property
    def unread(self) -> list[str]:
        """Return amounts of the budget without a reading to compare with."""
        read = {limit.name for limit in self.limits}
        return [name for name in self.begin["budget"] if name not in read]

    def __str__(self) -> str:
        columns = [("peak", self.peak), *self.snapshots]
        rows = [["", *(name for name, _ in columns)]]
        samples = [sample.known() for _, sample in columns]
        for name, title in _TITLES.items():
            cells = [format_bytes(int(one[name])) if name in one else "" for one in samples]
            if any(cells):
                rows.append([title, *cells])
        return "\n".join([*aligned(rows), *self._notes()])

    def _notes(self) -> Iterator[str]:
        for limit in self.limits:
            used, most = format_bytes(limit.used_bytes), format_bytes(limit.limit_bytes)
            yield f"{limit.share:.0%} of the limit {limit.name}: {used} of {most}"
        for name in self.unread:
            yield f"{name}: no reading can be compared with its budget"
        if self.batches:
            largest = max(batch["bytes"] for batch in self.batches)
            yield f"{len(self.batches):,} batches, the largest of {format_bytes(largest)}"
        predicted = [one for one in self.batches if one.get("predicted_bytes")]
        if predicted:
            share = max(batch["bytes"] / batch["predicted_bytes"] for batch in predicted)
            yield f"batches took at most {share:.1%} of the predicted bytes"
        if not self.end:
            yield f"no end was written: it was killed after {self.peak.time_s:.1f} s, or is running"
            return
        for name, text in _EVENTS.items():
            if self.end.get(name):
                yield text.format(self.end[name])
        if not self.end["is_exact"]:
            yield "shared pages cannot be told apart and are not in the job's sum"
        seconds, spent_s = self.end["time_s"], self.end["processor_s"]
        share = spent_s / seconds if seconds else 0.0
        yield f"{self.end['samples']:,} samples in {seconds:.1f} s, in {share:.2%} of a processor"


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """Read the records of a monitor's file, in order, each with an `"event"` and a `"run"`.

    Lines that are incomplete, after a full disk or a crash, are left out.
    """
    records = []
    for line in Path(path).read_text("utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and {"event", "run"} <= record.keys():
            records.append(record)
    return records


def recorded_runs(path: str | Path) -> list[MonitorReport]:
    """Read the runs of a monitor's file, in the order in which they began.

    Several monitors may have written to the file at the same time.

    Raises:
        OSError: the file cannot be read.
        OptionError: the file has no run in it, or has another format.
    """
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in read_records(path):
        runs[record["run"]].append(record)
    begun = [records for records in runs.values() if records[0]["event"] == "begin"]
    if not begun:
        raise OptionError(f"{path}: no run of a MemoryMonitor is in it")
    for records in begun:
        if (found := records[0].get("format")) != FORMAT:
            raise OptionError(f"{path}: format {found!r} of a monitor's file is not {FORMAT}")
    return [_report(records) for records in begun]


def _report(records: Sequence[dict[str, Any]]) -> MonitorReport:
    """The report of a run's records, also if the last one is missing."""
    by_event: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        by_event[record["event"]].append(record)
    begin, end = records[0], (by_event["end"] or [{}])[-1]
    history = tuple(map(_sample, by_event["sample"]))
    snapshots = tuple((one["name"], _sample(one)) for one in by_event["snapshot"])
    seen = [*history, *(sample for _, sample in snapshots)]
    limits = [_limit(one) for one in [*by_event["limit"], *end.get("limits", ())]]
    if end:
        seen.append(_sample(end["peak"]))
    peak = reduce(MemorySample.merged, seen, MemorySample(time_s=0.0))
    if not end:
        limits += limits_of(peak, begin["budget"], {}, on_cpu=begin["on_cpu"])
    return MonitorReport(
        begin=begin,
        history=history,
        snapshots=snapshots,
        peak=peak,
        limits=largest_shares(limits),
        batches=tuple(by_event["batch"]),
        end=end,
    )


def _sample(record: Mapping[str, Any]) -> MemorySample:
    return MemorySample(**{name: record[name] for name in NAMES if name in record})


def _limit(record: Mapping[str, Any]) -> MemoryLimit:
    names = ("name", "used_bytes", "limit_bytes")
    return MemoryLimit(**{name: record[name] for name in names})
