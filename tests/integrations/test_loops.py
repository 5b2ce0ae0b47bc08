"""The loops of docs/frameworks.md, which are scripts in `examples/`, on two ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.peer, pytest.mark.slow]

FRAMEWORKS = ["accelerate", "lightning", "transformers", "torch.distributed.checkpoint"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(framework: str, tmp_path: Path) -> None:
    """To the last digit: it takes the same steps of the same samples."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    name = framework.removeprefix("torch.").replace(".", "_")
    path = ROOT / "examples" / f"with_{name}.py"

    def last_line(folder: str, *arguments: object) -> str:
        printed, _ = run_ranks(
            script("fitting.example"), tmp_path, 2, path, tmp_path / folder, *arguments
        )
        (line,) = [one for one in printed.splitlines() if "the last one's loss" in one]
        return str(line).partition("; ")[2]

    whole, stopped = last_line("whole"), last_line("stopped", "--stop", 5)
    assert last_line("stopped") == whole != stopped
