"""The folder of a training, and everything that a checkpoint of it consists of.

Each file is there as a whole or not at all, after a loss of power too.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchbudget.errors import StateError, StateMismatchError
from torchbudget.files import write_whole
from torchbudget.protocols import ResumableSource
from torchbudget.random_state import RandomState
from torchbudget.train.accumulator import GradAccumulator
from torchbudget.train.loop import sources_of

_VERSION: Final = 4


class RunFolder:
    """`last.pt`, `best.pt` and `statistics.jsonl`, which the first rank writes.

    Args:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._statistics = path / "statistics.jsonl"
        self._loads = False  # whether a checkpoint was loaded back

    def read(self) -> dict[str, Any] | None:
        """The last checkpoint; `None` where there is none.

        Raises:
            StateError: it is damaged, or no checkpoint of `fit`.
            OSError: it cannot be read.
        """
        path = self.path / "last.pt"
        if not path.exists():
            return None
        try:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()  # torch.load does not compare the check sums
            if damaged is not None:
                raise zipfile.BadZipFile(f"the check sum of {damaged} is wrong")
            loaded: dict[str, Any] = torch.load(path, "cpu", weights_only=True)
            if loaded["version"] != _VERSION:
                raise ValueError(f"version {loaded['version']}, not {_VERSION}")
        except (OSError, MemoryError):
            raise  # the file may be whole
        except Exception as error:  # a damaged pickle raises anything
            raise StateError(
                f"{path} is damaged, or no checkpoint of this fit ({type(error).__name__}: "
                f"{error}); put a whole copy in its place, or remove it to train from the beginning"
            ) from error
        return loaded

    def save(self, state: Mapping[str, Any]) -> None:
        """Write `last.pt`, after all statistics; the first time, check that it can be loaded.

        Raises:
            StateError: the state can be saved, but not be loaded.
        """
        if self._statistics.exists():  # a checkpoint must not reach the disk before their lines
            with self._statistics.open("rb") as file:
                os.fsync(file.fileno())
        whole = {"version": _VERSION, "id": secrets.token_hex(8), **state}
        check = (lambda _: None) if self._loads else _check_loads
        self._write("last.pt", lambda file: torch.save(whole, file), check=check)
        self._loads = True

    def save_best(self, state: Mapping[str, Any]) -> None:
        """Write `best.pt`: a model's parameters and buffers."""
        self._write("best.pt", lambda file: torch.save(state, file))

    def _write(self, name: str, write: Callable[[IO[bytes]], object], **options: Any) -> None:
        path = self.path / name
        with _naming(path):
            write_whole(path, write, **options)

    def write_record(self, kind: str, record: Mapping[str, Any]) -> None:
        """Append a line to the statistics; numbers that are not finite are no JSON, but null."""
        finite = {
            name: None if isinstance(one, float) and not math.isfinite(one) else one
            for name, one in record.items()
        }
        line = json.dumps({"kind": kind, **finite}, allow_nan=False) + "\n"
        path = self._statistics
        with _naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line)

    def forget_after(self, last: Mapping[str, int]) -> None:
        """Drop the lines of what will come again, and lines that a fault has cut off.

        Args:
            last: for each kind, the number of the last record that is kept.
        """
        if not self._statistics.exists():
            return
        text = self._statistics.read_text("utf-8", errors="replace")
        kept = "".join(f"{line}\n" for line in text.split("\n") if _is_kept(line, last))
        if kept != text:
            self._write(self._statistics.name, lambda file: file.write(kept.encode()))


def _is_kept(line: str, last: Mapping[str, int]) -> bool:
    try:
        record = json.loads(line)
        return bool(record["number"] <= last[record["kind"]])
    except ValueError:
        return False
    except (KeyError, TypeError):  # not of a training
        return True


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Inside, an error of the system names the file, and says what is left."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises one of its own instead
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(
            cause.errno,
            f"cannot be written ({cause.strerror}); the checkpoint before is whole: make room, and "
            "call fit again with this folder, which goes on from there",
            str(path),
        ) from error


