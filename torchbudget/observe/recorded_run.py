"""`RecordedRun`: what a `MemoryMonitor` has written, read back, also of a run that was killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.errors import OptionError
from torchbudget.observe.lines import FORMAT, read_records

# What a budget's amounts are compared with.
_COMPARED: Final = {"device": "device_bytes", "host": "host_bytes", "shared": "shared_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """One run of a file: the records from a `begin` on.

    Attributes:
        begin: what it began with: pid, rank, budget, time.
        samples: that were written, in order, by names of `MemorySample`.
        snapshots: likewise, each with its `name`.
        batches: with `bytes`; `n` and `size` of padded ones, and `predicted_bytes` of a measured
            cost.
        limits: that use came near to.
        end: what the monitor wrote when it ended; `None`: it was killed, or runs still.
    """

    begin: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    snapshots: Sequence[Mapping[str, Any]]
    batches: Sequence[Mapping[str, Any]]
    limits: Sequence[Mapping[str, Any]]
    end: Mapping[str, Any] | None

    @property
    def budget(self) -> dict[str, int]:
        """The amounts that were stated, by name."""
        return dict(self.begin.get("budget", {}))

    @property
    def seconds(self) -> float:
        """How long it ran, as far as was written."""
        last = [self.end] if self.end is not None else [*self.samples[-1:], *self.snapshots[-1:]]
        return max((float(one["time_s"]) for one in last), default=0.0)

    @property
    def peaks(self) -> dict[str, int]:
        """The most of each number, in bytes, by name.

        The monitor's own where it ended, which are the kernel's; else of what was written.
        """
        sources = [*self.samples, *self.snapshots]
        if self.end is not None:
            sources.append(self.end["peak"])
        peaks: dict[str, int] = {}
        for source in sources:
            for name, value in {**source, **_device(source)}.items():
                if name.endswith("_bytes") and value > peaks.get(name, -1):
                    peaks[name] = int(value)
        return peaks

    def compared(self) -> dict[str, tuple[int, int]]:
        """The peak and the budget of each amount that was stated and read.

        Where the device is the CPU, its bytes are the process's own memory.
        """
        peaks = self.peaks
        if self.begin.get("on_cpu", False) and "process_peak_bytes" in peaks:
            peaks["device_bytes"] = peaks["process_peak_bytes"]
        return {
            what: (peaks[_COMPARED[what]], amount)
            for what, amount in self.budget.items()
            if _COMPARED[what] in peaks
        }

    def series(self, name: str) -> npt.NDArray[np.float64]:
        """A number of each sample, shape `(samples,)`; NaN where it was not read."""
        rows = ({**sample, **_device(sample)}.get(name, np.nan) for sample in self.samples)
        return np.fromiter(rows, np.float64, len(self.samples))


def _device(sample: Mapping[str, Any]) -> dict[str, int]:
    """What the process uses of a CUDA device, where that was read."""
    if "reserved_bytes" not in sample:
        return {}
    return {"device_bytes": sample["reserved_bytes"] + sample.get("outside_bytes", 0)}


def recorded_runs(path: str | Path) -> list[RecordedRun]:
    """The runs of a file that monitors wrote, in the order in which they began.

    Of several that wrote at once, each has its own records.

    Raises:
        OSError: it cannot be read.
        OptionError: there is no run in it, or it is of another format.
    """
    parts: list[list[dict[str, Any]]] = []
    of_run: dict[Any, list[dict[str, Any]]] = {}
    for record in read_records(path):
        if record["event"] == "begin":
            if record.get("format") != FORMAT:
                found = record.get("format")
                raise OptionError(f"{path}: format {found!r} of a monitor's file is not {FORMAT}")
            parts.append([])
            of_run[record.get("run")] = parts[-1]
        if record.get("run") in of_run:  # else its beginning is lost
            of_run[record.get("run")].append(record)
    if not parts:
        raise OptionError(f"{path}: no run of a MemoryMonitor is in it")
    return [_run(records) for records in parts]


def _run(records: Sequence[dict[str, Any]]) -> RecordedRun:
    def those(event: str) -> list[dict[str, Any]]:
        return [record for record in records if record["event"] == event]

    ends = those("end")
    return RecordedRun(
        begin=records[0],
        samples=those("sample"),
        snapshots=those("snapshot"),
        batches=those("batch"),
        limits=those("limit"),
        end=ends[-1] if ends else None,
    )
