"""What a monitor sees, compared with what the kernel counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.memory_groups import memory_group
from torchbudget import MemoryBudget, MemoryMonitor, peak_memory
from torchbudget.errors import MachineError, MemoryLimitWarning, MonitorWarning, OptionError
from torchbudget.machine.high_water import reset_peak_memory
from torchbudget.machine.process_tree import process_memory
from torchbudget.observe.limits import MemoryLimit
from torchbudget.observe.lines import read_records
from torchbudget.units import GiB, MiB

needs_reset = pytest.mark.skipif(
    not reset_peak_memory(), reason="the kernel does not let the high-water mark be reset"
)


def take(num_bytes: int) -> None:
    """Take bytes and free them at once: far shorter than any interval."""
    taken = bytearray(b"\1") * num_bytes
    del taken


@needs_reset
def test_the_peak_is_the_kernels() -> None:
    """Within 1 % of VmHWM, of what lasted a moment too, and with measuring going on inside."""
    with MemoryMonitor(interval_s=10) as monitor:
        take(MiB(300))
        high_water = process_memory(shares=False).peak_resident_bytes
        with peak_memory("cpu") as inner:
            take(MiB(100))
        reset_peak_memory()
    assert high_water is not None
    peak = monitor.report().peak
    assert peak.process_peak_bytes == pytest.approx(high_water, rel=0.01)
    assert inner.bytes < high_water - MiB(150)
    assert "higher than in any sample" in str(monitor.report())


@needs_reset
def test_monitors_and_peaks_may_overlap() -> None:
    """Each has the most of its own time."""
    with MemoryMonitor() as outer, peak_memory("cpu") as peak:
        take(MiB(200))
        with MemoryMonitor() as inner:
            take(MiB(50))
    bytes_of = [monitor.report().peak.process_peak_bytes for monitor in (outer, inner)]
    assert bytes_of[0] == pytest.approx(peak.bytes, rel=0.01)
    assert bytes_of[1] is not None
    assert peak.bytes - bytes_of[1] == pytest.approx(MiB(150), abs=MiB(16))


TREE = """
import json, sys, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import torchbudget as tb

class Samples(Dataset):
    def __init__(self):
        self.kept = None
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if self.kept is None:  # of each worker its own
            self.kept = torch.ones(2**23)
        return torch.ones(2**18)

def charged():
    stat = dict(line.split() for line in Path(sys.argv[1]).read_text().splitlines())
    names = ("total_rss", "total_shmem") if "total_rss" in stat else ("anon", "shmem")
    return sum(int(stat[name]) for name in names)

if __name__ == "__main__":
    interval_s = 0.4
    with tb.MemoryMonitor(interval_s=interval_s) as monitor:
        batches = iter(DataLoader(
            Samples(), batch_size=8, num_workers=2, prefetch_factor=2,
            multiprocessing_context=sys.argv[2],
        ))
        next(batches), next(batches)  # one of each worker
        time.sleep(interval_s)  # until the workers have filled their queues
        held = []
        for _ in range(10):
            held.append(charged())
            time.sleep(interval_s)
        del batches
    report = monitor.report()
    peak = report.peak
    print(json.dumps([peak.unreclaimable_bytes, max(held), report.is_exact, peak.processes]))
"""


# A file, since what is spawned imports it again.
RUN = """
import runpy, sys
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_peak_of_a_tree_is_the_control_groups(method: str, tmp_path: Path) -> None:
    """Within 3 % of rss and shmem of a group that holds only the job, with real workers.

    Pages of files are no part of either.
    """
    (tmp_path / "job.py").write_text(TREE)
    with memory_group(GiB(4)) as group:
        stat = group.folder / "memory.stat"
        output = group.output(RUN, tmp_path / "job.py", stat, method)
    seen, charged, is_exact, processes = json.loads(output)
    assert is_exact
    assert processes >= 3
    assert seen == pytest.approx(charged, rel=0.03)


