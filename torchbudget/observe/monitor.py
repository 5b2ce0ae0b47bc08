"""`MemoryMonitor`: what the memory of a job really does while it runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchbudget.budget import MemoryBudget
from torchbudget.checks import at_least_one, positive_number
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.distributed import ranks_of
from torchbudget.errors import MachineError, OptionError
from torchbudget.machine.cuda import named_cuda
from torchbudget.machine.device import is_cpu
from torchbudget.machine.peaks import Peak, peak_memory
from torchbudget.observe.limits import MemoryLimit
from torchbudget.observe.lines import FORMAT
from torchbudget.observe.outputs import Outputs, ScalarWriter
from torchbudget.observe.recorder import Recorder
from torchbudget.observe.report import MonitorReport
from torchbudget.observe.sample import MemoryReader, MemorySample
from torchbudget.protocols import Replannable
from torchbudget.units import Amount, parse_bytes


class MemoryMonitor:
    """Samples what the memory of a process and all its descendants does, in a thread.

    A context manager. It reads the processes (workers that come and go included), `/dev/shm`, the
    control group, the machine and the CUDA device; keeps true peaks, as the kernel and the
    allocator keep them; and warns before a limit is reached. Reading takes about 1 % of one
    processor's time at the most: what is expensive to read is read when what is cheap to read has
    changed. It never initialises CUDA, draws no random numbers and touches no tensor.

    Args:
        budget: whose amounts it warns before; an amount is the device's bytes. `None`: only the
            machine's own limits.
        device: whose memory is read, and on which `batch` measures. `None`: the current CUDA device
            once this process uses CUDA, or the one that most is reserved on if nothing is on that;
            before, and elsewhere, the CPU. Where torch is built for CUDA, resident memory is
            compared with the budget's device bytes only if this is `"cpu"`.
        pid: a process to watch, with its descendants; `None`: this one. Of another process neither
            the device nor batches can be seen. Watching ends when it ends.
        interval_s: seconds between samples; longer where reading takes long.
        history: bytes that the kept samples may take; when they are full, neighbours are merged, by
            their maxima.
        path: a file that JSON lines are appended to; each rank needs one of its own.
        writer: a `SummaryWriter`, or another object with `add_scalar`, called from the thread.
        on_limit: called with a `MemoryLimit` each time that use comes near a limit, from the thread
            as a rule.
        warn_at: the share of a limit from which on it is near.
        replan: a `MemoryBudgetBatchSampler` of a `MeasuredCost`, to be corrected by what batches
            really take, see `batch`.
        replan_batches: how many batches come between two corrections.

    Raises:
        OptionError: an option is out of range, the device is neither a CPU nor a CUDA device, or
            the sampler's cost is no measured one.
        BudgetError: an amount cannot be read.

    Entering it raises `MachineError` where there is no such process or no `/proc`, and `OSError`
    where the file cannot be opened.

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
        history: Amount = "1MiB",
        path: str | Path | None = None,
        writer: ScalarWriter | None = None,
        on_limit: Callable[[MemoryLimit], object] | None = None,
        warn_at: float = 0.95,
        replan: Replannable | None = None,
        replan_batches: int = 10,
    ) -> None:
        if replan is not None and not isinstance(replan.cost, MeasuredCost):
            raise OptionError(f"only a measured cost is corrected, this is {replan.cost!r}")
        self._budget = None if budget is None else MemoryBudget.of(budget)
        if device is not None and not is_cpu(device):
            named_cuda(device)  # nothing reads the memory of another kind
        self._device = device
        self._pid = pid
        self._interval_s = positive_number("interval_s", interval_s)
        self._history_bytes = parse_bytes(history)
        self._destinations = path, writer, on_limit
        self._warn_at = positive_number("warn_at", warn_at)
        if self._warn_at > 1:  # 95 would never warn
            raise OptionError(f"warn_at must be a share, above 0 and at most 1, got {warn_at!r}")
        self._sampler = replan
        self._replan_batches = at_least_one("replan_batches", replan_batches)
        self._owner: int | None = None  # the process that has entered it
        self._snapshots: list[tuple[str, MemorySample]] = []
        self._batches = 0
        self._ended = threading.Event()
        self._report: MonitorReport | None = None  # at the end

    def __enter__(self) -> MemoryMonitor:
        if self._owner is not None:
            raise OptionError("a monitor is entered once; make another one")
        reader = MemoryReader(self._pid, self._device)
        self._outputs = Outputs(*self._destinations)
        self._recorder = Recorder(
            reader,
            self._outputs,
            budget=self._budget,
            interval_s=self._interval_s,
            history_bytes=self._history_bytes,
            warn_at=self._warn_at,
        )
        self._batch_device = reader.device
        self._outputs.write("begin", {**self._described(), "on_cpu": reader.is_cpu})
        try:
            self._recorder.read(whole=True)
        except BaseException:
            self._outputs.close()
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
        self._outputs.write("end", self._report.known())
        self._outputs.close()
        if kind is None:
            self._outputs.raise_again()

    def _described(self) -> dict[str, Any]:
        """What the file begins with."""
        amounts = {} if self._budget is None else asdict(self._budget)
        return {
            "format": FORMAT,
            "unix_s": time.time(),
            "pid": os.getpid() if self._pid is None else self._pid,
            "rank": ranks_of(None, None)[1],
            "budget": {name: amount for name, amount in amounts.items() if amount is not None},
        }

    def _run(self) -> None:
        """Read until the monitor or the process that it watches ends."""
        try:
            while not self._ended.wait(self._recorder.pace.wait_s()):
                if not self._read_if_there(whole=False):
                    return
        except Exception as error:  # noqa: BLE001  (a thread that ends silently sees nothing)
            self._outputs.warn("thread", f"the monitor has stopped: {error!r}")

    def _read_if_there(self, *, whole: bool) -> bool:
        """Read a sample; whether the watched process is there still."""
        try:
            self._recorder.read(whole=whole)
        except MachineError as error:
            if self._pid is not None:  # it has ended
                return False
            self._outputs.warn("reading", f"the monitor could not read a sample: {error}")
        return True

    def snapshot(self, name: str) -> MemorySample:
        """Read everything now, and keep it under a name, for the file and the report.

        Raises:
            OptionError: the monitor is not running in this process.
            MachineError: the watched process has ended.
        """
        self._check_running()
        sample = self._recorder.read(whole=True)
        self._snapshots.append((name, sample))
        self._outputs.write("snapshot", {"name": name, **sample.known()})
        self._outputs.raise_again()
        return sample

    @contextmanager
    def batch(
        self, n: int | None = None, size: int | Sequence[int] | None = None
    ) -> Iterator[Peak]:
        """Measure what a batch takes, inside the context: its forward, backward and step.

        It is written to the file. With `replan=sampler`, the sampler's cost observes it, and after
        every `replan_batches` batches the sampler plans later ones by what was observed: a run
        whose memory creeps up goes on with smaller batches. With `torch.distributed`, all ranks
        must have such a monitor, since they agree on it.

        Args:
            n: samples of the batch; `None` for one that has no padded size, which no sampler's
                cost observes.
            size: its padded size.

        Yields:
            What was measured; filled in when the context ends.

        Raises:
            OptionError: the monitor is not running in this process, or it watches another one; or
                it corrects a sampler, and the batch has no padded size.

        Warns:
            MeasureWarning: as `MeasuredCost.observe`.
        """
        self._check_running()
        if self._pid is not None:
            raise OptionError("batches of another process cannot be measured: leave out pid")
        if (n is None) != (size is None) or (n is None and self._sampler is not None):
            raise OptionError(
                "replan=… needs the samples and the padded size of each batch, such as "
                f"batch.num_samples and batch.padded_size of a PaddedBatch, got {n!r} and {size!r}"
            )
        with peak_memory(self._batch_device(), synchronize=False) as peak:
            yield peak
        self._batches += 1
        self._write_batch(n, size, peak)
        if self._sampler is not None and n is not None and size is not None:
            self._sampler.cost.observe(n, size, peak)
            if self._batches % self._replan_batches == 0:
                self._sampler.replan()
        self._outputs.raise_again()

    def _write_batch(self, n: int | None, size: int | Sequence[int] | None, peak: Peak) -> None:
        # The further it goes, the fewer of them, so that the file stays small.
        if self._batches % 10 ** max(0, len(str(self._batches)) - 4):
            return
        record: dict[str, Any] = {"time_s": self._recorder.now_s(), "bytes": peak.bytes}
        if n is not None and size is not None:
            sizes = [int(one) for one in size] if isinstance(size, Sequence) else [int(size)]
            record |= {"n": int(n), "size": sizes}
            if self._sampler is not None:
                padded = sizes if len(sizes) > 1 else sizes[0]
                record["predicted_bytes"] = int(self._sampler.cost.batch_bytes(n, padded))
        self._outputs.write("batch", record)

    def report(self) -> MonitorReport:
        """What was seen so far; after the end, until then. As text, a table.

        Raises:
            OptionError: the monitor is not running in this process.
        """
        if self._report is not None:
            return self._report
        self._check_running()
        return self._recorder.report(tuple(self._snapshots))

    def samples(self) -> list[MemorySample]:
        """What is kept of the samples so far, in order; each may be the maxima of several.

        Raises:
            OptionError: the monitor was not entered in this process.
        """
        if self._owner != os.getpid():
            raise OptionError(_NOT_HERE)
        return self._recorder.samples()

    def _check_running(self) -> None:
        if self._owner != os.getpid() or self._report is not None:
            raise OptionError(_NOT_HERE)


_NOT_HERE = (
    "the monitor is not running in this process: use it inside its `with`, and not in a worker, "
    "whose memory it sees from outside"
)
