"""Everything that a run consists of, in one file, so that it goes on exactly."""

from __future__ import annotations

from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchbudget.errors import StateError
from torchbudget.random_state import RandomState
from torchbudget.train.accumulator import GradAccumulator

_VERSION = 1


def run_state(
    model: nn.Module,
    accumulator: GradAccumulator,
    loader: DataLoader[Any],
    batches_done: int | None,
    *,
    epoch: int,
) -> dict[str, Any]:
    """Model, optimizers, schedulers, scaler, accumulator; of each rank, data and generators.

    A collective of the accumulator's ranks.

    Args:
        model: as it is trained.
        accumulator: with its optimizers.
        loader: a `StatefulDataLoader`, or one whose batch sampler or stream has a state.
        batches_done: in the current loop over the loader; `None`: it is over.
        epoch: that this loop draws, or the coming one.
    """
    mine = {
        "data": _data_state(loader, batches_done, epoch),
        "random": asdict(RandomState.take()),
    }
    return {
        "version": _VERSION,
        "model": model.state_dict(),
        "training": accumulator.training_state(),
        "ranks": accumulator.ranks.told(mine),
    }


def _of_rank(state: dict[str, Any], accumulator: GradAccumulator) -> dict[str, Any]:
    ranks = state["ranks"]
    mine: dict[str, Any] = ranks[accumulator.ranks.rank % len(ranks)]
    return mine


def load_run_state(
    state: dict[str, Any], model: nn.Module, accumulator: GradAccumulator, loader: DataLoader[Any]
) -> None:
    """Put a run's state back, but for the random generators: see `load_generators`.

    Raises:
        StateError: it is no such state.
    """
    if state.get("version") != _VERSION:
        raise StateError(f"expected a checkpoint of version {_VERSION}: {sorted(state)}")
    model.load_state_dict(state["model"])
    accumulator.load_training_state(state["training"])
    data = _of_rank(state, accumulator)["data"]
    if "sampler" in data:
        _stateful(loader.batch_sampler).load_state_dict(data["sampler"])
    elif "loader" in data:
        _stateful(loader).load_state_dict(data["loader"])
    elif "dataset" in data:
        _stateful(loader.dataset).load_state_dict(data["dataset"])


def has_state(loader: DataLoader[Any]) -> bool:
    """Whether the loader's position can be saved."""
    tells = _tells_positions(loader.batch_sampler) or _tells_positions(loader.dataset)
    return tells or hasattr(loader, "load_state_dict")


def load_generators(whole: dict[str, Any], accumulator: GradAccumulator) -> None:
    """Go on with the random numbers; behind the beginning of a loop, which draws one itself.

    On another number of ranks they are those of other ranks.
    """
    RandomState(**_of_rank(whole, accumulator)["random"]).restore()


def save(state: Any, path: Path) -> None:
    """Write a file that is there whole, or not at all."""
    beside = path.with_suffix(".part")
    torch.save(state, beside)
    beside.replace(path)


def _data_state(loader: Any, batches_done: int | None, epoch: int) -> dict[str, Any]:
    own = hasattr(loader, "load_state_dict")
    if _tells_positions(loader.batch_sampler):
        state = loader.batch_sampler.state_dict(batches_done=batches_done)
        # Between epochs a loader's own state would begin a loop over what is drawn.
        if not own or batches_done is None or state["epoch"] > epoch:
            return {"sampler": state}
    if batches_done is None and hasattr(loader.dataset, "set_epoch"):
        return {}  # which begins the next one
    if own:
        return {"loader": loader.state_dict()}
    if _tells_positions(loader.dataset):
        return {"dataset": loader.dataset.state_dict(batches_done=batches_done)}
    return {}


def _tells_positions(source: Any) -> bool:
    """Whether it is a sampler or a stream that knows where it stood behind any batch."""
    state_dict = getattr(source, "state_dict", None)
    return state_dict is not None and "batches_done" in signature(state_dict).parameters


def _stateful(source: Any) -> Any:
    if not hasattr(source, "load_state_dict"):
        raise StateError(f"the checkpoint holds a position, but {source!r} cannot load one")
    return source
