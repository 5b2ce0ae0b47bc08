"""The recording of a run: when samples are read, which are kept, and how they are written."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from torchbudget.errors import MonitorWarning, TorchBudgetWarning
from torchbudget.observe.sample import MemorySample
from torchbudget.warn import warn

# Shares of one processor's time: for quick readings, and for whole ones. Together they stay below
# 1 % in `examples/benchmarks/monitor_overhead.py`.
_QUICK_SHARE: Final = 0.0025
_WHOLE_SHARE: Final = 0.0055
# Share of the time for whole readings while the job's memory comes near its limit.
_NEAR_SHARE: Final = 0.1
_WRITE: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class Pace:
    """Decides when the next reading comes, and whether it is a whole one.

    Args:
        interval_s: seconds between readings, at the least.

    Attributes:
        spent_s: processor time that readings have taken.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._quick_s = 0.0  # processor time of the last quick reading
        self._whole_s = 0.0
        self._whole: MemorySample | None = None  # the last whole one
        self.spent_s = 0.0

    def wait_s(self) -> float:
        """Seconds until the next reading."""
        return max(self._interval_s, self._quick_s / _QUICK_SHARE)

    def note(self, spent_s: float, sample: MemorySample) -> None:
        """Note a sample, and the processor time that it and its outputs took."""
        self.spent_s += spent_s
        if sample.host_bytes is None:
            self._quick_s = spent_s
        else:
            self._whole_s, self._whole = spent_s, sample

    def wants_whole(self, sample: MemorySample, near_bytes: float) -> bool:
        """Whether a whole reading should follow a quick one.

        It follows once the last whole reading is so long ago that the share of the time allows
        another one: a peak of the job that lasts that long is always seen. If the job may have
        come near its limit since then, a larger share is allowed.

        Args:
            sample: the quick reading.
            near_bytes: bytes of the job from which on it is near its limit.
        """
        last = self._whole
        if last is None or last.host_bytes is None:
            return True
        now_bytes = last.host_bytes + _quick_bytes(sample) - _quick_bytes(last)
        comes_near = last.host_bytes < near_bytes <= now_bytes
        share = _NEAR_SHARE if comes_near else _WHOLE_SHARE
        return self._whole_s <= share * (sample.time_s - last.time_s)


def _quick_bytes(sample: MemorySample) -> int:
    """Bytes that change with the job's, though shared pages are counted more than once."""
    return sample.resident_bytes + (sample.shared_bytes or 0)


class History:
    """Samples in order. When the history is full, neighbours are merged by their maxima.

    So every peak is kept, and only its time is known less exactly. Adding takes O(1) on average.

    Args:
        room: the most samples that are kept, an even number.

    Attributes:
        kept: the samples; the last one may be incomplete.
        stride: number of added samples in one kept sample.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self.kept: list[MemorySample] = []
        self._in_last = 0  # added samples in the last kept one
        self.stride = 1

    def add(self, sample: MemorySample) -> MemorySample | None:
        """Add a sample; return the kept sample that it completed, if any."""
        kept = self.kept
        if 0 < self._in_last < self.stride:
            kept[-1] = kept[-1].merged(sample)
            self._in_last += 1
        else:
            if len(kept) == self._room:
                kept[:] = [a.merged(b) for a, b in zip(kept[::2], kept[1::2], strict=True)]
                self.stride *= 2
            kept.append(sample)
            self._in_last = 1
        return kept[-1] if self._in_last == self.stride else None


class ScalarWriter(Protocol):
    """A writer of scalars: TensorBoard's `SummaryWriter`, or another one with its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one number."""


class Output:
    """The file, the scalar writer and the warnings of a monitor.

    A failure is warned of once, and never ends a training. Lines are not buffered: each is one
    write to the kernel. So a forked process writes none a second time, and the file is whole up to
    the last moment of its process.

    Args:
        path: the file, which is made if it does not exist; or `None`.
        writer: a writer of scalars, or `None`.

    Attributes:
        lost_lines: number of lines that could not be written.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None, writer: ScalarWriter | None) -> None:
        self._writer = writer
        self._run = uuid.uuid4().hex[:8]  # other monitors may write to the same file meanwhile
        self._warned: set[str] = set()
        self._raised: TorchBudgetWarning | None = None
        self.lost_lines = 0
        self._file = None if path is None else os.open(path, _WRITE, 0o644)
        # An earlier writer may have left a line without an end.
        self._is_torn = self._file is not None and os.fstat(self._file).st_size > 0

    def write(self, event: str, record: Mapping[str, Any]) -> None:
        """Append a line to the file, if there is one."""
        if self._file is None:
            return
        line = {"event": event, "run": self._run, **record}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        data = b"\n" + data if self._is_torn else data
        try:
            written = os.write(self._file, data)
            self._is_torn = written < len(data)
            if self._is_torn:
                raise OSError(f"only {written} of {len(data)} bytes were written")
        except OSError as error:
            self.lost_lines += 1
            text = f"the monitor's file cannot be written to: {error}; lost lines are counted"
            self.warn("file", text)

    def write_sample(self, sample: MemorySample) -> None:
        """Append a sample to the file, and write its numbers as scalars.

        The steps of the scalars are milliseconds since the monitor began.
        """
        self.write("sample", sample.known())
        if self._writer is not None:
            step = round(1000 * sample.time_s)
            for name, value in sample.known().items():
                if name != "time_s":
                    self.call("writer", self._writer.add_scalar, f"memory/{name}", value, step)

    def call(self, name: str, function: Callable[..., object], *arguments: object) -> None:
        """Call a user's function, whose fault must not end a training."""
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001  (it may raise anything)
            self.warn(name, f"the monitor's {name} raised {error!r}")

    def warn(
        self, key: str, text: str, category: type[TorchBudgetWarning] = MonitorWarning
    ) -> None:
        """Warn, once for each key.

        Where a filter makes an error of the warning, it is raised where the training calls the
        monitor next, since nobody would see it in the monitor's thread.
        """
        if key not in self._warned:
            self._warned.add(key)
            try:
                warn(text, category)
            except TorchBudgetWarning as warning:
                self._raised = warning

    def raise_again(self) -> None:
        """Raise the warning that a filter has made an error."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
