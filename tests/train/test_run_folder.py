"""The files of a training: whole or not there, and what is damaged is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchbudget.errors import StateError
from torchbudget.train.checkpoint import RunFolder

STATE: dict[str, Any] = {"run": {"weights": torch.arange(300.0)}, "history": [1, 2, 3]}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_what_was_saved_is_read(folder: RunFolder) -> None:
    assert folder.read() is None
    folder.save(STATE)
    torch.testing.assert_close(folder.read(), STATE, rtol=0, atol=0)


def test_a_save_that_fails_leaves_the_file_of_before(folder: RunFolder) -> None:
    folder.save(STATE)
    try:
        raise OSError("an earlier fault, which is over")
    except OSError:
        with pytest.raises(Exception, match="pickle"):
            folder.save({"run": {}, "steps": lambda: 2})
    torch.testing.assert_close(folder.read(), STATE, rtol=0, atol=0)
    assert [path.name for path in folder.path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("leaf", [np.float64(0.1), Path("logs")])
def test_what_cannot_be_loaded_again_is_noticed_when_it_is_saved(
    leaf: Any, folder: RunFolder
) -> None:
    """By its name, and no checkpoint is left that would be found out later."""
    with pytest.raises(StateError, match=r"\['run'\]\['lr'\]\[1\] is a .*(float64|Path)"):
        folder.save({"run": {"lr": [0.1, leaf]}})
    assert folder.read() is None


def test_only_the_first_save_of_a_call_is_loaded_back(folder: RunFolder) -> None:
    """It takes time, and the types of what is saved do not change."""
    folder.save(STATE)
    folder.save({"run": {"lr": np.float64(0.1)}})
    with pytest.raises(StateError, match="damaged, or no checkpoint"):
        folder.read()


def test_a_damaged_checkpoint_is_noticed(folder: RunFolder) -> None:
    """Whichever bit is flipped: an error, or, in what nobody reads, the same state."""
    folder.save(STATE)
    path = folder.path / "last.pt"
    whole = path.read_bytes()
    for place in range(0, len(whole), 17):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        path.write_bytes(damaged)
        try:
            found = folder.read()
        except StateError as error:
            assert "put a whole copy in its place" in str(error)  # noqa: PT017  (either way)
        else:
            torch.testing.assert_close(found, STATE, rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_a_checkpoint_that_was_cut_off_is_noticed(share: float, folder: RunFolder) -> None:
    folder.save(STATE)
    path = folder.path / "last.pt"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(StateError, match=r"last.pt is damaged"):
        folder.read()


def test_another_file_is_no_checkpoint(folder: RunFolder) -> None:
    torch.save({"weights": torch.zeros(2)}, folder.path / "last.pt")
    with pytest.raises(StateError, match="no checkpoint of fit"):
        folder.read()


def test_good_lines_are_kept(folder: RunFolder) -> None:
    """What comes again is dropped, and a line that was cut off; other people's lines stay."""
    for step in (1, 2, 3):
        folder.write_record("step", {"number": step})
    folder.write_record("epoch", {"number": 0})
    path = folder.path / "statistics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "note", "text": "mine"}\n[4]\n{"kind": "step", "num')
    folder.forget_after({"step": 2, "epoch": 0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("number") for line in lines if isinstance(line, dict)] == [1, 2, 0, None]
    assert lines[-1] == [4]
    folder.write_record("step", {"number": 3})
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 3
