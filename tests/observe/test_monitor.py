"""A monitor's numbers, compared with the kernel's and a device's; and other processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import torchbudget as tb
from tests.support.dying_workers import DEATHS, no_signals_of_workers
from tests.support.fake_device import FakeDevice, put_in_place
from tests.support.memory_groups import HOLD, memory_group
from torchbudget import MemoryBudget, MemoryMonitor
from torchbudget.errors import MachineError, MemoryLimitWarning, OptionError
from torchbudget.machine import device as device_module
from torchbudget.machine.host import ControlGroups
from torchbudget.machine.peaks import peak_memory
from torchbudget.machine.process_tree import RESIDENT, process_memory
from torchbudget.observe.report import MemoryLimit, read_records
from torchbudget.observe.sample import MemoryReader
from torchbudget.units import GiB, MiB


def take(num_bytes: int) -> None:
    """Take bytes and free them at once: far shorter than any interval."""
    taken = bytearray(b"\1") * num_bytes
    del taken


@pytest.mark.skipif(RESIDENT.begin() is None, reason="the kernel lets no mark be reset")
def test_peaks_are_the_kernels_and_may_overlap() -> None:
    """Within 1 % of VmHWM, each of its own time, whoever resets the kernel's mark inside."""
    with MemoryMonitor(interval_s=10) as outer:
        take(MiB(300))
        high_water = process_memory(shares=False).peak_resident_bytes
        with MemoryMonitor() as inner, peak_memory("cpu") as peak:
            take(MiB(100))
        RESIDENT.begin()
    assert high_water is not None
    outer_bytes, inner_bytes = (one.report().peak.process_peak_bytes for one in (outer, inner))
    assert outer_bytes == pytest.approx(high_water, rel=0.01)
    assert inner_bytes == pytest.approx(peak.bytes, rel=0.02)
    assert peak.bytes < high_water - MiB(150)


def test_a_warning_that_is_an_error_is_raised_in_the_training() -> None:
    """Nobody would see it in the thread; the monitor goes on until then."""
    monitor = MemoryMonitor(MemoryBudget(host=MiB(1)), interval_s=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MemoryLimitWarning), monitor:
            monitor.snapshot("first")
    assert monitor.report().limits


def test_another_process_is_watched_until_it_ends() -> None:
    """With the kernel's mark, its death in the middle included; then there is nothing to read."""
    process = subprocess.Popen(["sleep", "60"])
    with MemoryMonitor(pid=process.pid, interval_s=0.02) as monitor:
        monitor.snapshot("alive")
        high_water = process_memory(process.pid).peak_resident_bytes
        process.kill()
        process.wait()
        with pytest.raises(MachineError):
            monitor.snapshot("dead")
    assert monitor.report().peak.process_peak_bytes == pytest.approx(high_water, rel=0.01)


def test_it_is_used_inside_its_context_only() -> None:
    monitor = MemoryMonitor()
    with pytest.raises(OptionError, match="not running in this process"):
        monitor.report()
    with monitor:
        pass
    assert monitor.report().history == monitor.report().history
    with pytest.raises(OptionError, match="not running in this process"):
        monitor.snapshot("after")
    with pytest.raises(OptionError, match="entered once"):
        monitor.__enter__()


INVALID = {"interval_s": 0, "warn_at": 95, "replan_batches": 0, "device": "mps"}


