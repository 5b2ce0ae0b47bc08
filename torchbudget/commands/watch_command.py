"""`watch`: the memory of any command, while it runs."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torchbudget.budget import MemoryBudget
from torchbudget.commands.answer import Answer, UsageError
from torchbudget.errors import MachineError
from torchbudget.observe.monitor import MemoryMonitor

HELP: Final = "the memory of any command, while it runs"
DESCRIPTION: Final = """\
Run a command and watch the memory of its process and of all its descendants, DataLoader workers
included: peaks, /dev/shm, the control group, the machine. What was seen goes to stderr at the end,
and with -o into a file for `report`. Stdin, stdout and stderr are the command's. Signals are passed
on to it; its exit code is passed on (128 and the signal's number where a signal ended it; 127 where
there is no such command, 126 where it cannot be run).

  python -m torchbudget watch -- python train.py --epochs 3
  python -m torchbudget watch --host 16GiB -o run.jsonl -- python train.py"""

_PASSED_ON: Final = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
# A terminal sends these to the command as well.
_FROM_TERMINALS: Final = ("SIGINT", "SIGQUIT")
_NOT_FOUND: Final = 127
_NOT_RUN: Final = 126


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to its parser."""
    parser.add_argument("--host", metavar="BYTES", help="warn before all processes take so much")
    parser.add_argument("--shared", metavar="BYTES", help="warn before /dev/shm has so much")
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="JSON lines, for `report`"
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="between samples; default 0.1",
    )
    parser.add_argument(
        "--warn-at", type=float, default=0.95, metavar="SHARE", help="of a limit; default 0.95"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def run(options: argparse.Namespace) -> Answer:
    """Run the command to its end."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise UsageError("give a command to watch: watch -- python train.py")
    monitor_of = _monitor_of(options)
    with _PassedOn() as signals:
        try:
            process = subprocess.Popen(command)  # noqa: S603  (what the user asked for)
        except FileNotFoundError:
            return Answer(failed=(f"there is no command {command[0]!r}",), code=_NOT_FOUND)
        except OSError as error:
            return Answer(failed=(f"cannot run {command[0]}: {error.strerror}",), code=_NOT_RUN)
        signals.to(process)
        _watch(process, monitor_of(process.pid))
    return _ended(process.returncode)


def _monitor_of(options: argparse.Namespace) -> Callable[[int], MemoryMonitor]:
    """What makes the monitor of a process; its options are checked before there is one.

    Raises:
        UsageError: the file cannot be written.
    """
    budget = None
    if options.host is not None or options.shared is not None:
        budget = MemoryBudget(host=options.host, shared=options.shared)

    def monitor_of(pid: int | None) -> MemoryMonitor:
        return MemoryMonitor(
            budget,
            pid=pid,
            path=options.output,
            interval_s=options.interval,
            warn_at=options.warn_at,
        )

    monitor_of(None)
    if options.output is not None:
        try:
            options.output.open("ab").close()
        except OSError as error:
            raise UsageError(f"cannot write {options.output}: {error.strerror}") from error
    return monitor_of


def _watch(process: subprocess.Popen[bytes], monitor: MemoryMonitor) -> None:
    """Watch a process to its end; it goes on whatever becomes of the monitor."""
    try:
        with monitor:
            process.wait()
    except MachineError as error:  # it ended at once
        sys.stderr.write(f"torchbudget: not watched: {error}\n")
        process.wait()
        return
    sys.stderr.write(f"{monitor.report()}\n")


def _ended(code: int) -> Answer:
    """The command's exit code, as a shell passes it on."""
    if code >= 0:
        return Answer(code=code)
    return Answer(failed=(f"{signal.Signals(-code).name} ended the command",), code=128 - code)


class _PassedOn:
    """Inside, signals are passed on to a process; those that come before it starts wait for it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _PassedOn:
        handlers: dict[str, Any] = dict.fromkeys(_PASSED_ON, self._pass_on)
        handlers |= dict.fromkeys(_FROM_TERMINALS, _ignore if _at_terminal() else self._pass_on)
        for name, handler in handlers.items():
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, process: subprocess.Popen[bytes]) -> None:
        """From now on, to this one."""
        self._process = process
        for number in self._waiting:
            process.send_signal(number)

    def _pass_on(self, number: int, _: object) -> None:
        if self._process is None:
            self._waiting.append(number)
        else:
            self._process.send_signal(number)


def _ignore(_: int, __: object) -> None:
    """The command got it too, and decides."""


def _at_terminal() -> bool:
    """Whether a terminal's interrupts reach this process, and so the command."""
    with suppress(OSError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False
