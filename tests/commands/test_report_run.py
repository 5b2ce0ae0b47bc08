"""`report`: a monitor's file read back, also of a run that was killed."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.commands.test_plan_epoch import Page
from tests.support.commands import run_command, start_command
from torchbudget import MemoryMonitor
from torchbudget.commands.command_line import main
from torchbudget.observe.recorded_run import recorded_runs

MIB = 2**20

pytestmark = pytest.mark.filterwarnings("ignore::torchbudget.errors.MemoryLimitWarning")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def monitored(budget: str = "64GiB") -> MemoryMonitor:
    """A run of this process, with a snapshot and a batch; its file is `run.jsonl`."""
    with MemoryMonitor(budget, path="run.jsonl", device="cpu", warn_at=1) as monitor:
        with monitor.batch(4, 100):
            kept = bytearray(32 * MIB)
        monitor.snapshot("after a batch")
        del kept
    return monitor


def test_what_was_read_back_is_what_was_seen() -> None:
    """Peaks to the byte, snapshots by name, batches with their shapes."""
    monitor = monitored()
    [run] = recorded_runs("run.jsonl")
    expected = monitor.report().peak.known()
    assert {name: run.peaks[name] for name in expected if name.endswith("_bytes")} == {
        name: value for name, value in expected.items() if name.endswith("_bytes")
    }
    assert run.budget == {"device": 64 * 2**30}
    assert [one["name"] for one in run.snapshots] == ["after a batch"]
    assert [(one["n"], one["size"]) for one in run.batches] == [(4, [100])]
    assert run.seconds == pytest.approx(monitor.report().seconds)
    assert len(run.series("process_bytes")) == len(run.samples) >= 1


def test_the_table(folder: Path) -> None:
    monitor = monitored()
    done = run_command("report", "run.jsonl", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    table = str(monitor.report()).splitlines()
    shown = done.stdout.splitlines()
    rows = [line for line in table if line.startswith(("  ", "job", "process", "machine"))]
    assert shown[: len(rows) - 1] == rows[: len(rows) - 1]
    assert any("device: " in line and "of 64 GiB" in line for line in shown)
    assert any(line.startswith("1 batches were written, the largest of") for line in shown)


def test_the_last_of_several_runs() -> None:
    first, last = monitored("32GiB"), monitored()
    assert len(recorded_runs("run.jsonl")) == 2
    assert first is not last
    assert recorded_runs("run.jsonl")[-1].budget == {"device": 64 * 2**30}


def test_a_budget_that_was_exceeded_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    monitored("1MiB")
    assert main(["report", "run.jsonl"]) == 0
    capsys.readouterr()
    assert main(["report", "run.jsonl", "--check"]) == 1
    out, err = capsys.readouterr()
    assert "of the budget" in out
    assert err.startswith("torchbudget: device: ")
    assert err.endswith(" were used of 1 MiB\n")
    monitored()
    assert main(["report", "run.jsonl", "--check"]) == 0


def test_a_device_that_was_not_read_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    """The process's memory stands for the device's only where that is the CPU.

    Of a GPU that was never used nothing is in the file; here a CPU's run is made to look so.
    """
    monitored()
    lines = Path("run.jsonl").read_text().replace('"on_cpu":true', '"on_cpu":false')
    Path("run.jsonl").write_text(lines)
    assert not recorded_runs("run.jsonl")[0].compared()
    assert main(["report", "run.jsonl", "--check"]) == 1
    out, err = capsys.readouterr()
    assert "device: nothing was read" in out
    assert "device: nothing was read" in err


def test_a_part_of_the_host_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    """A peak without shared pages is a lower bound; lines that were lost are told."""
    begin = {"event": "begin", "format": 1, "pid": 1, "rank": 0, "unix_s": 0, "budget": {"host": 9}}
    end = {"event": "end", "time_s": 1.0, "peak": {"host_bytes": 5}, "lost_lines": 3}
    for is_exact in (True, False):
        lines = map(json.dumps, (begin, end | {"is_exact": is_exact}))
        Path("run.jsonl").write_text("\n".join(lines), "utf-8")
        assert main(["report", "run.jsonl", "--check"]) == (not is_exact)
        out, err = capsys.readouterr()
        assert "3 lines could not be written" in out
        for text in (out, err):
            assert ("shared pages could not be told apart" in text) == (not is_exact)


def test_a_run_that_was_killed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it had written is reported: a real process that watches a real one, both killed."""
    script = "kept = bytearray(64 * 2**20); import time; print('ready', flush=True); time.sleep(60)"
    process = start_command(
        ["watch", "-o", "run.jsonl", "--interval", "0.02", "--", sys.executable, "-c", script],
        folder=folder,
    )
    runs = []
    for _ in range(600):
        time.sleep(0.02)
        if Path("run.jsonl").exists() and Path("run.jsonl").stat().st_size:
            runs = recorded_runs("run.jsonl")
            if runs[-1].peaks.get("process_bytes", 0) > 64 * MIB:
                break
    process.kill()
    process.wait()
    os.kill(runs[-1].begin["pid"], signal.SIGKILL)
    assert main(["report", "run.jsonl", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["end"] is None
    assert found["peaks"]["process_bytes"] > 64 * MIB
    assert main(["report", "run.jsonl"]) == 0
    assert "no end was written: it was killed after " in capsys.readouterr().out


def test_figures_and_the_page() -> None:
    """Balanced HTML whose figures are inside it; the budget is drawn."""
    pytest.importorskip("matplotlib")
    monitored()
    assert main(["report", "run.jsonl", "--html", "run.html", "--figure", "run.svg"]) == 0
    page = Page(Path("run.html").read_text("utf-8"))
    assert page.references
    assert all(one.startswith("data:image/svg+xml;base64,") for one in page.references)
    assert "after a batch" in page.cells
    assert Path("run.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("none.jsonl", None, "cannot read none.jsonl: No such file"),
        ("notes.jsonl", "not JSON\n", "no run of a MemoryMonitor is in it"),
        ("other.jsonl", '{"event": "begin", "format": 99}\n', "format 99 of a monitor's file"),
    ],
)
def test_a_file_that_is_none(
    name: str, text: str | None, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path(name).write_text(text, "utf-8")
    assert main(["report", name]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert err.count("\n") == 1
