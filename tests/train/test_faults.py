"""Kills, files that cannot be written, and losses of power: a training goes on as if without.

Nothing is lost that a checkpoint was complete of; where a training cannot go on it says so, and it
does not hang.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_scripts import script
from tests.support.ranks import run_ranks
from tests.support.trainings import (
    KINDS,
    BrokenOff,
    Training,
    assert_equal,
    at_step,
    statistics,
)
from torchbudget.errors import StateError
from torchbudget.train.fit import Epoch, RunFolder
from torchbudget.train.step import Step


def facts_of(epochs: list[Epoch] | None) -> list[Any]:
    assert epochs is not None
    return [(e.number, e.loss, e.validation, e.steps, e.skipped) for e in epochs]


class Uninterrupted:
    """A training without any fault, which others are compared with."""

    def __init__(self, folder: Path, *kind: Any, **options: Any) -> None:
        self.folder, self.make = folder, partial(Training, *kind, **options)
        self.training = self.make()
        self.epochs = facts_of(self.training.fit_until(0, folder))

    def check_what_goes_on(self, folder: Path) -> None:
        """A training that goes on in a folder is the same, with all its files, bit for bit."""
        later = self.make()
        assert facts_of(later.fit_until(0, folder)) == self.epochs
        assert_equal(later.model, self.training.model)
        if self.epochs:
            later.check(self.training, folder, self.folder)

    def check_broken_off(self, folder: Path, *breaks: int) -> None:
        """It is, where the training was broken off after numbers of records, again and again."""
        for records in breaks:
            self.make().fit_until(records, folder)
        self.check_what_goes_on(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


# ---------------------------------------------------------------------- broken off


@pytest.mark.parametrize(("free", "end"), [(False, None), (True, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_off_and_resumed_is_uninterrupted(
    kind: str, free: bool, end: int | None, tmp_path: Path
) -> None:
    """Model, average, schedules, statistics, best model and epochs, bit for bit.

    Within an epoch and at its end, before the first checkpoint too; dropout draws its numbers. A
    callback ends some for good, in step 4. `tests/fuzz.py` has random places and options.
    """
    whole = Uninterrupted(tmp_path / "whole", kind, end, free=free)
    whole.check_broken_off(tmp_path / "part", 1, 3, 4, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's own
@pytest.mark.parametrize(
    ("kind", "persistent", "stateful"),
    [
        ("sampler", False, False),
        ("sampler", True, True),
        ("stream", False, True),
        ("shuffled", False, False),
        ("shuffled", True, False),
    ],
)
def test_workers_are_seeded_as_in_the_uninterrupted_training(
    kind: str, persistent: bool, stateful: bool, tmp_path: Path
) -> None:
    """Starting them draws no number that the uninterrupted training would not have drawn."""
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    if stateful:
        torchdata = pytest.importorskip("torchdata.stateful_dataloader")
        options["loader"] = torchdata.StatefulDataLoader
    whole = Uninterrupted(tmp_path / "whole", kind, **options)
    whole.check_broken_off(tmp_path / "part", 3, 4)


# ---------------------------------------------------------------------- processes


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_that_are_killed(tmp_path: Path) -> None:
    """One after another: in a step, in the validation, while a checkpoint is written.

    The other rank ends within a minute, with an error. No step is lost that a checkpoint was
    complete of, and in the end both have taken the steps of ranks that were not killed.
    """
    files, name = tmp_path / "files", script("fitting.killed")
    kills = [("step", 1, 1), ("evaluation", 1, 3), ("write", 0, 3)]
    for fault, victim, complete in kills:
        found = run_ranks(name, tmp_path, 2, files, fault, victim, killed=[victim])
        _, error, seconds = found[1 - victim]
        assert error[0] in ("RuntimeError", "DistBackendError", "RankError")
        assert seconds < 60
        saved = torch.load(files / "last.pt", weights_only=True)
        assert saved["training"]["accumulator"]["steps"] == complete
    first, second = run_ranks(name, tmp_path, 2, files, "none", 0)
    whole, _ = run_ranks(name, tmp_path, 2, tmp_path / "whole", "none", 0)
    assert first[:2] == second[:2] == [whole[0], []]
    assert statistics(files) == statistics(tmp_path / "whole")


def test_a_file_that_may_not_grow(uninterrupted: Uninterrupted, tmp_path: Path) -> None:
    """As on a full disk: the error names the file, and what was saved before is whole."""
    limits, start = resource.getrlimit(resource.RLIMIT_FSIZE), time.monotonic()
    fill = at_step(4, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1])))
    try:
        match = r"last\.pt cannot be written .*File too large.*is intact: free disk space"
        with pytest.raises(OSError, match=match):
            Training().fit(fill, folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert time.monotonic() - start < 60  # nobody waits for a hang
    uninterrupted.check_what_goes_on(tmp_path)


# ---------------------------------------------------------------------- losses of power


class Disk:
    """What a disk may have when the power goes, at each point of what is written to a folder.

    A mock of the disk, since no test can cut its own power. What was synced is there, as what the
    folder has at the beginning. Of what was not, all, half or nothing may be: the names of files,
    and apart from them their contents.

    Args:
        folder: that is written to.
        steps: in checkpoints that are complete.
    """

    def __init__(self, folder: Path, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cuts: dict[frozenset[tuple[str, bytes]], int] = {}  # and how many steps must be there
        self.steps = steps
        self._seen: dict[int, bytes] = {}
        self._names = self._look()  # that were synced
        self._synced = self._seen.copy()  # contents, by inode
        replace = Path.replace

        def replacing(source: Path, target: Path) -> Path:
            self.cut()
            replaced = replace(source, target)
            self.cut()
            return replaced

        monkeypatch.setattr(os, "fsync", self.sync)
        monkeypatch.setattr(Path, "replace", replacing)

    def sync(self, descriptor: int) -> None:
        """As `os.fsync`."""
        self.cut()
        inode = os.fstat(descriptor).st_ino
        if inode == self.folder.stat().st_ino:
            self._names = self._look()
        elif inode in self._seen:
            self._synced[inode] = self._seen[inode]
        self.cut()

    def cut(self) -> None:
        """Note what may be there now."""
        for names in (self._names, self._look()):
            for share in (0.0, 0.5, 1.0):
                content = {name: self._content(inode, share) for name, inode in names.items()}
                self.cuts[frozenset(content.items())] = self.steps  # the most there must be

    def _look(self) -> dict[str, int]:
        names = {}
        for path in self.folder.iterdir():
            names[path.name] = inode = path.stat().st_ino
            self._seen[inode] = path.read_bytes()
        return names

    def _content(self, inode: int, share: float) -> bytes:
        synced, seen = self._synced.get(inode, b""), self._seen[inode]
        return seen[: len(synced) + int(share * (len(seen) - len(synced)))]


@pytest.mark.slow
@pytest.mark.parametrize("begun", [0, 2])
def test_no_loss_of_power_harms(
    begun: int, uninterrupted: Uninterrupted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two writes, syncs and renamings: the training goes on as if nothing had been.

    No step is lost of which a checkpoint was complete; also of a training that was begun, while it
    drops the lines of steps that come again, and the half of one that was cut off.
    """
    folder = tmp_path / "cut"
    folder.mkdir()
    if begun:
        Training().fit_until(begun + 1, folder, checkpoint_steps=begun)
        with (folder / "statistics.jsonl").open("a") as file:
            file.write('{"kind": "step", "num')
    disk = Disk(folder, begun, monkeypatch)
    disk.cut()

    def written(record: Step | Epoch) -> None:
        disk.cut()
        disk.steps = record.number - 1 if isinstance(record, Step) else disk.steps
        if begun:
            raise BrokenOff

    with suppress(BrokenOff):
        Training().fit(written, folder=folder)
    monkeypatch.undo()
    assert len(disk.cuts) > (3 if begun else 30)
    for number, (content, steps) in enumerate(disk.cuts.items()):
        where = tmp_path / str(number)
        where.mkdir()
        for name, data in content:
            (where / name).write_bytes(data)
        if steps:
            saved = torch.load(where / "last.pt", weights_only=True)
            assert saved["training"]["accumulator"]["steps"] >= steps
        uninterrupted.check_what_goes_on(where)


