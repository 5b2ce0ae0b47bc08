"""`measure`: a step of the user's own module, into a file that `plan` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import run_command
from torchbudget import load_cost
from torchbudget.commands.command_line import main

MODULE = """
import torch

print("the module is imported")


def to_measure():
    model = torch.nn.Linear(16, 100)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda n, size: torch.zeros(n, size, 16)


def two_axes():
    step, _ = to_measure()
    return step, lambda n, size: torch.zeros(n, *size, 16)


def nothing():
    return None


def broken():
    raise RuntimeError("of the user's own")


def without_samples():
    step, _ = to_measure()
    return step, lambda n, size: torch.zeros(1, 1, 16)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_step.py").write_text(MODULE, "utf-8")
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n", "utf-8")
    return tmp_path


@pytest.mark.slow
def test_measured_saved_and_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stdout is the cost's report alone, whatever the module prints; `plan` takes the file."""
    done = run_command(
        "measure", "train_step:to_measure", "--max-size", "64", "-o", "cost.json", folder=folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "the module is imported\n"
    cost = load_cost(folder / "cost.json")
    assert done.stdout == f"{cost.report()}\n"
    np.save("sizes.npy", np.arange(1, 60))
    assert main(["plan", "sizes.npy", "--budget", "1MiB", "--cost", "cost.json"]) == 0
    assert "torchbudget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "largest", "drawn"),
    [("to_measure", "64", ["padded size", "samples"]), ("two_axes", "16x16", ["fitted, MiB"])],
)
def test_figures_of_costs(
    function: str, largest: str, drawn: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The surface of a cost of one axis, the fit of one of several."""
    monkeypatch.syspath_prepend(str(folder))
    arguments = ["measure", f"train_step:{function}", "--max-size", largest, "--figure", "cost.svg"]
    assert main(arguments) == 0
    assert main([*arguments[:-1], "nowhere/cost.svg"]) == 2
    assert main([*arguments[:-2], "-o", "nowhere/cost.json"]) == 2
    written = (folder / "cost.svg").read_text("utf-8")
    assert all(f"<!-- {label} -->" in written for label in drawn)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("train_step", "expected MODULE:FUNCTION"),
        ("nowhere:to_measure", "there is no module 'nowhere'"),
        ("train_step:fly", "train_step has no function 'fly'"),
        ("train_step:nothing", "must return the step and make_batch, returned None"),
    ],
)
def test_what_is_not_there_is_wrong_use(
    function: str,
    expected: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(folder))  # as `python -m` does
    assert main(["measure", function, "--max-size", "64"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err


def test_sizes_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "train_step:to_measure"]) == 2
    assert "give --max-size, or the --sizes" in capsys.readouterr().err


def test_a_step_that_cannot_be_measured_is_a_no(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    assert main(["measure", "train_step:without_samples", "--max-size", "64"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "torchbudget: " in err


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("train_step:broken", "RuntimeError: of the user's own"),
        ("needs_more:step", "ModuleNotFoundError: No module named 'not_installed_anywhere'"),
    ],
)
def test_errors_of_the_users_own_code_keep_their_traceback(
    function: str, expected: str, folder: Path
) -> None:
    """They are found by it: a missing import of the module's own, or what the function raises."""
    done = run_command("measure", function, "--max-size", "8", folder=folder)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(expected)
    assert "Traceback" in done.stderr
