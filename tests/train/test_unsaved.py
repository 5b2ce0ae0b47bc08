"""What a training changes is in its checkpoints, or is refused or named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel

from tests.train.test_fit import Training, assert_equal, loss_of
from torchbudget import GradAccumulator, fit
from torchbudget.errors import OptionError, UnsavedStateWarning
from torchbudget.train.fit import Epoch


def test_all_that_is_trained_is_in_the_model(tmp_path: Path) -> None:
    """A head of the criterion's own would begin anew, with the optimizer's state of the old one."""
    training, scale = Training(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*training.model.parameters(), scale], lr=0.1)
    accumulator = GradAccumulator(optimizer, training.model, steps=training.sampler)

    def run(folder: Path | None) -> list[Epoch]:
        return fit(
            training.model,
            training.loader,
            lambda model, batch: loss_of(model, batch) * scale.sum(),
            accumulator,
            epochs=1,
            folder=folder,
        )

    with pytest.raises(OptionError, match=r"train 1 parameters, the first of shape \(2,\)"):
        run(tmp_path)
    assert len(run(None)) == 1


def average(training: Training) -> Callable[[Any], None]:
    averaged = AveragedModel(training.model)
    return lambda _: averaged.update_parameters(training.model)


def schedule(training: Training) -> Callable[[Any], None]:
    scheduler = StepLR(training.optimizer, 2)
    return lambda record: isinstance(record, Epoch) and scheduler.step()


def plateau(training: Training) -> Callable[[Any], None]:
    scheduler = ReduceLROnPlateau(training.optimizer)
    return lambda record: isinstance(record, Epoch) and scheduler.step(record.loss)


def centre(training: Training) -> Callable[[Any], None]:
    module = nn.BatchNorm1d(2)
    return lambda _: module(torch.ones(3, 2)) is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (average, "AveragedModel, .*Linear"),
        (schedule, "StepLR"),
        (plateau, "ReduceLROnPlateau"),
        (centre, "BatchNorm1d"),
    ],
)
def test_what_changes_and_is_not_saved_is_named_once(
    make: Callable[[Training], Callable[[Any], None]], name: str, tmp_path: Path
) -> None:
    """A function without a state changes a module or a scheduler, which would begin anew."""
    training = Training()
    with pytest.warns(UnsavedStateWarning, match=f"^{name} changes in the training") as caught:
        training.fit(epochs=2, folder=tmp_path, callbacks=[make(training)])
    assert len(caught) == 1
    assert caught[0].filename == training.fit.__code__.co_filename
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Training()
        again.fit(epochs=1, callbacks=[make(again)])  # without files nothing goes on


def test_what_is_saved_or_does_not_change_is_not_named(tmp_path: Path) -> None:
    """A teacher, a scheduler of the accumulator's, and what a callback's own state has."""
    training = Training()
    teacher, weights = nn.Linear(16, 2), nn.Embedding(3, 2)
    weights.weight = training.model.embed.weight  # shared with the model
    [scheduler] = training.accumulator.optimizers.schedulers
    averaged = AveragedModel(training.model)

    class Saved:
        def __call__(self, _: object) -> None:
            averaged.update_parameters(training.model)

        def state_dict(self) -> dict[str, Any]:
            return averaged.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            averaged.load_state_dict(state)

    def watch(_: object) -> None:
        teacher(weights.weight[:1])
        scheduler.get_last_lr()

    training.fit(epochs=2, folder=tmp_path, callbacks=[Saved(), watch])


def test_what_a_callback_has_unfrozen_stays_so(tmp_path: Path) -> None:
    """In the call that goes on; what the user freezes between two calls, too."""

    def train(epochs: int, folder: Path, *, frozen: bool = True) -> Training:
        torch.manual_seed(3)
        training = Training()
        training.model.embed.requires_grad_(not frozen)

        def unfreeze(record: object) -> None:
            if isinstance(record, Epoch) and record.number == 0:
                training.model.embed.requires_grad_(True)

        training.fit(epochs=epochs, folder=folder, callbacks=[unfreeze] if frozen else [])
        return training

    whole = train(3, tmp_path / "whole")
    for epochs in (1, 2, 3):
        part = train(epochs, tmp_path / "part")
    assert_equal(part.model, whole.model)
    train(1, tmp_path / "stages", frozen=False)
    later = Training()
    later.model.embed.requires_grad_(False)
    before = later.model.embed.weight
    later.fit(epochs=2, folder=tmp_path / "stages")
    assert not before.requires_grad