@pytest.mark.slow
def test_it_warns_before_the_limit_once_and_says_what_to_change() -> None:
    """The callback is called each time that it comes near; the warning is issued once."""
    reached: list[MemoryLimit] = []
    with MemoryMonitor() as reader:  # of the whole job, as what earlier tests have started
        before = reader.snapshot("before").host_bytes
    assert before is not None
    host = before + MiB(880)
    warn_at = (before + MiB(440)) / host
    monitor = MemoryMonitor(MemoryBudget(host=host), warn_at=warn_at, on_limit=reached.append)
    with pytest.warns(MemoryLimitWarning, match=r"budget\.host.* start fewer workers") as warned:
        come_near_twice(monitor, MiB(800))
    assert [limit.name for limit in reached] == ["host", "host"]
    assert all(limit.share >= warn_at for limit in reached)
    assert len(warned) == 1
    [seen] = [limit for limit in monitor.report().limits if limit.name == "host"]
    assert seen.share >= max(limit.share for limit in reached) - 1e-9


def come_near_twice(monitor: MemoryMonitor, num_bytes: int) -> None:
    with monitor:
        for _ in range(2):
            taken = bytearray(b"\1") * num_bytes
            monitor.snapshot("near")
            del taken
            monitor.snapshot("far")


@pytest.mark.filterwarnings("ignore::torchbudget.errors.MemoryLimitWarning")
@pytest.mark.parametrize("fraction", [0.5, 2.0])
def test_on_the_cpu_the_device_is_the_process(fraction: float) -> None:
    """Its high-water mark is what the report compares with the budget's device bytes."""
    resident = process_memory(shares=False).resident_bytes
    budget = int(resident + MiB(200) / fraction)
    with MemoryMonitor(budget, device="cpu", interval_s=10, warn_at=1) as monitor:
        take(MiB(200))
    [limit] = [one for one in monitor.report().limits if one.name == "device"]
    assert limit.limit_bytes == budget
    assert (limit.share > 1) is (fraction > 1)


def test_a_warning_that_is_an_error_is_raised_in_the_training() -> None:
    """In the thread nobody would see it; the monitor goes on until then."""
    monitor = MemoryMonitor(MemoryBudget(host=MiB(1)), interval_s=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MemoryLimitWarning), monitor:
            monitor.snapshot("first")
    assert monitor.report().limits


def test_a_callback_that_fails_ends_nothing() -> None:
    """What it raised is warned of, beside the limit itself."""

    def fail(_: MemoryLimit) -> None:
        raise RuntimeError("broken")

    monitor = MemoryMonitor(MemoryBudget(host=MiB(1)), on_limit=fail)
    with pytest.warns() as warned:
        come_near_twice(monitor, 1)
    categories = sorted(one.category.__name__ for one in warned)
    assert categories == ["MemoryLimitWarning", "MonitorWarning"]


class Scalars:
    """A writer that keeps what it is given, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        if self.fails:
            raise OSError("no space")
        self.written.append((tag, scalar_value, global_step))


def test_scalars_are_written_for_every_sample(tmp_path: Path) -> None:
    """The same numbers as in the file, at milliseconds that do not go back."""
    writer = Scalars()
    with MemoryMonitor(path=tmp_path / "run.jsonl", writer=writer) as monitor:
        for _ in range(3):
            monitor.snapshot("one")
    lines = [one for one in read_records(tmp_path / "run.jsonl") if one["event"] == "sample"]
    expected = [
        (f"memory/{name}", value, round(1000 * line["time_s"]))
        for line in lines
        for name, value in line.items()
        if name not in ("event", "run", "time_s")
    ]
    assert writer.written == expected
    steps = [step for _, _, step in writer.written]
    assert steps == sorted(steps)


def test_a_writer_that_fails_is_given_up() -> None:
    monitor = MemoryMonitor(writer=Scalars(fails=True))
    with pytest.warns(MonitorWarning, match="no space"), monitor:
        pass


def test_the_writer_of_tensorboard(tmp_path: Path) -> None:
    """Its own class takes what it is given, and its file is written."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    writer = tensorboard.SummaryWriter(tmp_path)
    with MemoryMonitor(writer=writer):
        pass
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 500


