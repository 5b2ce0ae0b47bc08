"""Tests are run in a process that is forked from one that has imported the packages they need.

So a change costs no more than the tests that it takes to notice it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

CRASH: Final = "a crash"  # of the process, or of what every test imports


class _FirstFailure:
    """A plugin of pytest that writes down the first test that fails, or file that breaks off."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._write(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid)

    def _write(self, name: str) -> None:
        if not self._file.exists():
            self._file.write_text(name)


def preload() -> None:
    """Import what nearly every test needs, and is not under test."""
    import datasets
    import hypothesis
    import torch._dynamo
    import torch.distributed.fsdp
    import torchdata.stateful_dataloader
    import transformers

    del datasets, hypothesis, torch, torchdata, transformers


def failure(tree: Path, tests: list[str], limit_s: float) -> str | None:
    """The first of these tests, or of the tests in these files, that fails; `None`: all pass.

    Raises:
        TimeoutError: they take longer.
    """
    file = tree / f"failed-{time.monotonic_ns()}"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = _run(tree, tests, file)
        finally:
            os._exit(status)  # whatever it raises: nothing of the process before it may go on
    end = time.monotonic() + limit_s
    try:
        while True:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # and what its tests have left
        if not done:
            os.waitpid(child, 0)
    failed = file.read_text() if file.exists() else None
    file.unlink(missing_ok=True)
    if failed is None and os.waitstatus_to_exitcode(status) not in (0, 5):  # 5: all were left out
        return CRASH
    return failed


def _run(tree: Path, tests: list[str], file: Path) -> int:
    """Run tests in a forked process; pytest's exit status."""
    os.setsid()
    output = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(output, stream)
    for module in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[module]
    sys.modules["__main__"] = ModuleType("__main__")  # processes that tests start import it, too
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(tree), "TORCHBUDGET_HYPOTHESIS": "quick"}
    arguments = [
        "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--timeout=120",
        "-W", "ignore::pytest.PytestAssertRewriteWarning",  # plugins that were preloaded
        "-m", "slow or not slow", *tests,
    ]  # fmt: skip
    return int(pytest.main(arguments, plugins=[_FirstFailure(file)]))


_OURS = ("tests", "torchbudget", "conftest")
