"""The command line as a whole: help, exit codes, and what goes where."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run_command
from torchbudget import __version__
from torchbudget.commands import command_line

COMMANDS = ("inspect", "plan", "measure", "watch", "report")


def test_help_names_every_command(tmp_path: Path) -> None:
    done = run_command("--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for command in COMMANDS:
        assert f"    {command} " in done.stdout
    assert "exit codes" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main([command, "--help"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert f"python -m torchbudget {command} " in out.replace("\n\n", " ").partition("options:")[0]
    assert err == ""


def test_the_version() -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert ended.value.code == 0


def test_the_version_is_printed(tmp_path: Path) -> None:
    assert run_command("--version", folder=tmp_path).stdout == f"{__version__}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["fly"], ["plan"], ["plan", "-", "--budget"], ["inspect", "--fraction", "a"]]
)
def test_wrong_use_is_2_and_says_so_on_stderr(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(arguments)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: python -m torchbudget")
