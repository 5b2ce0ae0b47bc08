"""The commands of `docs/command-line.md` run, one after another, with the files that it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import COMMAND, ENVIRONMENT, ROOT

PROGRAM = "python -m torchbudget"
PAGE = (ROOT / "docs" / "command-line.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
LINES = [line for block in BLOCKS for line in block.splitlines()]
WRITTEN_BY = {
    "--cost cost.json": next(line for line in LINES if " measure " in line),
    "report run.jsonl": next(line for line in LINES if " watch " in line),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page."""
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("commands")
    sizes, module = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (path / "train.py").write_text(module, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        names: dict[str, object] = {}
        exec(sizes, names)  # noqa: S102  (the page's own)
    lengths = "\n".join(f"{size},text" for size in names["lengths"])  # type: ignore[attr-defined]
    (path / "lengths.csv").write_text(lengths, "utf-8")
    return path


def run(line: str, folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace(PROGRAM, shlex.join(COMMAND))],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result, rest = done.stdout, done.stderr
    if " watch " in line:  # stdout is the command's
        result, rest = rest, result
    assert (bool(result), rest) == (True, "")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(PROGRAM)[2][:40].strip())
@pytest.mark.slow
def test_a_documented_command_runs(line: str, folder: Path) -> None:
    """Exit code 0, results on stdout, nothing on stderr."""
    for reads, writes in WRITTEN_BY.items():
        if reads in line and not (folder / reads.split()[-1]).exists():
            run(writes, folder)
    run(line, folder)
