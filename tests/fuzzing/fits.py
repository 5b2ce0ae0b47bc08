"""Trainings with any loader and options that fail or are killed anywhere, and go on.

What must hold: model, average, optimizer, statistics, the best model and the epochs are those of
the training that was not interrupted, bit for bit.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.fuzzing.faults import FUSE, Fault, Killed, check_is_made
from tests.support.trainings import (
    KINDS,
    POSITIONED,
    Training,
    assert_equal,
    loss_of,
    statistics,
    tokens,
)
from torchbudget import GradAccumulator, PadCollate, fit
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step

# And within how many calls a fault comes there.
PLACES = {"record": 9, "criterion": 20, "collate": 20, "write": 30, "optimizer": 9}
STARTS = 6


class FusedCollate(PadCollate):
    def __call__(self, samples: list[Any]) -> Any:
        FUSE()
        return super().__call__(samples)


class Options:
    """What a training is made with, drawn by `chance` alone."""

    def __init__(self, chance: random.Random) -> None:
        self.kind = chance.choice(KINDS[:5])
        self.end = chance.choice([None, None, chance.randint(1, 6)])
        self.epochs = chance.randint(1, 3)
        self.steps = chance.choice([1, 2, 3])
        self.max_norm = chance.choice([None, 0.5])
        self.scales, self.schedules = chance.random() < 0.2, chance.random() < 0.5
        self.mean, self.plateau = chance.random() < 0.3, chance.random() < 0.3
        self.validates = chance.random() < 0.7
        self.patience = chance.choice([None, 1, 2]) if self.validates else None
        self.checkpoint_steps = chance.randint(1, 3) if self.kind in POSITIONED else None


class Fitted(Training):
    """A training with all of these options."""

    def __init__(self, options: Options, *, place: str | None = None) -> None:
        super().__init__(options.kind, options.end)
        self.options, self.place = options, place
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.8)
        self.accumulator = GradAccumulator(
            self.optimizer,
            self.model,
            steps=self.sampler if options.kind == "sampler" else options.steps,
            mean=options.mean,
            max_norm=options.max_norm,
            scaler=torch.amp.GradScaler("cpu", init_scale=2.0**6) if options.scales else None,
            scheduler=schedule if options.schedules else (),
        )
        if place == "collate" and not options.kind.startswith("stream"):
            self.loader.collate_fn = FusedCollate()
        if place == "optimizer":
            self.optimizer.register_step_post_hook(lambda *_: FUSE())

    def criterion(self, model: nn.Module, batch: Any) -> Tensor:
        if self.place == "criterion":
            FUSE()
        loss = loss_of(model, batch)
        return loss / batch.num_tokens if self.options.mean else loss

    def record(self, _: Step | Epoch) -> None:
        if self.place == "record":
            FUSE()

    def train(self, folder: Path, *callbacks: Any) -> list[Epoch]:
        """Go on in a folder; the epochs."""
        options = self.options
        validates = options.validates or options.plateau
        return fit(
            self.model,
            self.loader,
            self.criterion,
            self.accumulator,
            epochs=options.epochs,
            weight=tokens,
            validation=self.validation if validates else None,
            patience=options.patience,
            folder=folder,
            checkpoint_steps=options.checkpoint_steps,
            callbacks=[
                self.averaging.update,
                *([self.plateau] if options.plateau else []),
                self.record,
                self.ends,
                *callbacks,
            ],
            progress=False,
        )

    def result(self, folder: Path, epochs: list[Epoch]) -> list[Any]:
        """What must be as in the uninterrupted training, beside the tensors."""
        facts = [(e.number, e.loss, e.validation, e.steps, e.skipped) for e in epochs]
        return [facts, statistics(folder), self.plateau.scheduler.state_dict()]


@contextmanager
def fused_writes(place: str) -> Iterator[None]:
    """Fail before or after a file is synced or renamed."""
    if place != "write":
        yield
        return
    sync, replace = os.fsync, Path.replace

    def syncing(descriptor: int) -> None:
        FUSE()
        sync(descriptor)
        FUSE()

    def replacing(source: Path, target: Path) -> Path:
        FUSE()
        found = replace(source, target)
        FUSE()
        return found

    with mock.patch.object(os, "fsync", syncing), mock.patch.object(Path, "replace", replacing):
        yield


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """A training that fails up to five times, and one that does not."""
    options, told = Options(chance), Counter[str]()
    seed = chance.randrange(2**30)
    torch.manual_seed(seed)
    whole = Fitted(options)
    epochs = whole.train(folder / "whole")
    expected = whole.result(folder / "whole", epochs)
    where, found = folder / "part", None
    while found is None:
        told["starts"] += 1
        place = chance.choice(list(PLACES))
        begun = (where / "last.pt").exists()
        torch.manual_seed(chance.randrange(2**30) if begun else seed)
        part = Fitted(options, place=place)
        FUSE.kind = chance.choice([Fault, Killed])
        FUSE.left = chance.randint(1, PLACES[place]) if told["starts"] < STARTS else 0
        try:
            with fused_writes(place):
                found = part.train(where)
        except (Killed, Exception) as error:  # noqa: BLE001  (what it is made into)
            check_is_made(error)
            part.accumulator.load_state_dict({"version": 4, "steps": 0})  # forget what is pending
            told["faults"] += 1
            told[f"faults: {place}"] += 1
        FUSE.left = 0
    assert part.result(where, found) == expected, "epochs, statistics or schedules"
    assert_equal(part.model, whole.model)
    assert_equal(part.averaging.average, whole.averaging.average)
    states = (one.accumulator.training_state() for one in (part, whole))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    names = [sorted(file.name for file in (folder / one).iterdir()) for one in ("whole", "part")]
    assert names[0] == names[1], "the files of the runs"
    if "best.pt" in names[0]:
        best = (
            torch.load(folder / one / "best.pt", weights_only=True) for one in ("whole", "part")
        )
        torch.testing.assert_close(*best, rtol=0, atol=0)
    return told
