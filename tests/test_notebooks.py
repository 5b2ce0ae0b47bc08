"""Notebooks of `examples/` are made of pages whose code the tests run."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT

PAGES = ("quickstart", "graphs", "speech")


@pytest.fixture(scope="module")
def made() -> Any:
    """The script that makes them."""
    pytest.importorskip("jupytext")
    return runpy.run_path(str(ROOT / "docs" / "notebooks.py"))


def test_a_notebook_is_its_page(made: Any) -> None:
    """After a change of a page, `python docs/notebooks.py` writes its notebook anew."""
    assert {*made["NOTEBOOKS"]} == {*PAGES}
    names = {path.stem for path in (ROOT / "examples").glob("*.ipynb")}
    assert names == {*made["NOTEBOOKS"].values()}
    for page, name in made["NOTEBOOKS"].items():
        written = (ROOT / "examples" / f"{name}.ipynb").read_text("utf-8")
        assert written == made["notebook_of"](page), name


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES)
def test_a_notebook_runs(made: Any, page: str, tmp_path: Path) -> None:
    """In a kernel; its budgets are of the step, or count the kernel."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    found = nbformat.reads(made["notebook_of"](page), 4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(found, timeout=240, resources=place).execute()
    assert all(cell.get("execution_count") for cell in found.cells if cell.cell_type == "code")
