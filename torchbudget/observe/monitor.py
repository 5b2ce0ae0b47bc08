"""`MemoryMonitor`: the real memory of a job while it runs."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, positive_number
from torchbudget.cost.measured import MeasuredCost
from torchbudget.distributed import Ranks
from torchbudget.errors import (
    MachineError,
    MemoryLimitWarning,
    MonitorWarning,
    OptionError,
    TorchBudgetWarning,
    warn,
)
from torchbudget.machine.device import is_cpu, named_cuda
from torchbudget.machine.peaks import Peak, peak_memory
from torchbudget.observe.report import (
    FORMAT,
    MemoryLimit,
    MonitorReport,
    largest_shares,
    limits_of,
)
from torchbudget.observe.sample import MemoryReader, MemorySample
from torchbudget.protocols import Replannable
from torchbudget.units import Amount

_ROOM: Final = 2048  # samples of the history: 592 bytes each by `sys.getsizeof`, 1.2 MB in all


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


class MemoryMonitor:
    """Measures the memory of a process and all its descendants, in a thread.

    Use it as a context manager. It reads the processes (workers that start and end included),
    `/dev/shm`, the control group, the machine and the CUDA device; reports true peaks, which the
    kernel and the allocator record; and warns near a limit. Reading takes at most about 1 % of one
    processor's time: expensive numbers are read only if cheap ones have changed. The monitor never
    initialises CUDA, draws no random numbers and touches no tensor.

    Args:
        budget: limits near which it warns; a plain amount is the device's bytes. `None`: only the
            machine's own limits.
        device: the device to read, and on which `batch` measures. `None`: the current CUDA device
            once this process uses CUDA (or the one with the most reserved bytes, if nothing is
            reserved on the current one), and until then the CPU. If torch is built for CUDA,
            resident memory is compared with the budget's device bytes only with `device="cpu"`.
        pid: a process to watch, with its descendants; `None`: this one. The monitor cannot see the
            device and the batches of another process. It stops when the process ends.
        interval_s: seconds between samples; longer if reading takes long.
        path: a file to which JSON lines are appended.
        writer: a `SummaryWriter`, or another object with `add_scalar`, called from the thread.
        on_limit: called with a `MemoryLimit` when memory use first comes near it, usually in the
            thread.
        warn_at: share of a limit from which memory use is near the limit.
        replan: a `MemoryBudgetBatchSampler` with a `MeasuredCost`, which is corrected by the real
            peaks of its batches; see `batch`.
        replan_batches: number of batches between two corrections.

    Raises:
        OptionError: an option is out of range, the device is neither a CPU nor a CUDA device, or
            the sampler's cost is not a `MeasuredCost`.
        BudgetError: an amount cannot be read.

    Entering the context raises `MachineError` if there is no such process or no `/proc`, and
    `OSError` if the file cannot be opened.

    >>> from torchbudget import MemoryMonitor
    >>> with MemoryMonitor("8GiB") as monitor:
    ...     sample = monitor.snapshot("after loading")
    >>> monitor.report().peak.process_bytes >= sample.process_bytes > 0
    True
    """

    def __init__(
        self,
        budget: MemoryBudget | Amount | None = None,
        *,
        device: torch.device | str | None = None,
        pid: int | None = None,
        interval_s: float = 0.1,
        path: str | Path | None = None,
        writer: ScalarWriter | None = None,
        on_limit: Callable[[MemoryLimit], object] | None = None,
        warn_at: float = 0.95,
        replan: Replannable | None = None,
        replan_batches: int = 10,
    ) -> None:
        if replan is not None and not isinstance(replan.cost, MeasuredCost):
            raise OptionError(f"replan needs a cost of measure_cost, got {replan.cost!r}")
        amounts = {} if budget is None else asdict(MemoryBudget.of(budget))
        self._budget = {name: amount for name, amount in amounts.items() if amount is not None}
        if device is not None and not is_cpu(device):
            named_cuda(device)  # nothing reads the memory of another kind
        self._device = device
        self._pid = pid
        self._pace = Pace(positive_number("interval_s", interval_s))
        self._history = History(_ROOM)
        self._outputs = path, writer
        self._on_limit = on_limit
        self._warn_at = positive_number("warn_at", warn_at)
        if self._warn_at > 1:  # 95 would never warn
            raise OptionError(f"warn_at must be a share, above 0 and at most 1, got {warn_at!r}")
        self._near_bytes = self._warn_at * self._budget.get("host", math.inf)
        self._sampler = replan
        self._replan_batches = at_least_one("replan_batches", replan_batches)
        self._owner: int | None = None  # the process that has entered it
        self._snapshots: list[tuple[str, MemorySample]] = []
        self._peak = MemorySample(time_s=0.0)
        self._limits: tuple[MemoryLimit, ...] = ()  # at the largest shares
        self._samples = self._batches = 0
        self._lock = threading.RLock()  # a user's writer may call back
        self._ended = threading.Event()
        self._report: MonitorReport | None = None  # at the end

    def __enter__(self) -> MemoryMonitor:
        if self._owner is not None:
            raise OptionError("a monitor is entered once; make another one")
        self._reader = MemoryReader(self._pid, self._device)
        self._output = Output(*self._outputs)
        self._began_s = time.perf_counter()
        self._begin = {
            "format": FORMAT,
            "unix_s": time.time(),
            "pid": os.getpid() if self._pid is None else self._pid,
            "rank": Ranks().rank,
            "budget": self._budget,
            "on_cpu": self._reader.is_cpu,
        }
        self._output.write("begin", self._begin)
        try:
            self._read(whole=True)
        except BaseException:
            self._output.close()
            raise
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="MemoryMonitor", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._owner != os.getpid():  # a process that was forked inside has no thread to end
            return
        self._ended.set()
        self._thread.join()
        self._read_if_there(whole=True)
        self._report = self.report()
        self._output.write("end", self._report.end)
        self._output.close()
        if kind is None:
            self._output.raise_again()

    def _run(self) -> None:
        """Read until the monitor or the process that it watches ends."""
        while not self._ended.wait(self._pace.wait_s()) and self._read_if_there():
            pass

    def _read_if_there(self, *, whole: bool = False) -> bool:
        """Read a sample; return whether the watched process still exists."""
        try:
            self._read(whole=whole)
        except Exception as error:  # noqa: BLE001  (a thread that ends silently sees nothing)
            if self._pid is not None and isinstance(error, MachineError):  # it has ended
                return False
            self._output.warn("reading", f"the monitor could not read a sample: {error!r}")
        return True

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _read(self, *, whole: bool) -> MemorySample:
        """Read a sample, a whole one also where it is due, and keep it."""
        before_s = time.thread_time()
        with self._lock:
            sample = self._reader.read(self._now_s(), whole=whole)
            if not whole and self._pace.wants_whole(sample, self._near_bytes):
                sample = self._reader.read(self._now_s(), whole=True)
            self._samples += 1
            self._peak = self._peak.merged(sample)
            complete = self._history.add(sample)
            if complete is not None:
                self._output.write_sample(complete)
            limits = self._limits_of(sample)
            known = {one.name for one in self._limits if one.share >= self._warn_at}
            self._limits = largest_shares([*self._limits, *limits])
            near = [one for one in limits if one.share >= self._warn_at and one.name not in known]
        for limit in near:
            self._output.write("limit", {"time_s": sample.time_s, **asdict(limit)})
            self._output.warn(f"limit {limit.name}", str(limit), MemoryLimitWarning)
            if self._on_limit is not None:
                self._output.call("on_limit", self._on_limit, limit)
        with self._lock:
            self._pace.note(time.thread_time() - before_s, sample)
        return sample

    def _limits_of(self, sample: MemorySample) -> list[MemoryLimit]:
        reader = self._reader
        return limits_of(sample, self._budget, reader.limit_bytes, on_cpu=reader.is_cpu)

    def snapshot(self, name: str) -> MemorySample:
        """Read all numbers now, and keep them under a name for the file and the report.

        Raises:
            OptionError: the monitor is not running in this process.
            MachineError: the watched process has ended.
        """
        self._check_running()
        sample = self._read(whole=True)
        self._snapshots.append((name, sample))
        self._output.write("snapshot", {"name": name, **sample.known()})
        self._output.raise_again()
        return sample

    @contextmanager
    def batch(
        self, n: int | None = None, size: int | Sequence[int] | None = None
    ) -> Iterator[Peak]:
        """Measure the peak of a batch inside the context: its forward, backward and step.

        The peak is written to the file. With `replan=sampler`, the sampler's cost observes the
        peak, and after every `replan_batches` batches the sampler plans later batches by these
        observations, so that a run whose memory grows continues with smaller batches. With
        `torch.distributed`, all ranks must have such a monitor, since they agree on the correction.

        Args:
            n: number of samples in the batch; `None` without `replan=`.
            size: padded size of the batch.

        Yields:
            The peak, which is filled in when the context ends.

        Raises:
            OptionError: the monitor is not running in this process, or it watches another one; or
                with `replan=`, the padded size is not given.

        Warns:
            MeasureWarning: as in `MeasuredCost.observe`.
        """
        self._check_running()
        if self._pid is not None:
            raise OptionError("batches of another process cannot be measured: leave out pid")
        if (n is None) != (size is None) or (n is None and self._sampler is not None):
            raise OptionError(
                "replan=… needs the samples and the padded size of each batch, such as "
                f"batch.num_samples and batch.padded_size of a PaddedBatch, got {n!r} and {size!r}"
            )
        with peak_memory(self._reader.device(), synchronize=False) as peak:
            yield peak
        self._batches += 1
        record: dict[str, Any] = {"time_s": self._now_s(), "bytes": peak.bytes}
        if n is not None and size is not None:
            record |= {"n": int(n), "size": [int(one) for one in np.ravel(size)]}
            if self._sampler is not None:
                predicted_bytes = self._sampler.cost.chosen.batch_bytes(n, size)
                record["predicted_bytes"] = int(np.ravel(predicted_bytes)[0])
        # The longer the run, the fewer batches are written, so that the file stays small.
        if not self._batches % 10 ** max(0, len(str(self._batches)) - 4):
            self._output.write("batch", record)
        if self._sampler is not None and n is not None and size is not None:
            self._sampler.cost.observe(n, size, peak)
            if self._batches % self._replan_batches == 0:
                self._sampler.replan()
        self._output.raise_again()

    def report(self) -> MonitorReport:
        """Return the report of the run so far; `print` shows it as a table.

        Raises:
            OptionError: the monitor is not running in this process.
        """
        if self._report is not None:
            return self._report
        self._check_running()
        with self._lock:
            peak = replace(self._peak, **self._reader.device_peaks())
            # The kernel and the allocator know the device's peak better than the samples.
            device = [one for one in self._limits_of(peak) if one.name == "device"]
            limits = largest_shares([*self._limits, *device])
            return MonitorReport(
                begin=self._begin,
                history=tuple(self._history.kept),
                snapshots=tuple(self._snapshots),
                peak=peak,
                limits=limits,
                end={
                    "time_s": self._now_s(),
                    "peak": peak.known(),
                    "limits": [asdict(limit) for limit in limits],
                    "is_exact": self._reader.is_exact,
                    "samples": self._samples,
                    "processor_s": self._pace.spent_s,
                    "lost_lines": self._output.lost_lines,
                    **self._reader.events(),
                },
            )

    def _check_running(self) -> None:
        if self._owner != os.getpid() or self._report is not None:
            raise OptionError(
                "the monitor is not running in this process: use it inside its `with`, and not in "
                "a worker, whose memory it sees from outside"
            )
