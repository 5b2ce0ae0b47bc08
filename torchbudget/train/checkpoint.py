"""Everything that a run consists of, saved in one file, from which it goes on exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchbudget.errors import StateError, StateMismatchError
from torchbudget.protocols import HasEpochs, ResumableSource, Stateful
from torchbudget.random_state import RandomState
from torchbudget.train.accumulator import GradAccumulator

_VERSION: Final = 3


def run_state(
    model: nn.Module,
    accumulator: GradAccumulator,
    loader: DataLoader[Any],
    *,
    is_over: bool,
    generators: Sequence[torch.Generator] = (),
) -> dict[str, Any]:
    """Model, optimizers, schedulers, scaler, accumulator; of each rank, data and generators.

    A collective of the accumulator's ranks.

    Args:
        model: as it is trained.
        accumulator: with its optimizers.
        loader: a `StatefulDataLoader`, or one whose batch sampler or stream is a `ResumableSource`.
        is_over: the loop over the loader is over, on this rank.
        generators: that loaders draw from.
    """
    mine = {
        "data": _data_state(loader, is_over=is_over),
        "is_over": is_over,
        "random": asdict(RandomState.take()),
        "generators": [generator.get_state() for generator in generators],
    }
    return {
        "version": _VERSION,
        "model": model.state_dict(),
        "training": accumulator.training_state(),
        "ranks": accumulator.ranks.gather_objects(mine),
    }


def load_run_state(
    state: dict[str, Any], model: nn.Module, accumulator: GradAccumulator, loader: DataLoader[Any]
) -> None:
    """Load a run's state, except for the random generators: see `restore_generators`.

    Raises:
        StateError: it is not the state of a run.
        StateMismatchError: it is of another version, or of another number of ranks that were at
            different places of the epoch.
    """
    if state.get("version") != _VERSION:
        raise StateMismatchError(
            f"the checkpoint has version {state.get('version')!r}, this torchbudget reads "
            f"{_VERSION}: go on with the torchbudget that wrote it, or use another folder"
        )
    _check_places(state["ranks"], len(accumulator.ranks))
    model.load_state_dict(state["model"])
    accumulator.load_training_state(state["training"])
    sampler, dataset = _sources(loader)
    sources = {"sampler": sampler, "loader": loader, "dataset": dataset}
    for name, position in _of_this_rank(state, accumulator)["data"].items():
        source: Any = sources[name]
        if not isinstance(source, Stateful):
            raise StateError(f"the checkpoint has a position, but {source!r} cannot load one")
        source.load_state_dict(position)


def _check_places(saved: list[dict[str, Any]], ranks: int) -> None:
    """Raise where what is left cannot be shared out, since no place stands for all ranks'.

    The position of a `StatefulDataLoader` is not compared, which has more than a place in it.
    """
    places = [(one["is_over"], {**one["data"], "loader": None}) for one in saved]
    if len(saved) != ranks and any(place != places[0] for place in places):
        raise StateMismatchError(
            f"the {len(saved)} ranks of the checkpoint were at different places of the epoch, as "
            f"where steps end by samples= or weight=, so that {ranks} ranks would leave out and "
            f"repeat samples: go on with {len(saved)} ranks"
        )


def is_over(
    state: dict[str, Any], accumulator: GradAccumulator, loader: DataLoader[Any], *, epoch: int
) -> bool:
    """Whether this rank has no batches left in the epoch in which a loaded state was saved."""
    return _of_this_rank(state, accumulator)["is_over"] or any(
        isinstance(source, ResumableSource) and source.epoch > epoch for source in _sources(loader)
    )


def restore_generators(
    state: dict[str, Any],
    accumulator: GradAccumulator,
    generators: Sequence[torch.Generator] = (),
) -> None:
    """Set the random generators to a run's state; on more ranks than saved it, ranks share one.

    Within an epoch this comes after `iter(loader)`, which may draw numbers itself.

    Raises:
        StateError: the loaders have other generators than those that were saved.
    """
    mine = _of_this_rank(state, accumulator)
    if len(generators) != len(mine["generators"]):
        raise StateError(
            f"the checkpoint has the states of {len(mine['generators'])} generators of the "
            f"loaders, which have {len(generators)}; pass the generator= that they had"
        )
    for generator, its_state in zip(generators, mine["generators"], strict=True):
        generator.set_state(its_state)
    RandomState(**mine["random"]).restore()


def has_position(loader: DataLoader[Any]) -> bool:
    """Whether the loader's position within an epoch can be saved."""
    return isinstance(loader, Stateful) or any(
        isinstance(source, ResumableSource) for source in _sources(loader)
    )


def _sources(loader: Any) -> tuple[Any, Any]:
    """The batch sampler and the data set of a loader of any class, `None` where it has none."""
    return getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)


def _of_this_rank(state: dict[str, Any], accumulator: GradAccumulator) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = state["ranks"]
    return ranks[accumulator.ranks.rank % len(ranks)]


def _data_state(loader: Any, *, is_over: bool) -> dict[str, Any]:
    """The position, under the name of what has it; empty where the next epoch just begins."""
    sampler, dataset = _sources(loader)
    if isinstance(loader, Stateful):
        starts_epochs = is_over and isinstance(dataset, HasEpochs)  # set_epoch begins the next one
        return {} if starts_epochs else {"loader": loader.state_dict()}
    sources = {"sampler": sampler, "dataset": dataset}
    return {
        name: source.state_dict()
        for name, source in sources.items()
        if isinstance(source, ResumableSource)
    }
