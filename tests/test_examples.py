import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchbudget import MiB, parse_bytes

REPOSITORY = Path(__file__).resolve().parent.parent
PNG = b"\x89PNG\r\n\x1a\n"


def train_text(*arguments, path=()):
    """Run the example as people do, but with warnings as errors, in all of its processes."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*path, REPOSITORY))),
        "OMP_NUM_THREADS": "1",  # the tests themselves run on every core
    }
    return subprocess.run(
        [sys.executable, "-W", "error", REPOSITORY / "examples" / "train_text.py", *arguments],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )


SMALL = ("--samples", "32", "--samples-per-step", "16", "--max-length", "512")


@pytest.fixture(scope="module")
def too_small():
    return train_text(*SMALL, "--budget", "1MiB")


@pytest.fixture(scope="module")
def model_bytes(too_small):
    return parse_bytes(re.search(r"holds need ([\d.]+ \w+) with one", too_small.stderr)[1])


def test_a_budget_below_the_model_names_what_the_model_needs(too_small, model_bytes):
    """It ends with exit code 2 and one sentence, before any training."""
    assert too_small.returncode == 2
    assert "the budget is 1 MiB" in too_small.stderr
    assert "Traceback" not in too_small.stderr
    assert model_bytes > MiB(64)  # no interpreter with torch holds less


def test_both_runs_stay_within_the_budget_and_ours_pads_less(model_bytes, tmp_path):
    """The real peaks, as the kernel kept them, are below what the command line states."""
    picture = tmp_path / "batches.png"
    plotted = ("--plot", picture) if importlib.util.find_spec("matplotlib") else ()
    budget_bytes = model_bytes + MiB(32)
    done = train_text(*SMALL, "--budget", str(budget_bytes), *plotted)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""

    header, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"\s+torchbudget\s+fixed batches of \d+", header)
    table = {name: cells for name, *cells in (re.split(r"\s{2,}", line) for line in lines)}
    assert table["optimizer steps"] == ["2", "2"]
    ours, fixed = (float(cell.rstrip("%")) for cell in table["padding"])
    assert ours < fixed
    for peak, share in zip(table["peak memory"], table["peak / budget"], strict=True):
        assert parse_bytes(peak) <= budget_bytes + MiB(1)  # a rounded text
        assert float(share) <= 1
    for name in ("micro-batches", "fill of the budget", "held-out loss", "tokens/s", "speed-up"):
        assert len(table[name]) == 2
    if plotted:
        drawn = picture.read_bytes()
        assert drawn.startswith(PNG)
        assert len(drawn) > 20_000


def test_a_plot_without_matplotlib_names_the_extra(tmp_path):
    """And it says so before the training rather than after it."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    done = train_text(*SMALL, "--plot", "batches.png", path=[tmp_path])
    assert done.returncode == 2
    assert "pip install 'torchbudget[plot]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--budget", "much"), "cannot read 'much' as bytes"),
        (("--samples", "0"), "must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_read_is_refused(arguments, told):
    done = train_text(*arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