def test_the_file_tells_the_run(tmp_path: Path) -> None:
    """It begins, samples, names snapshots and ends with the report's peak; a second run follows."""
    path = tmp_path / "run.jsonl"
    budget = MemoryBudget(device="40GiB", host="50GiB")
    for name in ("first", "second"):
        with MemoryMonitor(budget, path=path) as monitor:
            sample = monitor.snapshot(name)
        records = read_records(path)
        begin = [one["event"] for one in records].count("begin")
        assert begin == (1 if name == "first" else 2)
        [snapshot] = [one for one in records if one.get("name") == name]
        head = {"event": "snapshot", "run": snapshot["run"], "name": name}
        assert snapshot == {**head, **sample.known()}
        end = records[-1]
        assert end["event"] == "end"
        assert {**end["peak"], "time_s": monitor.report().peak.time_s} == (
            monitor.report().peak.known()
        )
    assert records[0]["budget"] == {"device": GiB(40), "host": GiB(50)}
    assert records[0]["pid"] == os.getpid()


WATCHED = """
import sys
taken = bytearray(b"\\1") * 2**27
print("ready", flush=True)
input()
"""


def test_another_process_is_watched_until_it_ends() -> None:
    """Its kernel's mark, its death in the middle included; then there is nothing to read."""
    with subprocess.Popen([sys.executable, "-c", WATCHED], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with MemoryMonitor(pid=process.pid, interval_s=0.02) as monitor:
            monitor.snapshot("alive")
            with pytest.raises(OptionError, match="leave out pid"), monitor.batch(1, 1):
                pass
            high_water = process_memory(process.pid).peak_resident_bytes
            process.kill()
            process.wait()
            with pytest.raises(MachineError):
                monitor.snapshot("dead")
    assert monitor.report().peak.process_peak_bytes == pytest.approx(high_water, rel=0.01)
    with pytest.raises(MachineError), MemoryMonitor(pid=process.pid):
        pass


def test_it_is_used_inside_its_context_only() -> None:
    monitor = MemoryMonitor()
    for use in (monitor.report, monitor.samples, lambda: monitor.snapshot("outside")):
        with pytest.raises(OptionError, match="not running in this process"):
            use()
    with monitor:
        pass
    assert monitor.report() == monitor.report()
    assert monitor.samples()
    with pytest.raises(OptionError, match="not running in this process"):
        monitor.snapshot("after")
    with pytest.raises(OptionError, match="entered once"):
        monitor.__enter__()


@pytest.mark.parametrize(
    "options",
    [{"interval_s": 0}, {"warn_at": "high"}, {"warn_at": 95}, {"replan_batches": 0}],
    ids=lambda options: next(iter(options)),
)
def test_invalid_options_raise_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        MemoryMonitor(**options)


def test_the_history_is_bounded_and_keeps_the_peak() -> None:
    """In room for two samples, of fifty, the largest numbers are those of all."""
    with MemoryMonitor(history=1) as monitor:
        seen = [monitor.snapshot(str(number)) for number in range(50)]
    assert len(monitor.samples()) <= 2
    most = max(sample.resident_bytes for sample in seen)
    assert max(sample.resident_bytes for sample in monitor.samples()) >= most
    assert monitor.report().peak.resident_bytes >= most


@pytest.mark.parametrize("device", ["mps", "xpu:0", "gpu", "meta"])
def test_a_device_that_nothing_reads_is_refused(device: Any) -> None:
    """Else a report of the host would pass for one of the device."""
    with pytest.raises(OptionError, match="expected a CUDA device such as"):
        MemoryMonitor(device=device)
    MemoryMonitor(device="cuda:1")  # read once CUDA is in use
    MemoryMonitor(device="cpu")
