"""`watch`: the memory of any command; `report`: the file that a monitor has written."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from torchbudget.budget import MemoryBudget
from torchbudget.commands import Answer, Command, save_figure
from torchbudget.errors import MachineError, OptionError
from torchbudget.observe.monitor import MemoryMonitor
from torchbudget.observe.report import MonitorReport, recorded_runs
from torchbudget.units import format_bytes

_WATCH: Final = """\
Run a command and watch the memory of its process and of all its descendants, DataLoader workers
included: peaks, /dev/shm, the control group, the machine. The report goes to stderr at the end, and
with -o into a file for `report`. Stdin, stdout and stderr are the command's. Signals are passed on
to it; its exit code is passed on (128 and the signal's number if a signal ended it; 127 if there is
no such command, 126 if it cannot be run).

  python -m torchbudget watch -- python train.py --epochs 3
  python -m torchbudget watch --host 16GiB -o run.jsonl -- python train.py"""
_REPORT: Final = """\
Report the file of a MemoryMonitor, or of `watch -o`: peaks, budgets, how near the limits came, the
bytes of batches. Of several runs in the file, the last one. A run without an end was killed, or is
still running; its records are reported all the same.

  python -m torchbudget report run.jsonl
  python -m torchbudget report run.jsonl --check  # exit code 1 if a budget was exceeded"""

_OTHERS: Final = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
_PASSED_ON: Final = (signal.SIGTERM, *_OTHERS)
# A terminal sends these to the command as well.
_FROM_TERMINALS: Final = (signal.SIGINT, signal.SIGQUIT)
_NOT_FOUND: Final = 127
_NOT_RUN: Final = 126


def _add_to_watch(parser: argparse.ArgumentParser) -> None:
    add = partial(parser.add_argument, metavar="BYTES")
    add("--host", help="warn before all processes together take this much")
    add("--shared", help="warn before /dev/shm has this much in it")
    add("-o", "--output", metavar="FILE", type=Path, help="JSON lines, for `report`")
    add("--interval", type=float, default=0.1, metavar="SECONDS", help="between samples")
    add("--warn-at", type=float, default=0.95, metavar="SHARE", help="of a limit; default 0.95")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...")


def _watch(options: argparse.Namespace) -> Answer:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise OptionError("give a command to watch: watch -- python train.py")
    monitor_of = _monitor_of(options)
    with _signals() as pass_on_to:
        try:
            process = subprocess.Popen(command)  # noqa: S603  (the user asked for it)
        except OSError as error:
            code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_RUN
            return Answer(failed=(f"cannot run {command[0]}: {error.strerror}",), code=code)
        pass_on_to(process)
        try:
            with monitor_of(pid=process.pid) as monitor:
                process.wait()
            sys.stderr.write(f"{monitor.report()}\n")
        except MachineError as error:  # it ended at once
            sys.stderr.write(f"torchbudget: not watched: {error}\n")
        code = process.wait()
    if code >= 0:
        return Answer(code=code)
    # `signal.Signals` lacks most real-time signals.
    return Answer(failed=(f"ended by signal {-code}, {signal.strsignal(-code)}",), code=128 - code)


def _monitor_of(options: argparse.Namespace) -> Callable[..., MemoryMonitor]:
    """A function that makes the monitor of a process; its options are checked before.

    Raises:
        OptionError: the file cannot be written.
    """
    amounts = {"host": options.host, "shared": options.shared}
    monitor_of = partial(
        MemoryMonitor,
        MemoryBudget(**amounts) if any(amounts.values()) else None,
        path=options.output,
        interval_s=options.interval,
        warn_at=options.warn_at,
    )
    monitor_of()
    if options.output is not None:
        try:
            options.output.open("ab").close()
        except OSError as error:
            raise OptionError(f"cannot write {options.output}: {error.strerror}") from error
    return monitor_of


@contextmanager
def _signals() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Pass signals on to a process inside; signals that come before it starts wait for it."""
    processes: list[subprocess.Popen[bytes]] = []
    waiting: list[int] = []

    def pass_on(number: int, _: object) -> None:
        waiting.append(number)
        if processes:
            processes[0].send_signal(waiting.pop())

    def pass_on_to(process: subprocess.Popen[bytes]) -> None:
        processes.append(process)
        for number in waiting:
            process.send_signal(number)

    # The command gets a terminal's signals too, and decides.
    from_terminals: Any = (lambda *_: None) if _at_terminal() else pass_on
    handlers = dict.fromkeys(_PASSED_ON, pass_on) | dict.fromkeys(_FROM_TERMINALS, from_terminals)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield pass_on_to
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _at_terminal() -> bool:
    """Whether a terminal's interrupts reach this process, and so the command."""
    with suppress(OSError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def _add_to_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="RUN.JSONL", type=Path)
    add("--check", action="store_true", help="fail if a budget was exceeded")
    add("--figure", metavar="FILE", type=Path, help="draw memory over time: .png, .svg, .pdf")


def _report(options: argparse.Namespace) -> Answer:
    try:
        runs = recorded_runs(options.file)
    except OSError as error:
        raise OptionError(f"cannot read {options.file}: {error.strerror}") from error
    run = runs[-1]
    if options.figure is not None:
        from torchbudget.observe.figures import plot_memory

        save_figure(plot_memory(run), options.figure)
    failed = tuple(_failed(run)) if options.check else ()
    process = f"process {run.begin['pid']}, rank {run.begin['rank']}; run {len(runs)} of its file"
    return Answer(text=f"{run}\n{process}", failed=failed)


def _failed(run: MonitorReport) -> Iterator[str]:
    """Budgets that were exceeded, or that nothing or only a part was read to compare with."""
    budget = run.begin["budget"]
    for name in run.unread:
        yield f"{name}: no reading can be compared with its budget"
    if "host" in budget and not run.end.get("is_exact", True):
        yield "host: shared pages cannot be told apart and are not counted: its peak was higher"
    for limit in run.limits:
        if limit.name in budget and limit.share > 1:
            used, amount = format_bytes(limit.used_bytes), format_bytes(limit.limit_bytes)
            yield f"{limit.name}: {used} were used of {amount}"


WATCH: Final = Command("the memory of any command, while it runs", _WATCH, _add_to_watch, _watch)
REPORT: Final = Command("the file that a monitor has written", _REPORT, _add_to_report, _report)
