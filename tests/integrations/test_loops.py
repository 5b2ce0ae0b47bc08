"""The loops of docs/frameworks.md, which are scripts in `examples/`, under torchrun."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.distributed, pytest.mark.peer, pytest.mark.slow]


def last_line(framework: str, *arguments: object) -> str:
    """What the first of two ranks prints in the end."""
    script = ROOT / "examples" / f"with_{framework}.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*run, script, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "the last one's loss" in line]
    return line.partition("; ")[2]


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(framework: str, tmp_path: Path) -> None:
    """To the last digit: it takes the same steps of the same samples."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    whole = last_line(framework, tmp_path / "whole")
    stopped = last_line(framework, tmp_path / "stopped", "--stop", 5)
    assert last_line(framework, tmp_path / "stopped") == whole != stopped
