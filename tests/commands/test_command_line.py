"""The command line as a whole: help, exit codes, streams, and the commands of its page."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import COMMAND, ENVIRONMENT, ROOT, run_command
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


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command_line.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"{__version__}\n")


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


PAGE = (ROOT / "docs" / "command-line.md").read_text("utf-8")
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.slow
def test_the_documented_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with the page's files: exit code 0, results on stdout, nothing on stderr."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    sizes, module = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    Path("train.py").write_text(module, "utf-8")
    exec(sizes, {})  # noqa: S102  (the page's own)
    for line in LINES:
        command = line.replace("python -m torchbudget", shlex.join(COMMAND))
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        result, rest = done.stdout, done.stderr
        if " watch " in line:  # stdout is the command's
            result, rest = rest, result
        assert (bool(result), rest) == (True, ""), line
