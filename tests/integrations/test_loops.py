"""The loops of docs/frameworks.md, which are scripts in `examples/`, under torchrun."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.distributed, pytest.mark.peer, pytest.mark.slow]


def last_line(framework: str, *arguments: object, ranks: int = 2) -> str:
    """What the first rank prints in the end."""
    script = ROOT / "examples" / f"with_{framework}.py"
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += [f"--nproc-per-node={ranks}", "-m", "tests.support.script_rank"]
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
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "the last one's loss" in line]
    return line.partition("; ")[2]


FRAMEWORKS = ["accelerate", "lightning", "transformers", "torch.distributed.checkpoint"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(framework: str, tmp_path: Path) -> None:
    """To the last digit: it takes the same steps of the same samples."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    script = framework.removeprefix("torch.").replace(".", "_")
    whole = last_line(script, tmp_path / "whole")
    stopped = last_line(script, tmp_path / "stopped", "--stop", 5)
    assert last_line(script, tmp_path / "stopped") == whole != stopped


def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    """From the last whole checkpoint of torch.distributed.checkpoint; all steps are taken."""
    run = "distributed_checkpoint", tmp_path / "run"
    last_line(*run, "--stop", 3)
    whole = tmp_path / "run" / "000003"
    shutil.copytree(whole, tmp_path / "run" / "000004")
    (tmp_path / "run" / "000004" / ".metadata").unlink()  # as a run that is killed leaves it
    last_line(*run, "--stop", 6, ranks=3)
    last_line(*run, ranks=1)
    assert len([*(tmp_path / "run").glob("*/.metadata")]) == 14  # 200 samples, 32 a step, twice
