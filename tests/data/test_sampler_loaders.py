"""A sampler in data loaders, and what frameworks ask of it."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.support.samplers import forks, loader_of, sampler_of
from torchbudget.errors import OptionError


def test_there_is_no_batch_size() -> None:
    """Frameworks take an int attribute of that name for a fixed size, and cut batches to it."""
    sampler = sampler_of()
    assert not hasattr(sampler, "batch_size")
    assert not hasattr(type(sampler), "batch_size")
    assert loader_of(sampler).batch_size is None


def test_len_of_the_loader_is_that_of_the_sampler() -> None:
    sampler = sampler_of()
    loader = loader_of(sampler)
    assert len(loader) == len(sampler) == len(list(loader))


def test_frameworks_reach_it_through_sampler() -> None:
    """`batch_sampler.sampler.set_epoch`, which some frameworks call, is its own."""
    sampler = sampler_of()
    assert sampler.sampler is sampler
    loader_of(sampler).batch_sampler.sampler.set_epoch(4)
    assert sampler.epoch == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_as_a_sampler_of_samples_it_is_refused(workers: int) -> None:
    """`sampler=` instead of `batch_sampler=`: its batches would be batched again."""
    options: dict[str, Any] = {"sampler": sampler_of(), "num_workers": workers}
    for more in ({}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}):
        with pytest.raises(OptionError, match="as batch_sampler=, not as sampler="):
            next(iter(DataLoader(range(1000), **options, **more)))  # type: ignore[arg-type]


@forks
@pytest.mark.parametrize(
    "context", [None, "fork", pytest.param("spawn", marks=pytest.mark.slow), "forkserver"]
)
def test_a_stock_loader_covers_every_sample(context: str | None) -> None:
    """Without workers and with two of each kind: every index once, in the sampler's order."""
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    loader = loader_of(sampler_of(), **(workers if context else {}))
    assert list(loader) == list(sampler_of())


@forks
def test_persistent_workers_draw_new_epochs() -> None:
    """Workers that live on get each epoch's own batches: the sampler stays in this process."""
    loader = loader_of(sampler_of(), num_workers=2, persistent_workers=True)
    expected = sampler_of()
    for _ in range(3):
        assert list(loader) == list(expected)
