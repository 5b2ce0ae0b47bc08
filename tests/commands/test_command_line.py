"""The command line: help, wrong use, the commands of its page, and each command."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.commands import COMMAND, ENVIRONMENT, ROOT, run_command, start_command
from tests.support.costs import measured, two_ways
from tests.support.sampler_cases import samplers
from torchbudget import (
    MemoryBudgetBatchSampler,
    MemoryMonitor,
    PackedCost,
    PaddedCost,
    __version__,
    load_cost,
)
from torchbudget.__main__ import main
from torchbudget.machine.host import host_memory, usable_processors
from torchbudget.observe.report import recorded_runs
from torchbudget.plan.cursor import Cursor
from torchbudget.units import MiB

COMMANDS = ("inspect", "sizes", "plan", "measure", "watch", "report")
MODULE = "tests.support.measured_module"
SIZES = np.random.default_rng(0).integers(10, 400, 2000)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with sizes in it alone."""
    monkeypatch.chdir(tmp_path)
    np.save("sizes.npy", SIZES)
    return tmp_path


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
    pytest.importorskip("pyarrow")
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


def report_of(cost: Any = COST, budget: int = 4000, epoch: int = 0, **options: Any) -> Any:
    sampler = MemoryBudgetBatchSampler(SIZES, cost, budget, **options)
    sampler.set_epoch(epoch)
    return sampler.report()


def flags(rules: dict[str, Any]) -> list[str]:
    """The rules as options of the command."""
    texts = {name.replace("_", "-"): value for name, value in rules.items()}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in texts.items()]


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
    assert main(["plan", "sizes.npy", *asked, *flags(rules)]) == 0
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


def test_a_figure_is_of_the_epoch() -> None:
    """It is drawn once more to the last byte, and another epoch has another one."""
    pytest.importorskip("matplotlib")
    drawn = []
    for epoch in ("0", "1", "1"):
        assert main(["plan", "sizes.npy", *ASKED, "--epoch", epoch, "--figure", "plan.png"]) == 0
        drawn.append(Path("plan.png").read_bytes())
    assert drawn[0] != drawn[1] == drawn[2]


def test_budgets_are_compared_by_the_predicted_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a step's samples and a measured cost; beyond the runs it is extrapolated."""
    # 1, n, L, n·L, operations, bytes, bytes above the knee
    seconds = 1e-3, 0.0, 0.0, 1e-5, 0.0, 0.0, 0.0
    cost = measured(COST, seconds=seconds, room=2500)
    cost.save("cost.json")
    asked = ["plan", "sizes.npy", "--cost", "cost.json", "--samples-per-step", "500"]
    assert main([*asked, "--epoch", "3", "--budget", "1kB", "--budget", "8kB"]) == 0
    title, low, high = (line.split() for line in capsys.readouterr().out.splitlines())
    assert title[:2] == ["budget", "seconds"]
    for row, budget in ((low, 1000), (high, 8000)):
        report = report_of(cost, budget, epoch=3, samples_per_step=500)
        assert row[1:3] == [f"{report.epoch_s:,.1f}", f"{report.batches:,}"]
    assert (low[-1], high[-1]) == (low[4], "extrapolated")
    for more in (["--min-fill", "0.5"], ["--budget", "9kB", "--json"]):
        assert main([*asked, "--budget", "8kB", *more]) == 2
    assert "--min-fill does not go with a plan of least time" in capsys.readouterr().err
    assert main([*asked[:4], "--budget", "1kB", "--budget", "8kB"]) == 2
    assert "pass --samples-per-step, and a --cost" in capsys.readouterr().err


# ---------------------------------------------------------------------- sizes, and plans as files


