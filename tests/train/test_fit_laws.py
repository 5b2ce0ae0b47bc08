"""Law 4 for whole trainings: broken off anywhere, again and again, they end as if they had not."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.train.test_faults import Small, statistics
from tests.train.test_fit import BrokenOff, Epoch, assert_equal, samples
from tests.train.test_fit_resumed import Averaging
from torchbudget import BudgetedIterableDataset, GradAccumulator, PadCollate, PaddedCost
from torchbudget.train.step import Step

KINDS = ("sampler", "stream", "stream of a number of batches", "shuffled", "own generator")


class AnyTraining(Small):
    """Of one kind of loader, with an average of the model; ended by a callback, if at all."""

    def __init__(self, kind: str, end: int | None) -> None:
        super().__init__()
        data = samples(24, 0)
        if kind.startswith("stream"):
            batches = 8 if "number" in kind else None
            stream = BudgetedIterableDataset(
                [data[:15], data[15:]],
                PaddedCost(unit_bytes=1),
                60,
                size="x",
                window=8,
                batches_per_epoch=batches,
            )
            self.loader = DataLoader(stream, batch_size=None)
        elif kind != "sampler":
            generator = torch.Generator().manual_seed(5) if kind == "own generator" else None
            self.loader = DataLoader(
                data, batch_size=4, shuffle=True, generator=generator, collate_fn=PadCollate()
            )
        if kind != "sampler":
            self.accumulator = GradAccumulator(self.optimizer, self.model, steps=3)
        self.validation = DataLoader(
            samples(6, 9), batch_size=2, shuffle=True, collate_fn=PadCollate()
        )
        self.averaging = Averaging(self)
        self.end = end

    def ends(self, record: Step | Epoch) -> bool:
        return isinstance(record, Step) and record.number == self.end


class After:
    """A callback that breaks off after a number of records."""

    def __init__(self, records: int) -> None:
        self.left = records

    def __call__(self, _: Step | Epoch) -> None:
        self.left -= 1
        if not self.left:
            raise BrokenOff


def train(training: AnyTraining, folder: Path, *more: Any, **options: Any) -> list[Epoch] | None:
    callbacks = [training.averaging.update, *more, training.ends]
    try:
        return training.fit(folder=folder, callbacks=callbacks, **options)
    except BrokenOff:
        return None


@settings(max_examples=20)
@given(
    kind=st.sampled_from(KINDS),
    every=st.integers(1, 3),
    breaks=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    end=st.none() | st.integers(1, 6),
)
def test_broken_off_and_resumed_is_uninterrupted(
    kind: str, every: int, breaks: Sequence[int], end: int | None
) -> None:
    """Model, average, statistics and epochs, bit for bit."""
    options = {"checkpoint_steps": None if kind in KINDS[3:] else every}
    with tempfile.TemporaryDirectory() as name:
        whole, found = AnyTraining(kind, end), None
        expected = train(whole, Path(name, "whole"), **options)
        for number in [*breaks, 0]:
            folder = Path(name, "part")
            part = AnyTraining(kind, end)
            if (folder / "last.pt").exists():
                torch.manual_seed(number)
            found = train(part, folder, After(number), **options)
            event("broken off" if found is None else "at its end")
        assert found is not None
        assert expected is not None
        assert_equal(part.model, whole.model)
        assert_equal(part.averaging.average, whole.averaging.average)
        assert statistics(folder) == statistics(Path(name, "whole"))
        facts = [(e.number, e.loss, e.validation, e.steps) for e in found]
        assert facts == [(e.number, e.loss, e.validation, e.steps) for e in expected]
