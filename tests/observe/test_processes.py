"""A monitor and other processes: forked from it, spawned, and killed under it; control groups."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.dying_workers import DEATHS, no_signals_of_workers
from tests.support.memory_groups import HOLD, memory_group
from torchbudget import MemoryMonitor
from torchbudget.errors import OptionError
from torchbudget.machine.host import cgroup_memory
from torchbudget.machine.peaks import peak_memory
from torchbudget.observe.report import MemoryLimit, read_records
from torchbudget.units import GiB, MiB


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
        [pool] = cgroup_memory()
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
