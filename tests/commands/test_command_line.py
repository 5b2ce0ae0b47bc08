"""The command line: help, wrong use, the commands of its page; inspect, measure and plan."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import resource
import shlex
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import COMMAND, ENVIRONMENT, ROOT, run_command
from tests.support.costs import measured
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost, __version__, load_cost
from torchbudget.commands.command_line import main
from torchbudget.machine.host import host_memory, usable_processors

COMMANDS = ("inspect", "plan", "measure", "watch", "report")
MODULE = "tests.support.measured_module"
SIZES = np.random.default_rng(0).integers(10, 400, 2000)


@pytest.fixture(autouse=True)
def _sizes(folder: Path) -> None:
    np.save("sizes.npy", SIZES)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    out, err = capsys.readouterr()
    assert (ended.value.code, err) == (0, "")
    assert f"python -m torchbudget {command} " in out.partition("\n\n")[2]


def test_the_version(folder: Path) -> None:
    done = run_command("--version", folder=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


FILES = {
    "notes": b"not JSON\n",
    "words.txt": b"3\nten\n",
    "empty.txt": b"\n",
}
PLAN = "plan sizes.npy --budget"
WRONG = [
    ("plan missing.npy --budget 9 --unit-bytes 1", "cannot read missing.npy: No such file"),
    ("plan words.txt --budget 9 --unit-bytes 1", "words.txt has no sizes in it"),
    ("plan empty.txt --budget 9 --unit-bytes 1", "empty.txt has no sizes in it"),
    ("plan other.npz --budget 9 --unit-bytes 1", "has no sizes in it: .*sizes"),
    ("inspect --fraction 2", "fraction must be above 0 and at most 1"),
    ("measure train_step --max-size 16", "expected MODULE:FUNCTION"),
    (f"measure {MODULE}:nothing --max-size 16", "must return the step and make_batch"),
    (f"measure {MODULE}:to_measure --min-size 1", "give --max-size, or the --sizes"),
    (f"measure {MODULE}:to_measure --sizes none.npy", "cannot read none.npy: No such file"),
    (f"measure {MODULE}:to_measure --max-size 16 -o no/a.json", "cannot write no/"),
    (f"{PLAN} lots --unit-bytes 1", "cannot read 'lots' as bytes"),
    (f"{PLAN} 8GiB --cost none.json", "--cost none.json: .*No such file"),
    (f"{PLAN} 8GiB --cost sizes.npy", "--cost sizes.npy: "),
    (f"{PLAN} 8GiB --unit-bytes 1 2", "this cost has 2 axes|shape"),
    (f"{PLAN} 8GiB --cost a.json --fixed-bytes 1", "goes with --unit-bytes"),
    (f"{PLAN} 4000 --unit-bytes 1 --figure plan.bmp3", "cannot write plan.bmp3"),
    ("watch --", "give a command to watch"),
    ("watch -o none/run.jsonl -- true", "cannot write none/run.jsonl"),
    ("report none.jsonl", "cannot read none.jsonl: No such file"),
    ("report notes", "no run of a MemoryMonitor"),
]


@pytest.mark.parametrize(("arguments", "expected"), WRONG, ids=[one for one, _ in WRONG])
def test_wrong_use_is_2_and_one_line_on_stderr(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is found before anything is measured, planned or started."""
    if "--figure" in arguments:
        pytest.importorskip("matplotlib")
    np.savez("other.npz", lengths=SIZES)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" or "--figure" in arguments
    assert re.search(f"torchbudget: .*{expected}", err), err


PAGE = (ROOT / "docs" / "command-line.md").read_text("utf-8")
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


def test_the_documented_commands_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder with the page's files: exit code 0, results on stdout, nothing on stderr."""
    pytest.importorskip("matplotlib")
    sizes, module = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    Path("train.py").write_text(module, "utf-8")
    monkeypatch.syspath_prepend(folder)
    exec(sizes, {})  # noqa: S102  (the page's own)
    for line in LINES:
        before, _, command = line.rpartition(" | ")
        if before:
            printed = subprocess.check_output(shlex.split(before), text=True)
            monkeypatch.setattr("sys.stdin", io.StringIO(printed))
        _, _, arguments = command.partition("python -m torchbudget ")
        assert main(shlex.split(arguments)) == 0
        result, rest = capsys.readouterr()
        if " watch " in line:  # stdout is the command's
            result, rest = rest, result
        assert (bool(result), rest) == (True, ""), line


# ---------------------------------------------------------------------- inspect


def test_the_json_has_every_pool_and_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--device", "cpu", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = json.loads(out)
    pools = {pool["name"]: pool for pool in found["pools"]}
    for pool in host_memory():
        assert pools[pool.name]["limit_bytes"] == pool.limit_bytes
    hosts = [pool for pool in found["pools"] if pool["bounds"] == "host"]
    least = min(hosts, key=lambda pool: pool["usable_bytes"])
    # What is usable differs a little between two readings.
    assert found["budget"]["host"] == pytest.approx(0.9 * least["usable_bytes"], rel=0.05)
    assert found["processors"] == usable_processors()
    assert main(["inspect", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert re.search("budget: host .* for steps and loading together", table)  # one memory, once
    assert 0 < found["free_descriptors"] <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]


# ---------------------------------------------------------------------- measure


@pytest.mark.slow
def test_measured_saved_and_planned(folder: Path) -> None:
    """Stdout is the cost's report alone, whatever the module prints; `plan` takes the file."""
    np.save("sizes.npy", np.indices((12, 12)).reshape(2, -1).T + 1)
    arguments = ("measure", f"{MODULE}:two_axes", "--max-size", "16x16", "-o", "cost.json")
    done = run_command(*arguments, folder=folder)
    assert (done.returncode, done.stderr) == (0, "the module is imported\n")
    cost = load_cost("cost.json")
    assert (done.stdout, cost.axes) == (f"{cost.report()}\n", 2)
    assert main(["plan", "sizes.npy", "--budget", "1MiB", "--cost", "cost.json"]) == 0


def test_steps_that_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1; errors of the user's own code are passed on, with their traceback."""
    with pytest.raises(RuntimeError, match="of the user's own"):
        main(["measure", f"{MODULE}:broken", "--max-size", "8"])
    with pytest.raises(ModuleNotFoundError, match="No module named 'not_installed_anywhere'"):
        main(["measure", "not_installed_anywhere:step", "--max-size", "8"])
    assert main(["measure", f"{MODULE}:without_samples", "--max-size", "8"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1][:13]) == ("", "torchbudget: ")


# ---------------------------------------------------------------------- plan


ASKED = ("--budget", "4000", "--unit-bytes", "1", "--fixed-bytes", "0.1kB")
COST = PaddedCost(unit_bytes=1, fixed_bytes=100)


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
