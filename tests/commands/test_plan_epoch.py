"""`plan`: the sampler's report, from a file of sizes."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import COMMAND, ENVIRONMENT
from tests.support.costs import measured
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.commands.command_line import main

SIZES = np.random.default_rng(0).integers(10, 400, 2000)
ASKED = ("--budget", "4000", "--unit-bytes", "1", "--fixed-bytes", "0.1kB")
COST = PaddedCost(unit_bytes=1, fixed_bytes=100)


@pytest.fixture(autouse=True)
def _sizes(folder: Path) -> None:
    np.save("sizes.npy", SIZES)


def report_of(cost: Any = COST, budget: int = 4000, **options: Any) -> Any:
    return MemoryBudgetBatchSampler(SIZES, cost, budget, **options).report()


def test_every_rule_reaches_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    rules: dict[str, Any] = {
        "window": 300,
        "max_batch_size": 16,
        "batch_size_multiple": 4,
        "size_multiple": 8,
        "oversize": "skip",
        "drop_last": True,
        "seed": 7,
    }
    asked = ["--budget", "390", "--ranks", "2", *ASKED[2:], "--json"]
    for name, value in rules.items():
        asked += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    assert main(["plan", "sizes.npy", *asked]) == 0
    expected = report_of(budget=390, num_replicas=2, rank=0, **rules)
    assert expected.skipped > 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(json.dumps(dataclasses.asdict(expected)))


TEXT = "\n".join(map(str, SIZES))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.npz", None),
        ("a.txt", TEXT),
        ("a.json", json.dumps(SIZES.tolist())),
        ("a.csv", f"length\n{TEXT}\n"),
    ],
)
def test_every_kind_of_file_gives_the_same_plan(
    name: str, text: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        Path(name).write_text(text, "utf-8")
    else:
        np.savez(name, sizes=SIZES, fingerprint=np.array("of sizes_of"))
    assert main(["plan", name, *ASKED]) == 0
    assert capsys.readouterr().out == f"{report_of()}\n"


@pytest.mark.parametrize("text", ["3 4\n5 6\n", "[[3, 4], [5, 6]]", "a,b\n3,4\n5,6"])
def test_several_axes_from_stdin(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["plan", "-", "--budget", "900", "--unit-bytes", "1", "10", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["samples"], len(report["axis_padding"])) == (2, 2)
    assert report["fill"] == pytest.approx(2 * (5 + 10 * 6) / 900)


def test_costs_are_saved_ones_or_bytes_of_a_unit(capsys: pytest.CaptureFixture[str]) -> None:
    measured(COST).save("cost.json")
    packed = PackedCost(unit_bytes=1, fixed_bytes=100)
    for asked, cost in (
        (("--cost", "cost.json"), COST),
        (("--cost", "cost.json", "--packed"), packed),
        ((*ASKED[2:], "--packed"), packed),
        (("--unit-bytes", "1"), PaddedCost(unit_bytes=1)),
    ):
        assert main(["plan", "sizes.npy", "--budget", "4000", *asked]) == 0
        assert capsys.readouterr().out == f"{report_of(cost)}\n", asked


def test_a_low_fill_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "sizes.npy", *ASKED, "--window", "32", "--min-fill"]
    assert main([*asked, "0.2"]) == 0
    capsys.readouterr()
    assert main([*asked, "0.99"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("micro-batches ")  # the table all the same
    assert re.fullmatch(r"torchbudget: the fill is \d+\.\d%, below \S+%\n", err)
    assert main(["plan", "sizes.npy", "--budget", "300", "--unit-bytes", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "samples exceed the budget alone" in err


def test_a_reader_that_goes_away() -> None:
    """A closed pipe is no error: no traceback, and the exit code is the answer's."""
    command = f"{shlex.join([*COMMAND, 'plan', 'sizes.npy', *ASKED])} | true"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_budgets_are_compared_by_the_predicted_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a step's samples and a measured cost; beyond the runs it is extrapolated."""
    # 1, n, L, n·L, operations, bytes, bytes above the knee
    seconds = 1e-3, 0.0, 0.0, 1e-5, 0.0, 0.0, 0.0
    cost = measured(COST, seconds=seconds, room=2500)
    cost.save("cost.json")
    asked = ["plan", "sizes.npy", "--cost", "cost.json", "--samples-per-step", "500"]
    assert main([*asked, "--budget", "1kB", "--budget", "8kB"]) == 0
    title, low, high = (line.split() for line in capsys.readouterr().out.splitlines())
    assert title[:2] == ["budget", "seconds"]
    for row, budget in ((low, 1000), (high, 8000)):
        report = report_of(cost, budget, samples_per_step=500)
        assert row[1:3] == [f"{report.epoch_s:,.1f}", f"{report.batches:,}"]
    assert (low[-1], high[-1]) == (low[4], "extrapolated")
    for more in (["--min-fill", "0.5"], ["--budget", "9kB", "--json"]):
        assert main([*asked, "--budget", "8kB", *more]) == 2
    assert "--min-fill does not go with a plan of least time" in capsys.readouterr().err
    assert main([*asked[:4], "--budget", "1kB", "--budget", "8kB"]) == 2
    assert "pass --samples-per-step, and a --cost" in capsys.readouterr().err
