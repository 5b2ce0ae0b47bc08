"""Losses of power: at each point of what a training writes, it goes on as if nothing had been."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from tests.train.test_faults import Small, Uninterrupted, at_step
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step

Content = Mapping[str, bytes]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    return Uninterrupted(tmp_path_factory.mktemp("uninterrupted"))


class Disk:
    """What a disk may have when the power goes, at each point of what is written to a folder.

    A mock of the disk, since no test can cut its own power. What was synced is there, as what the
    folder has at the beginning. Of what was not, all, half or nothing may be: the names of files,
    and apart from them their contents.

    Args:
        folder: that is written to.
        steps: in checkpoints that are complete.
    """

    def __init__(self, folder: Path, steps: int = 0) -> None:
        self.folder = folder
        self.cuts: dict[frozenset[tuple[str, bytes]], int] = {}  # and how many steps must be there
        self.steps = steps
        self._seen: dict[int, bytes] = {}
        self._names = self._look()  # that were synced
        self._synced = self._seen.copy()  # contents, by inode

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


@pytest.fixture
def disk_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, int], Disk]]:
    """Makes a disk that sees the syncs and renamings of a folder from then on."""

    def watched(folder: Path, steps: int) -> Disk:
        disk, replace = Disk(folder, steps), Path.replace

        def replacing(source: Path, target: Path) -> Path:
            disk.cut()
            replaced = replace(source, target)
            disk.cut()
            return replaced

        monkeypatch.setattr(os, "fsync", disk.sync)
        monkeypatch.setattr(Path, "replace", replacing)
        return disk

    yield watched
    monkeypatch.undo()


def check_each_cut(disk: Disk, uninterrupted: Uninterrupted, folder: Path) -> None:
    """Whatever the disk may have: the training goes on from it as if nothing had been."""
    for number, (content, steps) in enumerate(disk.cuts.items()):
        where = folder / str(number)
        where.mkdir()
        for name, data in content:
            (where / name).write_bytes(data)
        if steps:
            saved = torch.load(where / "last.pt", weights_only=True)
            assert saved["run"]["training"]["accumulator"]["steps"] >= steps
        later = Small()
        later.fit(folder=where)
        uninterrupted.check(later, where)


@pytest.mark.slow
def test_no_loss_of_power_harms(
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    disk_of: Callable[[Path, int], Disk],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between any two writes, syncs and renamings: the training goes on as if nothing had been.

    No step is lost of which a checkpoint was complete.
    """
    folder = tmp_path / "cut"
    folder.mkdir()
    disk = disk_of(folder, 0)

    def written(record: Step | Epoch) -> None:
        disk.cut()
        disk.steps = record.number - 1 if isinstance(record, Step) else disk.steps

    training = Small()
    training.fit(folder=folder, callbacks=[written])
    monkeypatch.undo()
    uninterrupted.check(training, folder)
    assert len(disk.cuts) > 30
    check_each_cut(disk, uninterrupted, tmp_path)


@pytest.mark.slow
def test_no_loss_of_power_harms_a_training_that_goes_on(
    uninterrupted: Uninterrupted,
    tmp_path: Path,
    disk_of: Callable[[Path, int], Disk],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it drops the lines of steps that come again, and the half of one that was cut off."""
    folder, steps = tmp_path / "cut", 2
    training = Small()
    with pytest.raises(ZeroDivisionError):
        training.fit(
            folder=folder,
            checkpoint_steps=steps,
            callbacks=[at_step(steps + 1, lambda: 1 // 0)],
        )
    with (folder / "statistics.jsonl").open("a") as file:
        file.write('{"kind": "step", "num')
    disk = disk_of(folder, steps)
    disk.cut()
    with pytest.raises(ZeroDivisionError):
        Small().fit(folder=folder, callbacks=[lambda _: disk.cut() or 1 // 0])
    monkeypatch.undo()
    assert len(disk.cuts) > 3
    check_each_cut(disk, uninterrupted, tmp_path)


def test_a_new_folder_is_on_the_disk_before_a_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a loss of power would take it away, and all that is in it."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    folder = tmp_path / "runs" / "of today" / "first"
    Small().fit(folder=folder, epochs=1)
    parents = [path.stat().st_ino for path in (tmp_path, *folder.parents[:2])]
    before_a_file = synced[: synced.index(folder.stat().st_ino)]
    assert set(parents) <= set(before_a_file)
