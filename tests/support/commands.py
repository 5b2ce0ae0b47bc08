"""`python -m torchbudget …`, and Python, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
COMMAND = (sys.executable, "-W", "error", "-m", "torchbudget")


def run_command(
    *arguments: str | Path, folder: Path, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; `stdin` is text."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        env=ENVIRONMENT,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def start_command(
    arguments: Sequence[str | Path], *, folder: Path, **options: Any
) -> subprocess.Popen[str]:
    """Start a command in a folder."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)], cwd=folder, env=ENVIRONMENT, text=True, **options
    )


def printed_by(arguments: list[str], **environment: str) -> str:
    """What another process of Python prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert not done.returncode, done.stderr
    return done.stdout