@pytest.mark.parametrize(("name", "value"), INVALID.items())
def test_invalid_options_raise_at_once(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        MemoryMonitor(**{name: value})


# ---------------------------------------------------------------------- a CUDA device


CONTEXT = MiB(600)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """A device that this process uses already."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    device = FakeDevice(free_bytes=GiB(80) - CONTEXT, process_bytes=CONTEXT)
    return put_in_place(monkeypatch, device)


def test_the_allocators_peaks_are_kept_whoever_resets_them(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the monitor's whole time, of a block's, and of a batch's inside it, which waits for none.

    A loop goes on to enqueue ahead of the device.
    """
    with tb.MemoryMonitor(interval_s=10) as monitor:
        fake.take(GiB(9), reserving=GiB(1))
        fake.free(GiB(9))
        fake.empty_cache()
        with peak_memory("cuda") as outer:
            fake.take(GiB(4))
            fake.free(GiB(4))
            fake.empty_cache()
            with monkeypatch.context() as patch, monitor.batch(4, 100) as inner:
                patch.setattr(fake, "synchronize", pytest.fail)
                fake.take(GiB(2))
            sample = monitor.snapshot("now")
        fake.free(GiB(2))
    assert (outer.reserved_bytes, outer.allocated_bytes) == (GiB(4), GiB(4))
    assert (inner.reserved_bytes, inner.bytes) == (GiB(2), GiB(2) + CONTEXT)
    assert (sample.allocated_bytes, sample.reserved_bytes) == (GiB(2), GiB(2))
    assert (sample.outside_bytes, sample.device_bytes) == (CONTEXT, GiB(2) + CONTEXT)
    peak = monitor.report().peak
    assert (peak.reserved_bytes, peak.allocated_bytes) == (GiB(10), GiB(9))
    assert "device, reserved" in str(monitor.report())


def test_a_thread_reads_the_device_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its own current device: a thread's is the first one, and a rank may be on another."""
    used = put_in_place(monkeypatch, FakeDevice(reserved_bytes=GiB(2)))
    asked: list[str] = []
    monkeypatch.setattr(device_module, "TorchSource", lambda name: asked.append(str(name)) or used)
    reserved: dict[int, int] = {0: 0, 1: 0}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reserved))
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved.__getitem__)
    reader = MemoryReader(None, None)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(reader.read, 0, whole=False).result().reserved_bytes is None
        reserved[1] = GiB(2)
        assert other.submit(reader.read, 0, whole=False).result().reserved_bytes == GiB(2)
    assert asked == ["cuda:1"]


def test_cuda_is_never_initialised() -> None:
    """Nor is a device read before the process uses it: its forked workers would not start."""
    with tb.MemoryMonitor("8MiB", device="cuda") as monitor:
        sample = monitor.snapshot("now")
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()
    assert sample.device_bytes is None
    assert "device" not in [limit.name for limit in monitor.report().limits]


# ---------------------------------------------------------------------- other processes