def test_sizes_of_columns_are_written_and_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """Several columns are several axes; what cannot be read or written is named, with code 2."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in ("b", "a"):
        table = pa.table({"n": [len(name), ord(name)], "text": ["x", name * 9], "f": [0.5, 1]})
        pq.write_table(table, f"{name}.parquet")
    asked = ["sizes", "b.parquet", "a.parquet", "--column", "n"]
    assert main([*asked, "--out", "deep/n.npy"]) == 0
    assert capsys.readouterr().out == "4 samples in deep/n.npy\n"
    assert np.load("deep/n.npy", mmap_mode="r").tolist() == [1, ord("b"), 1, ord("a")]
    assert main(["sizes", "*.parquet", "--column", "text", "--column", "n", "--out", "t.npy"]) == 0
    assert np.load("t.npy").tolist() == [[1, 1], [9, ord("a")], [1, 1], [9, ord("b")]]
    assert main(["plan", "t.npy", "--budget", "999", "--unit-bytes", "1", "1"]) == 0
    capsys.readouterr()
    for wrong, message in (
        (["sizes", "no.parquet", "--column", "n", "--out", "n.npy"], "no file matches"),
        (["sizes", "a.parquet", "--column", "f", "--out", "n.npy"], "type double; expected"),
        ([*asked, "--out", "a.parquet/n.npy"], "cannot write a.parquet/n.npy"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def read_plan(folder: str, rank: int) -> Any:
    """The micro-batches in a folder, as the page reads them."""
    page = (ROOT / "docs" / "past-one-machine.md").read_text("utf-8")
    [code] = re.findall(r"```python\n([^`]*def micro_batches\(.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) <= 10 + 1
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102  (the page's own)
    return list(names["micro_batches"](folder, rank))


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"samples_per_step": 300},
        {"samples_per_step": 300, "drop_last": True},
        {"window": 128, "drop_last": True, "max_batch_size": 9},
        {"oversize": "skip", "budget": 390},
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_plan_in_files_is_that_of_the_sampler(ranks: int, rules: dict[str, Any]) -> None:
    """Micro-batches and ends of steps, of each rank, in a later epoch too."""
    given = {"budget": 4000} | rules
    asked = ["plan", "sizes.npy", *ASKED[2:], "--ranks", str(ranks), *flags(given)]
    for epoch in (0, 2):
        assert main([*asked, "--epoch", str(epoch), "--out", f"plan-{epoch}"]) == 0
        for rank, sampler in enumerate(samplers(SIZES, COST, ranks=ranks, **given)):
            sampler.set_epoch(epoch)
            found = read_plan(f"plan-{epoch}", rank)
            assert [indices for indices, _ in found] == list(sampler)
            cursor = Cursor(epoch=epoch)
            ends = [one.ends_step for one in sampler.plan.micro_batches(cursor, rank=rank)]
            assert [ends_step for _, ends_step in found] == ends


def test_a_plan_in_files_needs_what_the_sampler_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """A cost of alternatives has no plan without steps."""
    two_ways(largest=(400,)).save("ways.json")
    asked = ["plan", "sizes.npy", "--cost", "ways.json", "--budget", "1GiB", "--out", "plan"]
    assert main(asked) == 2
    assert "alternatives need steps whose samples are given" in capsys.readouterr().err


def test_a_plan_is_not_written_over_another(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of each would be a third one."""
    asked = ["plan", "sizes.npy", *ASKED]
    assert main([*asked, "--out", "plan"]) == 0
    assert main([*asked, "--out", "plan"]) == 2
    assert "exists: give a new folder" in capsys.readouterr().err
    assert main([*asked, "--budget", "5000", "--out", "other"]) == 2
    assert "--out go with one --budget" in capsys.readouterr().err
    assert main([*asked, "--out", "sizes.npy/plan"]) == 2
    assert "cannot write sizes.npy/plan/indices.npy" in capsys.readouterr().err


# ---------------------------------------------------------------------- watch and report


pytestmark = pytest.mark.filterwarnings("ignore::torchbudget.errors.MemoryLimitWarning")
# Python keeps 64 MiB for a while.
HOLD = [sys.executable, "-c", "kept = bytearray(64 * 2**20); import time; time.sleep(1.5)"]
# A shell that prints the name of a signal that it gets, and ends with 5.
NAMES = ("TERM", "INT")
TRAPS = "; ".join(f"trap 'echo {name}; exit 5' {name}" for name in NAMES)
WAIT = ["sh", "-c", f"{TRAPS}; echo ready; while :; do sleep 0.1; done"]


def test_the_command_runs_as_it_would_alone(folder: Path) -> None:
    """Its arguments, streams and exit code are its own; the report is on stderr, after."""
    command = ["sh", "-c", 'echo "$@"; cat; echo mine >&2; sleep 0.6; exit 7', "sh", "--", "-o"]
    arguments = ("watch", "-o", "run.jsonl", "--", *command)
    done = run_command(*arguments, folder=folder, stdin="of the user")
    assert (done.returncode, done.stdout) == (7, "-- -o\nof the user")
    assert done.stderr.startswith("mine\n")
    assert "job, resident" in done.stderr
    assert recorded_runs("run.jsonl")[0].end


