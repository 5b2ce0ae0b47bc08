"""A plugin of pytest that records which lines each test runs, and what became of it.

With `-p tests.mutating.recorder` and a folder in `TORCHBUDGET_RECORD`, each of pytest-xdist's
processes writes the lines to a file of its own there, by `coverage`; the one that started them
writes a line of JSON for each test. What other processes run is not seen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

_FOLDER = Path(os.environ["TORCHBUDGET_RECORD"])
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
_LINES = coverage.Coverage(
    data_file=_FOLDER / f"lines.{_WORKER}", config_file=False, source=["torchbudget"]
)
if _WORKER:  # from here on, since what is imported runs lines, too
    _LINES.start()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """What is run from now on is run by this test."""
    if _WORKER:
        _LINES.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        if _WORKER:
            _LINES.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for each phase of each test."""
    if not _WORKER:
        line = {"test": report.nodeid, "passed": report.passed, "seconds": report.duration}
        with (_FOLDER / "tests.jsonl").open("a") as record:
            print(json.dumps(line), file=record)


def pytest_sessionfinish() -> None:
    """Write the lines."""
    if _WORKER:
        _LINES.stop()
        _LINES.save()