def test_a_new_folder_is_on_the_disk_before_a_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a loss of power would take it away, and all that is in it."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    folder = tmp_path / "runs" / "of today" / "first"
    Training().fit(folder=folder, epochs=1)
    parents = [path.stat().st_ino for path in (tmp_path, *folder.parents[:2])]
    before_a_file = synced[: synced.index(folder.stat().st_ino)]
    assert set(parents) <= set(before_a_file)


# ---------------------------------------------------------------------- files

STATE: dict[str, Any] = {"model": {"weight": torch.arange(9.0)}, "ranks": [{"epoch": 3}]}


@pytest.fixture
def files(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def test_a_damaged_checkpoint_is_noticed(files: RunFolder) -> None:
    """Whichever bit is flipped, or where it is cut off: an error, or the same state."""
    assert files.read() is None
    files.save(STATE)
    path = files.path / "last.pt"
    whole, expected = path.read_bytes(), STATE
    damaged = [whole[: int(share * len(whole))] for share in (0.0, 0.3, 0.7, 0.99)]
    damaged += [
        whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :]
        for place in range(0, len(whole), 41)
    ]
    for data in damaged:
        path.write_bytes(data)
        try:
            found = files.read()
        except StateError as error:
            assert "restore a copy of it" in str(error)  # noqa: PT017  (either way)
        else:
            found = found or {}
            assert torch.equal(found["model"]["weight"], expected["model"]["weight"])
            assert found["ranks"] == expected["ranks"]
    for other in ({"weights": torch.zeros(2)}, {"version": 9}):
        torch.save(other, path)
        with pytest.raises(StateError, match="belongs to another fit"):
            files.read()


def test_good_lines_are_kept(files: RunFolder) -> None:
    """What comes again is dropped, and a line that was cut off; other people's lines stay.

    JSON knows neither NaN nor infinity; a skipped step may have both.
    """
    for step in (1, 2, 3):
        files.write_record("step", {"number": step, "loss": math.nan, "norm": math.inf})
    files.write_record("epoch", {"number": 0})
    path = files.path / "statistics.jsonl"
    with path.open("a") as file:
        file.write('{"kind": "note", "text": "mine"}\n[4]\n{"kind": "step", "num')
    files.forget_after({"step": 2, "epoch": 0})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[0] == {"kind": "step", "number": 1, "loss": None, "norm": None}
    assert [one.get("number") for one in lines if isinstance(one, Mapping)] == [1, 2, 0, None]
    assert lines[-1] == [4]