def test_descendants_are_seen_and_limits_warned_of(folder: Path) -> None:
    """The peak is that of all processes, whoever started them."""
    hold = shlex.join(HOLD)
    asked = ("--host", "60MiB", "--interval", "0.05", "--warn-at", "0.5", "-o", "run.jsonl")
    command = ("sh", "-c", f"{hold} & {hold} & wait")
    done = run_command("watch", *asked, "--", *command, folder=folder)
    assert done.returncode == 0, done.stderr
    [warned] = re.findall("warning: this job's memory (.*)", done.stderr)  # once
    assert "budget.host" in warned
    assert "start fewer workers" in warned
    peak = recorded_runs("run.jsonl")[0].peak
    assert peak.resident_bytes > MiB(128)
    assert peak.worker_peak_bytes is not None
    assert peak.process_peak_bytes is not None
    assert peak.worker_peak_bytes > MiB(64) > peak.process_peak_bytes
    assert main(["report", "run.jsonl", "--check"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_signals_are_passed_on(name: str, folder: Path) -> None:
    """The command handles them, and its own exit code counts."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start_command(
        ["watch", "--", *WAIT], folder=folder, stdin=subprocess.DEVNULL, **pipes
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, f"SIG{name}"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, f"{name}\n")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        ("sh -c 'sleep 0.3; kill -35 $$'", 163, "ended by signal 35, Real-time signal 1"),
        ("not-a-command-at-all", 127, "cannot run not-a-command-at-all: No such file"),
        ("./notes.txt", 126, "cannot run ./notes.txt: Permission denied"),
        ("false", 1, ""),  # too short to be seen, perhaps
    ],
)
def test_exit_codes_are_those_of_a_shell(
    command: str, code: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """128 and the signal's number, which stderr names; handlers of signals are put back."""
    Path("notes.txt").write_text("no program", "utf-8")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert main(["watch", "--", *shlex.split(command)]) == code
    assert told in capfd.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def monitored(budget: str) -> str:
    """A run of this process with a snapshot and a batch; the report of its monitor."""
    with MemoryMonitor(budget, path="run.jsonl", device="cpu", warn_at=1) as monitor:
        with monitor.batch(4, 100):
            pass
        monitor.snapshot("after a batch")
    return str(monitor.report())


def test_the_last_run_is_reported_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """Budgets that were exceeded, or that nothing was read to compare with, fail the check."""
    monitored("64GiB")
    assert main(["report", "run.jsonl", "--check"]) == 0
    report = monitored("1MiB").splitlines()
    capsys.readouterr()
    assert main(["report", "run.jsonl", "--check"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line for line in lines if line in report] == report
    assert "1 batches, the largest of " in out
    assert lines[-1].endswith("rank 0; run 2 of its file")
    assert err.startswith("torchbudget: device: ")
    assert err.endswith(" were used of 1 MiB\n")
    # Of a GPU that was never used nothing is in the file, and shared pages may be left out.
    for old, new, expected in (
        ('"name":"device"', '"name":"machine"', "device: no reading can be"),
        ('"budget":{"device"', '"budget":{"host"', "host: no reading can be"),
        ('"is_exact":true', '"is_exact":false', "host: shared pages cannot be told apart"),
    ):
        Path("run.jsonl").write_text(Path("run.jsonl").read_text().replace(old, new))
        assert main(["report", "run.jsonl", "--check"]) == 1
        assert expected in capsys.readouterr().err


def test_a_run_that_was_killed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its records are reported: a real process that watches a real one, both killed."""
    pytest.importorskip("matplotlib")
    process = start_command(["watch", "-o", "run.jsonl", "--", "sleep", "60"], folder=folder)
    while not (Path("run.jsonl").exists() and '"sample"' in Path("run.jsonl").read_text()):
        time.sleep(0.02)
    process.kill()
    process.wait()
    os.kill(recorded_runs("run.jsonl")[-1].begin["pid"], signal.SIGKILL)
    assert main(["report", "run.jsonl", "--figure", "run.svg"]) == 0
    out = capsys.readouterr().out
    assert "no end was written: it was killed after " in out
    assert "job, resident" in out
    assert Path("run.svg").stat().st_size > 1000
