"""`plan`: the sampler's report, from a file of sizes."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import start_command
from tests.support.costs import measured
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.commands.command_line import main

SIZES = np.random.default_rng(0).integers(10, 400, 2000)
ASKED = ("--budget", "4000", "--unit-bytes", "1", "--fixed-bytes", "0.1kB")
COST = PaddedCost(unit_bytes=1, fixed_bytes=100)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("sizes.npy", SIZES)
    return tmp_path


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
        ("a.npy", None),
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
    elif name.endswith("z"):
        np.savez(name, sizes=SIZES, fingerprint=np.array("of sizes_of"))
    else:
        np.save(name, SIZES.astype(np.int32))
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


def test_figures_are_written_by_their_suffix() -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", "sizes.npy", *ASKED, "--figure", "plan.png"]) == 0
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_low_fill_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "sizes.npy", *ASKED, "--window", "32", "--min-fill"]
    assert main([*asked, "0.2"]) == 0
    capsys.readouterr()
    for share in ("0.99", "90", "nan"):
        assert main([*asked, share]) == 1
        out, err = capsys.readouterr()
        assert out.startswith("micro-batches ")  # the table all the same
        assert re.fullmatch(r"torchbudget: the fill is \d+\.\d%, below \S+%\n", err)
    assert main(["plan", "sizes.npy", "--budget", "300", "--unit-bytes", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "samples are over the budget alone" in err


WRONG: dict[str, tuple[bytes | None, str]] = {
    "missing.npy": (None, "cannot read missing.npy: No such file"),
    "words.txt": (b"3\nten\n", "has no sizes in it"),
    "floats.txt": (b"1.5\n2\n", "has no sizes in it"),
    "nan.json": (b"[1, NaN]", "expected integer sizes"),
    "huge.txt": (b"9" * 30, "has no sizes in it"),
    "empty.txt": (b"\n", "has no sizes in it"),
    "blank.csv": (b"length\r\n5\r\n\r\n7\r\n", "has no sizes in it"),
    "ragged.txt": (b"3 4\n5\n", "has no sizes in it"),
    "empty.npz": (b"", "has no sizes in it"),
    "text.json": (b'["a"]', "expected integer sizes"),
    "other.npz": (None, "has no sizes in it: .*sizes"),
    "binary.txt": (b"\xff\xfe\x00", "has no sizes in it"),
    "negative.txt": (b"-3\n", "sizes must be at least 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_file_is_wrong_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line that says why, nothing on stdout."""
    content, expected = WRONG[name]
    if content is not None:
        Path(name).write_bytes(content)
    np.savez("other.npz", lengths=SIZES)
    assert main(["plan", name, *ASKED]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(f"torchbudget: .*{expected}", err), err


def test_a_reader_that_goes_away(folder: Path) -> None:
    """A closed pipe is no error: no traceback, and the exit code is the answer's."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start_command(["plan", "sizes.npy", *ASKED], folder=folder, **pipes)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate()[1] == ""
    assert process.returncode == 0
