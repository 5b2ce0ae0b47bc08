"""Checkpoints: which loaders have a position."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.train.test_fit import Training
from torchbudget.errors import StateError
from torchbudget.train.checkpoint import has_position, load_run_state, run_state


class OwnSampler(BatchSampler):
    """A batch sampler with a state, which does not know of batches that are read ahead."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]


def test_whose_position_can_be_saved() -> None:
    """That of a source that knows of batches read ahead; not that of any object with a state."""
    data = list(range(6))
    own = OwnSampler(SequentialSampler(data), 2, drop_last=False)
    assert has_position(Training().loader)
    assert not has_position(DataLoader(data, batch_sampler=own))
    assert not has_position(DataLoader(data, batch_size=2))


def test_a_position_needs_a_loader_that_can_load_it() -> None:
    training = Training()
    state = run_state(training.model, training.accumulator, training.loader, epoch=0, is_over=True)
    with pytest.raises(StateError, match="cannot load one"):
        load_run_state(state, training.model, training.accumulator, training.validation)