def _check_loads(path: Path) -> None:
    try:
        torch.load(path, "cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise StateError(
            "the checkpoint could not be loaded again: the states of callbacks and optimizers must "
            f"be tensors, numbers and texts alone. {error}"
        ) from error


def run_state(
    model: nn.Module,
    accumulator: GradAccumulator,
    loader: DataLoader[Any],
    *,
    is_over: bool,
    seed: int,
    generators: Sequence[torch.Generator],
) -> dict[str, Any]:
    """Model, optimizers, schedulers, scaler, accumulator; of each rank, data and generators.

    A collective of the accumulator's ranks.

    Args:
        model: as it is trained.
        accumulator: with its optimizers.
        loader: its batch sampler or stream may be a `ResumableSource`.
        is_over: the loop over the loader is over, on this rank.
        seed: of this rank's workers.
        generators: that loaders draw from.
    """
    mine = {
        "data": {name: source.state_dict() for name, source in _resumable(loader).items()},
        "is_over": is_over,
        "seed": seed,
        "random": asdict(RandomState.take()),
        "generators": [generator.get_state() for generator in generators],
    }
    return {
        "model": model.state_dict(),
        "training": accumulator.training_state(),
        "ranks": accumulator.ranks.gather_objects(mine),
    }


def load_run_state(
    state: dict[str, Any], model: nn.Module, accumulator: GradAccumulator, loader: DataLoader[Any]
) -> dict[str, Any]:
    """Load a run's state, except for the random generators: see `restore_generators`.

    Returns:
        This rank's part of the state; on more ranks than saved it, ranks share one.

    Raises:
        StateError: the loader cannot load a position.
        StateMismatchError: it is of another number of ranks that were at different places of the
            epoch.
    """
    saved = state["ranks"]
    places = [(one["is_over"], one["data"]) for one in saved]
    if len(saved) != len(accumulator.ranks) and any(place != places[0] for place in places):
        raise StateMismatchError(
            f"the {len(saved)} ranks of the checkpoint were at different places of the epoch, as "
            f"where steps end by samples= or weight=, so that {len(accumulator.ranks)} ranks would "
            f"leave out and repeat samples: go on with {len(saved)} ranks"
        )
    model.load_state_dict(state["model"])
    accumulator.load_training_state(state["training"])
    mine: dict[str, Any] = saved[accumulator.ranks.rank % len(saved)]
    for name, position in mine["data"].items():
        source = _resumable(loader).get(name)
        if source is None:
            raise StateError(f"the checkpoint has a position, but the {name} cannot load one")
        source.load_state_dict(position)
    return mine


def restore_generators(mine: dict[str, Any], generators: Sequence[torch.Generator]) -> None:
    """Set the random generators to a rank's part of a run's state.

    Within an epoch this comes after `iter(loader)`, which may draw numbers itself.

    Raises:
        StateError: the loaders have other generators than those that were saved.
    """
    if len(generators) != len(mine["generators"]):
        raise StateError(
            f"the checkpoint has the states of {len(mine['generators'])} generators of the "
            f"loaders, which have {len(generators)}; pass the generator= that they had"
        )
    for generator, its_state in zip(generators, mine["generators"], strict=True):
        generator.set_state(its_state)
    RandomState(**mine["random"]).restore()


def is_over(mine: dict[str, Any], loader: DataLoader[Any], *, epoch: int) -> bool:
    """Whether a rank has no batches left in the epoch in which its state was saved."""
    return mine["is_over"] or any(one.epoch > epoch for one in _resumable(loader).values())


def has_position(loader: DataLoader[Any]) -> bool:
    """Whether the loader's position within an epoch can be saved."""
    return bool(_resumable(loader))


def _resumable(loader: DataLoader[Any]) -> dict[str, ResumableSource]:
    """The sources of a loader that know their position, by the name of its attribute."""
    sources = sources_of(loader).items()
    return {name: source for name, source in sources if isinstance(source, ResumableSource)}
