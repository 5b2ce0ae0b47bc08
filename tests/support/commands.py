"""Python, and `python -m torchbudget …`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# One thread: the tests themselves run on every core.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])])
LIBRARY = ("-W", "error", "-m", "torchbudget")
COMMAND = (sys.executable, *LIBRARY)


def python(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python, and keep what it prints."""
    given = {"env": ENVIRONMENT, "capture_output": True, "text": True} | options
    return subprocess.run([sys.executable, *map(str, arguments)], check=False, **given)


def printed_by(arguments: Sequence[Any], **environment: str) -> str:
    """What Python prints, which must end well."""
    done = python(*arguments, env=ENVIRONMENT | environment)
    assert not done.returncode, done.stderr
    return done.stdout


def run_command(
    *arguments: str | Path, folder: Path, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder; `stdin` is text."""
    return python(*LIBRARY, *arguments, cwd=folder, input=stdin)


def start_command(
    arguments: Sequence[str | Path], *, folder: Path, **options: Any
) -> subprocess.Popen[str]:
    """Start a command in a folder."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, text=True, **options)
