"""`watch` runs a command as it would run alone; `report` reads a monitor's file back."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import run_command, start_command
from torchbudget import MemoryMonitor
from torchbudget.commands.command_line import main
from torchbudget.observe.report import recorded_runs
from torchbudget.units import MiB

pytestmark = pytest.mark.filterwarnings("ignore::torchbudget.errors.MemoryLimitWarning")
# Python keeps 64 MiB for a while.
HOLD = [sys.executable, "-c", "kept = bytearray(64 * 2**20); import time; time.sleep(1.5)"]
# A shell that prints the name of a signal that it gets, and ends with 5.
NAMES = ("TERM", "INT")
TRAPS = "; ".join(f"trap 'echo {name}; exit 5' {name}" for name in NAMES)
WAIT = ["sh", "-c", f"{TRAPS}; echo ready; while :; do sleep 0.1; done"]


def test_the_command_runs_as_it_would_alone(folder: Path) -> None:
    """Its arguments, streams and exit code are its own; the report is on stderr, after."""
    command = ["sh", "-c", 'echo "$@"; cat; echo mine >&2; sleep 0.6; exit 7', "sh", "--", "-o"]
    arguments = ("watch", "-o", "run.jsonl", "--", *command)
    done = run_command(*arguments, folder=folder, stdin="of the user")
    assert (done.returncode, done.stdout) == (7, "-- -o\nof the user")
    assert done.stderr.startswith("mine\n")
    assert "job, resident" in done.stderr
    assert recorded_runs("run.jsonl")[0].end


def test_descendants_are_seen_and_limits_warned_of(folder: Path) -> None:
    """The peak is that of all processes, whoever started them."""
    hold = shlex.join(HOLD)
    asked = ("--host", "60MiB", "--interval", "0.05", "--warn-at", "0.5", "-o", "run.jsonl")
    command = ("sh", "-c", f"{hold} & {hold} & wait")
    done = run_command("watch", *asked, "--", *command, folder=folder)
    assert done.returncode == 0, done.stderr
    [warned] = re.findall("warning: this job's memory (.*)", done.stderr)  # once
    assert "budget.host" in warned
    assert "start fewer workers" in warned
    peak = recorded_runs("run.jsonl")[0].peak
    assert peak.resident_bytes > MiB(128)
    assert peak.worker_peak_bytes is not None
    assert peak.process_peak_bytes is not None
    assert peak.worker_peak_bytes > MiB(64) > peak.process_peak_bytes
    assert main(["report", "run.jsonl", "--check"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_signals_are_passed_on(name: str, folder: Path) -> None:
    """The command handles them, and its own exit code counts."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start_command(
        ["watch", "--", *WAIT], folder=folder, stdin=subprocess.DEVNULL, **pipes
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, f"{name}\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("sh -c 'sleep 0.3; kill -35 $$'", 163, "ended by signal 35, Real-time signal 1"),
        ("not-a-command-at-all", 127, "cannot run not-a-command-at-all: No such file"),
        ("./notes.txt", 126, "cannot run ./notes.txt: Permission denied"),
        ("false", 1, ""),  # too short to be seen, perhaps
    ],
)
def test_exit_codes_are_those_of_a_shell(
    command: str, code: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """128 and the signal's number, which stderr names; handlers of signals are put back."""
    Path("notes.txt").write_text("no program", "utf-8")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(["watch", "--", *shlex.split(command)]) == code
    assert told in capfd.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def monitored(budget: str) -> str:
    """A run of this process with a snapshot and a batch; the report of its monitor."""
    with MemoryMonitor(budget, path="run.jsonl", device="cpu", warn_at=1) as monitor:
        with monitor.batch(4, 100):
            pass
        monitor.snapshot("after a batch")
    return str(monitor.report())


def test_the_last_run_is_reported_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Budgets that were exceeded, or that nothing was read to compare with, fail the check."""
    monitored("64GiB")
    assert main(["report", "run.jsonl", "--check"]) == 0
    report = monitored("1MiB").splitlines()
    capsys.readouterr()
    assert main(["report", "run.jsonl", "--check"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line for line in lines if line in report] == report
    assert "1 batches, the largest of " in out
    assert lines[-1].endswith("rank 0; run 2 of its file")
    assert err.startswith("torchbudget: device: ")
    assert err.endswith(" were used of 1 MiB\n")
    # Of a GPU that was never used nothing is in the file, and shared pages may be left out.
    for old, new, expected in (
        ('"name":"device"', '"name":"machine"', "device: no reading can be"),
        ('"budget":{"device"', '"budget":{"host"', "host: no reading can be"),
        ('"is_exact":true', '"is_exact":false', "host: shared pages cannot be told apart"),
    ):
        Path("run.jsonl").write_text(Path("run.jsonl").read_text().replace(old, new))
        assert main(["report", "run.jsonl", "--check"]) == 1
        assert expected in capsys.readouterr().err


def test_a_run_that_was_killed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its records are reported: a real process that watches a real one, both killed."""
    pytest.importorskip("matplotlib")
    process = start_command(["watch", "-o", "run.jsonl", "--", "sleep", "60"], folder=folder)
    while not (Path("run.jsonl").exists() and '"sample"' in Path("run.jsonl").read_text()):
        time.sleep(0.02)
    process.kill()
    process.wait()
    os.kill(recorded_runs("run.jsonl")[-1].begin["pid"], signal.SIGKILL)
    assert main(["report", "run.jsonl", "--figure", "run.svg"]) == 0
    out = capsys.readouterr().out
    assert "no end was written: it was killed after " in out
    assert "job, resident" in out
    assert Path("run.svg").stat().st_size > 1000
