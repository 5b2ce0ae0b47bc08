"""`watch`: a command runs as it would alone, and its memory is seen."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_command, start_command
from torchbudget.commands.command_line import main
from torchbudget.observe.recorded_run import recorded_runs

MIB = 2**20
PYTHON = sys.executable


def test_the_command_runs_as_it_would_alone(tmp_path: Path) -> None:
    """Its arguments, streams and exit code are its own; what was seen is on stderr, after."""
    script = (
        "import sys, time; print(sys.argv[1:], sys.stdin.read()); print('mine', file=sys.stderr); "
        "kept = bytearray(64 * 2**20); time.sleep(0.6); sys.exit(7)"
    )
    command = [PYTHON, "-c", script, "--epochs", "3", "--", "-o"]
    done = run_command(
        "watch", "-o", "run.jsonl", "--", *command, folder=tmp_path, stdin="of the user"
    )
    assert (done.returncode, done.stdout) == (7, "['--epochs', '3', '--', '-o'] of the user\n")
    assert done.stderr.startswith("mine\n")
    assert "job, resident" in done.stderr
    [run] = recorded_runs(tmp_path / "run.jsonl")
    assert run.end is not None
    assert 64 * MIB < run.peaks["process_peak_bytes"] < 200 * MIB


def test_descendants_are_seen(tmp_path: Path) -> None:
    """The peak is that of all processes, whoever started them."""
    child = "kept = bytearray(64 * 2**20); import time; time.sleep(0.8)"
    command = f"{shlex.join([PYTHON, '-c', child])} & {shlex.join([PYTHON, '-c', child])} & wait"
    done = run_command("watch", "-o", "run.jsonl", "--", "sh", "-c", command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    [run] = recorded_runs(tmp_path / "run.jsonl")
    assert run.peaks["resident_bytes"] > 128 * MIB
    assert run.peaks["worker_peak_bytes"] > 64 * MIB
    assert run.peaks["process_peak_bytes"] < 64 * MIB


def test_a_limit_is_warned_of_before_it_is_reached(tmp_path: Path) -> None:
    script = "kept = bytearray(64 * 2**20); import time; time.sleep(0.8)"
    asked = ("--host", "60MiB", "--interval", "0.05", "--warn-at", "0.5")
    done = run_command("watch", *asked, "--", PYTHON, "-c", script, folder=tmp_path)
    assert done.returncode == 0
    assert "torchbudget: warning: this job's memory (budget.host)" in done.stderr


WAITS = """
import signal, sys, time

def handle(number, _):
    print(signal.Signals(number).name, flush=True)
    sys.exit(5)

for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
    signal.signal(getattr(signal, name), handle)
print("ready", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_signals_are_passed_on(name: str, tmp_path: Path) -> None:
    """The command handles them, and its own exit code counts."""
    process = start_command(
        ["watch", "--", PYTHON, "-c", WAITS],
        folder=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, f"{name}\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", 137), ("SIGTERM", 143)])
def test_a_signal_that_ends_the_command(name: str, code: int, tmp_path: Path) -> None:
    """As a shell passes it on: 128 and its number; stderr names it."""
    command = f"sleep 0.3; kill -{name.removeprefix('SIG')} $$"
    done = run_command("watch", "--", "sh", "-c", command, folder=tmp_path)
    assert done.returncode == code
    assert f"torchbudget: {name} ended the command\n" in done.stderr
    assert "job, resident" in done.stderr


def test_a_command_that_ends_at_once(tmp_path: Path) -> None:
    """Too short to be seen, perhaps; its exit code is passed on all the same."""
    assert run_command("watch", "--", "false", folder=tmp_path).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["watch"], 2, "give a command to watch"),
        (["watch", "--"], 2, "give a command to watch"),
        (["watch", "--host", "much", "--", "true"], 2, "host: cannot read 'much'"),
        (["watch", "--interval", "0", "--", "true"], 2, "interval_s must be a positive number"),
        (["watch", "-o", "none/run.jsonl", "--", "true"], 2, "cannot write none/run.jsonl"),
        (["watch", "--", "not-a-command-at-all"], 127, "there is no command"),
        (["watch", "--", "./notes.txt"], 126, "cannot run ./notes.txt: Permission denied"),
    ],
)
def test_what_cannot_be_run(
    arguments: list[str],
    code: int,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Found before the command starts, and the handlers of signals are as they were."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("no program", "utf-8")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(arguments) == code
    assert expected in capsys.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
