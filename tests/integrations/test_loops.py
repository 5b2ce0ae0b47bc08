"""The loops of docs/frameworks.md, which are scripts in `examples/`, under torchrun."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.commands import ROOT, printed_by

pytestmark = [pytest.mark.distributed, pytest.mark.peer, pytest.mark.slow]


def last_line(framework: str, *arguments: object, ranks: int = 2) -> str:
    """What the first rank prints in the end."""
    script = ROOT / "examples" / f"with_{framework}.py"
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    run += ["-m", "tests.support.script_rank", str(script), *map(str, arguments)]
    printed = printed_by(run, OMP_NUM_THREADS="1")
    (line,) = [line for line in printed.splitlines() if "the last one's loss" in line]
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