class Holding(Dataset[Any]):
    """Samples of a MiB; each worker keeps 32 MiB of its own."""

    def __init__(self) -> None:
        self.kept: Any = None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(MiB(32) // 4)
        return torch.ones(MiB(1) // 4)


def in_child(monitor: MemoryMonitor) -> None:
    """Try in a forked process to use the monitor that it has inherited."""
    with pytest.raises(OptionError, match="not running in this process"):
        monitor.snapshot("child")
    monitor.__exit__(None, None, None)  # nothing: it is the parent's
    with peak_memory("cpu"), MemoryMonitor(interval_s=0.001) as own:
        own.snapshot("child")


@pytest.mark.slow
def test_processes_that_are_forked_while_it_reads_are_not_stuck(tmp_path: Path) -> None:
    """Of 100 children, each forked wherever the thread stands, all run and end; none writes."""
    context = multiprocessing.get_context("fork")
    path = tmp_path / "run.jsonl"
    with MemoryMonitor(path=path, interval_s=0.0005) as monitor:
        monitor._pace.wait_s = lambda: 0.0005  # type: ignore[method-assign]  # all the time
        for _ in range(25):
            children = [context.Process(target=in_child, args=(monitor,)) for _ in range(4)]
            for child in children:
                child.start()
            for child in children:
                child.join(60)
                assert child.exitcode == 0
    records = read_records(path)
    assert [one["event"] for one in records].count("end") == 1
    assert len(path.read_text().splitlines()) == len(records)
    assert not [one for one in records if one.get("name") == "child"]


def test_workers_that_come_are_killed_and_come_again() -> None:
    """They are counted while they are there; the monitor goes on whatever becomes of them."""
    with no_signals_of_workers(), MemoryMonitor(interval_s=0.005) as monitor:
        alone = monitor.snapshot("alone")
        for _ in range(2):
            batches = iter(DataLoader(Holding(), num_workers=2, multiprocessing_context="fork"))
            next(batches)
            seen = monitor.snapshot("with workers")
            assert seen.processes >= alone.processes + 2
            assert (seen.worker_peak_bytes or 0) > MiB(32)
            workers = batches._workers  # type: ignore[attr-defined]
            os.kill(workers[0].pid, 9)
            with pytest.raises(DEATHS):
                for _ in batches:
                    pass
            del batches
            workers[1].join()
        after = monitor.snapshot("after")
    assert after.processes <= alone.processes
    assert monitor.report().end["is_exact"]


def charged(stat: str) -> int:
    """Bytes of anonymous pages and shared memory that a group is charged for; no files' pages."""
    found = dict(line.split() for line in Path(stat).read_text().splitlines())
    names = ("total_rss", "total_shmem") if "total_rss" in found else ("anon", "shmem")
    return sum(int(found[name]) for name in names)


def load(stat: str, method: str) -> None:
    """Load with two workers, and print what the monitor and the kernel have seen."""
    with MemoryMonitor(interval_s=0.4) as monitor:
        batches = iter(DataLoader(Holding(), 8, num_workers=2, multiprocessing_context=method))
        next(batches), next(batches)  # one of each worker
        held = still = 0
        while still < 10:  # until well after the workers have filled their queues
            time.sleep(0.1)
            now = charged(stat)
            held, still = max(held, now), 0 if now > held else still + 1
        monitor.snapshot("full")
        del batches
    peak = monitor.report().peak
    json.dump([peak.unreclaimable_bytes, held, peak.processes], sys.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_peak_of_a_tree_is_the_control_groups(method: str) -> None:
    """Within 3 % of a group that holds only the job, with real workers."""
    with memory_group(GiB(4)) as group:
        code = f"import sys; from {__name__} import load; load(*sys.argv[1:])"
        seen, held, processes = json.loads(group.output(code, group.folder / "memory.stat", method))
    assert processes >= 3
    assert seen == pytest.approx(held, rel=0.03)


def fill_the_group() -> None:
    """Fill the group with one child, and more with another; print what the monitor has seen."""
    warnings.simplefilter("ignore")
    near: list[MemoryLimit] = []
    hold = [sys.executable, "-c", HOLD]
    with MemoryMonitor(interval_s=0.02, on_limit=near.append) as monitor:
        [pool] = ControlGroups.of().pools()
        most = str(pool.free_bytes - MiB(20))
        large = Popen([*hold, most], stdin=PIPE, stdout=PIPE)
        assert large.stdout is not None
        assert large.stdout.readline() == b"ready\n"
        monitor.snapshot("nearly full")
        with Popen([*hold, str(MiB(60))], stdin=PIPE, stdout=PIPE) as small:
            status = large.wait()  # the kernel kills the largest
            small.kill()
    report = monitor.report()
    [limit] = [one for one in report.limits if one.name == "cgroup"]
    is_seen = "cgroup" in [one.name for one in near] and "the kernel killed" in str(report)
    json.dump([status, is_seen, limit.limit_bytes, limit.share], sys.stdout)


def test_a_full_group_is_seen_coming_and_its_kills_are_counted() -> None:
    """The warning comes first; then a child is killed, and the monitor reports it and goes on."""
    with memory_group(MiB(600)) as group:
        output = group.output(f"from {__name__} import fill_the_group as f; f()")
    status, is_seen, limit_bytes, share = json.loads(output)
    assert (status, is_seen, limit_bytes) == (-9, True, MiB(600))
    assert 0.95 < share <= 1
