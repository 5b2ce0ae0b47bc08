"""Writes docs/frameworks_matrix.md from what the tests of this folder find, when they pass.

Command: PYTHONPATH=. python -m tests.integrations.matrix
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from tests.integrations.cells import CELLS, MATRIX, heading_of, matrix_row

LIBRARIES = ["torch", "torchdata", "accelerate", "lightning", "transformers"]


def cells_found(junit: Path) -> list[list[str]]:
    """Processes, source, workers and row of each cell, as they were recorded, and what came of it.

    Args:
        junit: pytest's own report of its run, in XML.
    """
    found = ElementTree.parse(junit).getroot().iter("property")  # noqa: S314 (written just now)
    return [[*one.attrib["name"].split(", ", 3), one.attrib["value"]] for one in found]


def text_of(found: list[list[str]]) -> str:
    """The matrix: its rows, of each number of processes.

    Raises:
        SystemExit: some of a row's cells were not found.
    """
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    heads = " | ".join(f"{source}, {workers} workers" for source, workers in CELLS)
    text = f"Measured with {versions}.\n\n| | {heads} |\n|{'---|' * (1 + len(CELLS))}\n"
    for processes in unique(one[0] for one in found):
        text += heading_of(int(processes))
        of_these = [one for one in found if one[0] == processes]
        for row in unique(one[3] for one in of_these):
            came = {(one[1], int(one[2])): one[4] for one in of_these if one[3] == row}
            if {*came} != {*CELLS}:
                raise SystemExit(f"{row}: only {sorted(came)} were found")
            text += matrix_row(row, [came[cell] for cell in CELLS])
    return text


def unique(names: Iterable[str]) -> list[str]:
    """Each once, in the order of the first ones."""
    return [*dict.fromkeys(names)]


def main() -> None:
    """Run the tests, and write what they found."""
    with TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        selected = ["-m", "slow or not slow", "-n", "0", f"--junitxml={junit}"]
        folders = [Path(__file__).parent]
        subprocess.run([sys.executable, "-m", "pytest", *selected, *folders], check=False)
        found = sorted(cells_found(junit), key=lambda one: int(one[0]))
    MATRIX.write_text(text_of(found))


if __name__ == "__main__":
    main()
