"""A monitor and other processes: forked from it, spawned, and killed under it."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.support.dying_workers import DEATHS, no_signals_of_workers
from torchbudget import MemoryMonitor, peak_memory
from torchbudget.errors import OptionError
from torchbudget.observe.lines import read_records
from torchbudget.units import MiB


def in_child(monitor: MemoryMonitor) -> None:
    """What a forked process may try with a monitor that it has inherited."""
    for use in (monitor.report, lambda: monitor.snapshot("child")):
        with pytest.raises(OptionError, match="not running in this process"):
            use()
    monitor.__exit__(None, None, None)  # nothing: it is the parent's
    with peak_memory("cpu"), MemoryMonitor(interval_s=0.001) as own:
        own.snapshot("child")


@pytest.mark.slow
def test_processes_that_are_forked_while_it_reads_are_not_stuck(tmp_path: Path) -> None:
    """Of 100 children, each forked wherever the thread stands, all run and end; none writes."""
    context = multiprocessing.get_context("fork")
    path = tmp_path / "run.jsonl"
    with MemoryMonitor(path=path, interval_s=0.0005) as monitor:
        monitor._recorder.pace.wait_s = lambda: 0.0005  # type: ignore[method-assign]  # all the time
        children = []
        for _ in range(100):
            child = context.Process(target=in_child, args=(monitor,))
            child.start()
            children.append(child)
            if len(children) == 4:
                for one in children:
                    one.join(60)
                    assert one.exitcode == 0
                children.clear()
    records = read_records(path)
    assert [one["event"] for one in records].count("end") == 1
    assert len(path.read_text().splitlines()) == len(records)
    assert not [one for one in records if one.get("name") == "child"]
    assert monitor.report().peak.processes >= 2


class Sleepy(Dataset[Any]):
    """Each worker has 32 MiB of its own."""

    def __init__(self) -> None:
        self.kept: Any = None

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kept is None:
            self.kept = torch.ones(MiB(32) // 4)
        return torch.ones(10)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_come_are_killed_and_come_again(method: str) -> None:
    """They are counted while they are there; the monitor goes on whatever becomes of them."""
    with no_signals_of_workers(), MemoryMonitor(interval_s=0.005) as monitor:
        alone = monitor.snapshot("alone")
        for _ in range(2 if method == "fork" else 1):
            loader = DataLoader(Sleepy(), num_workers=2, multiprocessing_context=method)
            batches = iter(loader)
            next(batches)
            seen = monitor.snapshot("with workers")
            assert seen.processes >= alone.processes + 2
            assert seen.worker_peak_bytes is not None
            assert seen.worker_peak_bytes > MiB(32)
            workers = batches._workers  # type: ignore[attr-defined]
            os.kill(workers[0].pid, 9)
            with pytest.raises(DEATHS):
                for _ in batches:
                    pass
            del batches
            workers[1].join()
        after = monitor.snapshot("after")
    assert after.processes <= alone.processes + (method == "spawn")  # multiprocessing's tracker
    assert monitor.report().is_exact
