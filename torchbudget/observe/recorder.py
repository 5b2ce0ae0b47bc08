"""Reads samples at a bearable pace, and keeps what they show."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

from torchbudget.budget import MemoryBudget
from torchbudget.observe.history import History
from torchbudget.observe.limits import LimitWatch, MemoryLimit, limits_of
from torchbudget.observe.outputs import Outputs
from torchbudget.observe.pace import Pace
from torchbudget.observe.report import MonitorReport
from torchbudget.observe.sample import COLUMNS, MemoryReader, MemorySample


class Recorder:
    """What a monitor has seen since it began; used by its thread and by the training's.

    Args:
        reader: of samples.
        outputs: that complete rows of the history, and limits, are written to.
        budget: the job's.
        interval_s: between samples, at the least.
        history_bytes: that the kept samples may take.
        warn_at: the share of a limit from which on it is near.

    Attributes:
        pace: when to read.
    """

    def __init__(
        self,
        reader: MemoryReader,
        outputs: Outputs,
        *,
        budget: MemoryBudget | None,
        interval_s: float,
        history_bytes: int,
        warn_at: float,
    ) -> None:
        self.pace = Pace(interval_s)
        self._reader = reader
        self._outputs = outputs
        self._budget = budget
        host_bytes = None if budget is None else budget.host
        self._near_bytes = math.inf if host_bytes is None else warn_at * host_bytes
        self._history = History(len(COLUMNS), history_bytes)
        self._watch = LimitWatch(warn_at)
        self._samples = 0
        self._began_s = time.perf_counter()
        self._lock = threading.RLock()  # what is written to may be a user's, and call back

    def now_s(self) -> float:
        """Seconds since it began."""
        return time.perf_counter() - self._began_s

    def read(self, *, whole: bool) -> MemorySample:
        """Read a sample, a whole one too where it is worth it, and keep it.

        Raises:
            MachineError: the process has ended, or a reading is missing.
        """
        before_s = time.thread_time()
        with self._lock:
            sample = self._reader.read(self.now_s(), whole=whole)
            if not whole and self.pace.wants_whole(sample, self._near_bytes):
                sample = self._reader.read(self.now_s(), whole=True)
            row = self._history.add(sample.row())
            if row is not None:
                merged = MemorySample.of_row(row)
                self._outputs.write("sample", merged.known())
                self._outputs.write_scalars(merged)
            reached = list(self._watch.reached(self._limits_of(sample)))
        for limit in reached:
            self._outputs.announce(sample.time_s, limit)
        with self._lock:
            self._samples += 1
            self.pace.read(time.thread_time() - before_s, sample)
        return sample

    def _limits_of(self, sample: MemorySample) -> tuple[MemoryLimit, ...]:
        reader = self._reader
        return limits_of(sample, self._budget, reader.pools, on_cpu=reader.is_cpu)

    def samples(self) -> list[MemorySample]:
        """What is kept of the history, in order."""
        with self._lock:
            rows = self._history.rows()
        return [MemorySample.of_row(row) for row in rows]

    def report(self, snapshots: tuple[tuple[str, MemorySample], ...]) -> MonitorReport:
        """What was seen so far."""
        with self._lock:
            peak = MemorySample.of_row(self._history.most())
            peak = replace(peak, **self._reader.device_peaks())
            process_bytes = max(peak.process_bytes, peak.process_peak_bytes or 0)
            most = replace(peak, process_bytes=process_bytes)
            # The kernel and the allocator know the device's peak better than the samples.
            limits = {limit.name: limit for limit in self._limits_of(most)}
            limits |= {k: one for k, one in self._watch.most.items() if k != "device"}
            return MonitorReport(
                peak=peak,
                limits=tuple(limits.values()),
                snapshots=snapshots,
                events=self._reader.events(),
                is_exact=self._reader.whole_is_exact,
                seconds=self.now_s(),
                samples=self._samples,
                processor_s=self.pace.spent_s,
                lost_lines=self._outputs.lost_lines,
            )
