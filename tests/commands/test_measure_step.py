"""`measure`: a step of the user's own module, into a file that `plan` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import run_command
from torchbudget import load_cost
from torchbudget.commands.command_line import main

MODULE = "tests.support.measured_module"


def measure(function: str, *arguments: str) -> int:
    return main(["measure", function, *(arguments or ("--max-size", "16"))])


@pytest.mark.slow
def test_measured_saved_and_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stdout is the cost's report alone, whatever the module prints; `plan` takes the file."""
    monkeypatch.chdir(tmp_path)
    arguments = ("measure", f"{MODULE}:to_measure", "--max-size", "64", "-o", "cost.json")
    done = run_command(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "the module is imported\n"
    assert done.stdout == f"{load_cost('cost.json').report()}\n"
    np.save("sizes.npy", np.arange(1, 60))
    assert main(["plan", "sizes.npy", "--budget", "1MiB", "--cost", "cost.json"]) == 0
    assert measure(f"{MODULE}:two_axes", "--max-size", "16x16", "-o", "two.json") == 0
    assert load_cost("two.json").axes == 2


@pytest.mark.parametrize(
    ("function", "arguments", "code", "expected"),
    [
        ("train_step", (), 2, "expected MODULE:FUNCTION"),
        (f"{MODULE}:nothing", (), 2, "must return the step and make_batch, returned None"),
        (f"{MODULE}:to_measure", ("--min-size", "1"), 2, "give --max-size, or the --sizes"),
        (f"{MODULE}:to_measure", ("--sizes", "none.npy"), 2, "cannot read none.npy: No such file"),
        (f"{MODULE}:to_measure", ("--max-size", "16", "-o", "no/a.json"), 2, "cannot write no/"),
        (f"{MODULE}:without_samples", (), 1, "torchbudget: "),
    ],
)
def test_wrong_use_and_steps_that_cannot_be_measured(
    function: str,
    arguments: tuple[str, ...],
    code: int,
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert measure(function, *arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (f"{MODULE}:broken", "RuntimeError: of the user's own"),
        ("not_installed_anywhere:step", "No module named 'not_installed_anywhere'"),
    ],
)
def test_errors_of_the_users_own_code_keep_their_traceback(
    function: str, expected: str, tmp_path: Path
) -> None:
    done = run_command("measure", function, "--max-size", "8", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(expected)
    assert "Traceback" in done.stderr
