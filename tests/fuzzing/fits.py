"""Trainings with any loader and options that fail or are killed anywhere, and go on.

What must hold: model, average, optimizer, statistics, the best model and the epochs are those of
the training that was not interrupted, bit for bit.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from tests.fuzzing.faults import FUSE
from tests.support.trainings import KINDS, POSITIONED, Training, loss_of
from torchbudget import PadCollate
from torchbudget.train.fit import Epoch
from torchbudget.train.step import Step

# And within how many calls a fault comes there.
PLACES = {"record": 9, "criterion": 20, "collate": 20, "write": 30, "optimizer": 9}


class FusedCollate(PadCollate):
    def __call__(self, samples: list[Any]) -> Any:
        FUSE()
        return super().__call__(samples)


class Fitted(Training):
    """A training with options that are drawn by `chance` alone, and fails at a place."""

    def __init__(self, chance: random.Random, place: str | None = None) -> None:
        kind, end = chance.choice(KINDS[:5]), chance.choice([None, None, chance.randint(1, 6)])
        self.mean = chance.random() < 0.3
        accumulating: dict[str, Any] = {
            "steps": chance.choice([1, 2, 3]),
            "mean": self.mean,
            "max_norm": chance.choice([None, 0.5]),
        }
        if chance.random() < 0.2:
            accumulating["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**6)
        if chance.random() < 0.5:
            accumulating["scheduler"] = ()
        super().__init__(kind, end, accumulating=accumulating)
        self.place = place
        if place == "collate" and not kind.startswith("stream"):
            self.loader.collate_fn = FusedCollate()
        if place == "optimizer":
            self.optimizer.register_step_post_hook(lambda *_: FUSE())
        self.callbacks += [self.record]
        self.options: dict[str, Any] = {
            "epochs": chance.randint(1, 3),
            "checkpoint_steps": chance.randint(1, 3) if kind in POSITIONED else None,
        }
        plateau, validates = chance.random() < 0.3, chance.random() < 0.7
        if not plateau:
            self.callbacks.remove(self.plateau)
        if plateau or validates:
            self.options["patience"] = chance.choice([None, 1, 2])
        else:
            self.options["validation"] = None

    def criterion(self, model: nn.Module, batch: Any) -> Tensor:
        if self.place == "criterion":
            FUSE()
        loss = loss_of(model, batch)
        return loss / batch.num_tokens if self.mean else loss

    def record(self, _: Step | Epoch) -> None:
        if self.place == "record":
            FUSE()


def fused(owner: Any, name: str) -> Any:
    """A patch of a function that may fail before and after it."""
    function = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        FUSE()
        found = function(*arguments)
        FUSE()
        return found

    return mock.patch.object(owner, name, call)


def check(chance: random.Random, folder: Path) -> Counter[str]:
    """A training that fails up to seven times, and one that does not."""
    told, options, seed = Counter[str](), chance.random(), chance.randrange(2**30)
    whole = Fitted(random.Random(options))
    torch.manual_seed(seed)
    expected = whole.fit(folder=folder / "whole", **whole.options)
    where, found = folder / "part", None
    while found is None:
        told["starts"] += 1
        place = chance.choice(list(PLACES))
        begun = (where / "last.pt").exists()
        part, before = Fitted(random.Random(options), place), told["faults"]
        torch.manual_seed(chance.randrange(2**30) if begun else seed)
        with FUSE.lit(chance, PLACES[place], told), ExitStack() as writes:
            if place == "write":
                writes.enter_context(fused(os, "fsync"))
                writes.enter_context(fused(Path, "replace"))
            found = part.fit(folder=where, **part.options)
        if told["faults"] > before:
            part.accumulator.load_state_dict({"version": 4, "steps": 0})  # forget what is pending
            told[f"faults: {place}"] += 1
    epochs = ([replace(one, seconds=0.0) for one in each] for each in (found, expected))
    assert next(epochs) == next(epochs), "the epochs"
    part.check(whole, where, folder / "whole")
    states = (one.accumulator.training_state() for one in (part, whole))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    return told
