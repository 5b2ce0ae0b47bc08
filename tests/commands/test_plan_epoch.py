"""`plan`: the sampler's report, from a file of sizes."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.support.commands import run_command, start_command
from tests.support.costs import forms_of
from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.commands.command_line import main

SIZES = np.random.default_rng(0).integers(10, 400, 2000)
ASKED = ("--budget", "4000", "--cost", "unit=1,fixed=100")
COST = PaddedCost(unit_bytes=1, fixed_bytes=100)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.save("sizes.npy", SIZES)
    return tmp_path


def test_it_prints_the_samplers_report(folder: Path) -> None:
    """Word for word, and nothing on stderr."""
    done = run_command("plan", "sizes.npy", *ASKED, "--samples-per-step", "200", folder=folder)
    expected = MemoryBudgetBatchSampler(SIZES, COST, 4000, samples_per_step=200).report()
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


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
    asked = [
        part
        for name, value in rules.items()
        for part in ([f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)]))
    ]
    assert main(["plan", "sizes.npy", "--budget", "390", "--ranks", "2", *asked, *ASKED[2:]]) == 0
    expected = MemoryBudgetBatchSampler(SIZES, COST, 390, num_replicas=2, rank=0, **rules).report()
    assert expected.skipped > 0
    assert capsys.readouterr().out == f"{expected}\n"


FILES = {
    "a.txt": "\n".join(map(str, SIZES)),
    "a.json": json.dumps(SIZES.tolist()),
    "a.csv": "length\n" + "\n".join(map(str, SIZES)),
    "b.csv": "\n".join(map(str, SIZES)),
}


@pytest.mark.parametrize("name", [*FILES, "a.npy", "a.npz"])
def test_every_kind_of_file_gives_the_same_plan(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith(".npy"):
        np.save(name, SIZES.astype(np.int32))
    elif name.endswith(".npz"):
        np.savez(name, sizes=SIZES, fingerprint=np.array("of sizes_of"))
    else:
        Path(name).write_text(FILES[name], "utf-8")
    assert main(["plan", name, *ASKED]) == 0
    assert capsys.readouterr().out == f"{MemoryBudgetBatchSampler(SIZES, COST, 4000).report()}\n"


@pytest.mark.parametrize("text", ["3 4\n5 6\n", "[[3, 4], [5, 6]]"])
def test_several_axes_from_stdin(text: str, folder: Path) -> None:
    cost = "unit=1:0,pair=0:2:0:0"
    done = run_command(
        "plan", "-", "--budget", "900", "--cost", cost, "--json", folder=folder, stdin=text
    )
    report = json.loads(done.stdout)
    assert (report["samples"], len(report["axis_padding"])) == (2, 2)
    assert report["fill"] == pytest.approx(2 * (5 + 2 * 30) / 900)


def test_costs_are_files_or_coefficients(capsys: pytest.CaptureFixture[str]) -> None:
    """The same cost, saved, by its coefficients with units, and in tokens."""
    MeasuredCost(forms=forms_of(COST), margin=0).save("cost.json")
    Path("lr=0.1").mkdir()  # as sweeps call their folders
    MeasuredCost(forms=forms_of(COST), margin=0).save("lr=0.1/cost.json")
    tokens, packed = PaddedCost(unit_bytes=1), PackedCost(unit_bytes=1, fixed_bytes=100)
    for text, cost, more in (
        ("cost.json", COST, ()),
        ("lr=0.1/cost.json", COST, ()),
        ("fixed=0.1kB,unit=1.0", COST, ()),
        ("tokens", tokens, ()),
        ("unit=1,fixed=100", packed, ("--packed",)),
        ("cost.json", packed, ("--packed",)),
    ):
        assert main(["plan", "sizes.npy", "--budget", "4000", "--cost", text, *more]) == 0
        expected = MemoryBudgetBatchSampler(SIZES, cost, 4000).report()
        assert capsys.readouterr().out == f"{expected}\n", text


def test_json_has_all_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "sizes.npy", *ASKED, "--window", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = MemoryBudgetBatchSampler(SIZES, COST, 4000, window=32).report()
    assert found == json.loads(json.dumps(dataclasses.asdict(report)))
    assert "raise window=32" in found["advice"][0]


# ---------------------------------------------------------------------- what it writes


class Page(HTMLParser):
    """The tags of a page, balanced, and all that they refer to."""

    EMPTY = {"meta", "img"}  # noqa: RUF012  (a constant)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href")]
        assert tag not in ("script", "link", "iframe", "object")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_page_is_whole_and_needs_nothing_else(folder: Path) -> None:
    """Well-formed, with the report's table; all that it refers to are figures inside it."""
    pytest.importorskip("matplotlib")
    name = "<b>&.txt"  # a name is text, not HTML
    Path(name).write_text(FILES["a.txt"], "utf-8")
    done = run_command("plan", name, *ASKED, "--html", "plan.html", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    text = Path("plan.html").read_text("utf-8")
    page = Page(text)
    assert "Plan of &lt;b&gt;&amp;.txt" in text
    report = MemoryBudgetBatchSampler(SIZES, COST, 4000).report()
    assert page.cells == ["figure", "value", *(cell for row in report.rows for cell in row)]
    assert len(page.references) == 2
    for reference in page.references:
        kind, _, data = reference.partition(",")
        assert kind == "data:image/svg+xml;base64"
        svg = ElementTree.fromstring(base64.b64decode(data))  # noqa: S314  (our own)
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
        links = [
            value
            for node in svg.iter()
            for attribute, value in node.attrib.items()
            if attribute.endswith("href")
        ]
        assert all(link.startswith(("#", "data:")) for link in links)
    style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert not any("url(" in one or "@import" in one for one in style)


def test_a_page_is_the_same_each_time() -> None:
    pytest.importorskip("matplotlib")
    texts = []
    for name in ("a.html", "b.html"):
        assert main(["plan", "sizes.npy", *ASKED, "--html", name]) == 0
        texts.append(Path(name).read_bytes())
    assert texts[0] == texts[1]


def test_figures_are_written_by_their_suffix(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", "sizes.npy", *ASKED, "--figure", "plan.png"]) == 0
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "sizes.npy", *ASKED, "--figure", "plan.bmp3"]) == 2
    assert "cannot write plan.bmp3" in capsys.readouterr().err


# ---------------------------------------------------------------------- how it ends


def test_a_low_fill_fails_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "sizes.npy", *ASKED, "--window", "32", "--min-fill"]
    assert main([*asked, "0.2"]) == 0
    capsys.readouterr()
    assert main([*asked, "0.99"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("micro-batches ")  # the table all the same
    assert re.fullmatch(r"torchbudget: the fill is \d+\.\d%, below 99\.0%\n", err)


@pytest.mark.parametrize("share", ["nan", "90", "-1", "much"])
def test_a_least_fill_that_is_no_share_is_wrong_use(
    share: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No fill is below NaN, and none is as much as 90."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "sizes.npy", *ASKED, "--min-fill", share])
    assert ended.value.code == 2
    assert "--min-fill" in capsys.readouterr().err


def test_sizes_that_do_not_fit_are_a_no(folder: Path) -> None:
    done = run_command("plan", "sizes.npy", "--budget", "300", "--cost", "tokens", folder=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("torchbudget: ")
    assert "samples are over the budget alone" in done.stderr


WRONG = {
    "missing.npy": "cannot read missing.npy: No such file",
    ".": "cannot read .: Is a directory|. has no sizes in it",
    "words.txt": "words.txt has no sizes in it",
    "floats.txt": "expected whole numbers, got fractions",
    "nan.json": "nan.json has no sizes in it",
    "huge.txt": "huge.txt has no sizes in it",
    "empty.txt": "it is empty",
    "blank.txt": "line 3 is blank: a sample without elements is a 0",
    "blank.csv": "line 3 is blank",
    "empty.npy": "empty.npy has no sizes in it",
    "empty.npz": "empty.npz has no sizes in it",
    "no.json": "no.json has no sizes in it",
    "text.json": "expected whole numbers, got ",
    "other.npz": 'it has no array "sizes"',
    "broken.npy": "broken.npy has no sizes in it",
    "binary.txt": "binary.txt has no sizes in it",
    "sizes.parquet": "expected .npy, .npz, .json, .csv or .txt",
    "negative.txt": "sizes must be at least 0",
    "floats.npy": "expected integer sizes",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_file_is_wrong_use(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line that names it, nothing on stdout."""
    Path("words.txt").write_text("ten\n", "utf-8")
    Path("floats.txt").write_text("1.5\n2\n", "utf-8")
    Path("nan.json").write_text("[1, NaN]", "utf-8")
    Path("huge.txt").write_text("9" * 30, "utf-8")
    Path("empty.txt").write_text("\n", "utf-8")
    Path("blank.txt").write_text("3\n5\n \n7\n", "utf-8")
    Path("blank.csv").write_text("length\r\n5\r\n\r\n7\r\n", "utf-8")
    Path("empty.npy").touch()
    Path("empty.npz").touch()
    Path("no.json").write_text("{", "utf-8")
    Path("text.json").write_text('["a"]', "utf-8")
    np.savez("other.npz", lengths=SIZES)
    Path("broken.npy").write_bytes(b"broken")
    Path("binary.txt").write_bytes(b"\xff\xfe\x00")
    Path("sizes.parquet").write_text("1", "utf-8")
    Path("negative.txt").write_text("-3\n", "utf-8")
    np.save("floats.npy", SIZES / 2)
    assert main(["plan", name, *ASKED]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("torchbudget: ")
    assert re.search(WRONG[name], err), err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("budget", "cost", "expected"),
    [
        ("lots", "tokens", "cannot read 'lots' as bytes"),
        ("0", "tokens", "holds nothing"),
        ("8GiB", "none.json", "no such file, and no coefficients"),
        ("8GiB", "words.txt", "is not a saved cost"),
        ("8GiB", "unit=many", "unit=many: cannot read 'many'"),
        ("8GiB", "units=3", "expected one of fixed, floor, sample, unit, pair"),
        ("8GiB", "unit=1,fixed=2,unit=3", "each coefficient may stand there once"),
        ("8GiB", "unit=0", "a sample must cost something"),
        ("8GiB", "unit=-1", "unit_bytes must be at least 0"),
        ("8GiB", "unit=1:2", "this cost has 2 axes|shape"),
        ("8GiB", "unit=1:2,pair=1:2:3", "must have the shape"),
    ],
)
def test_a_bad_budget_or_cost_is_wrong_use(
    budget: str, cost: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("words.txt").write_text("ten\n", "utf-8")
    assert main(["plan", "sizes.npy", "--budget", budget, "--cost", cost]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(expected, err), err


def test_a_page_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["plan", "sizes.npy", *ASKED, "--html", "none/plan.html"]) == 2
    assert "cannot write none/plan.html: No such file or directory" in capsys.readouterr().err


def test_a_reader_that_goes_away(folder: Path) -> None:
    """A closed pipe is no error: no traceback, and the exit code is the answer's."""
    process = start_command(
        ["plan", "sizes.npy", *ASKED],
        folder=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0
