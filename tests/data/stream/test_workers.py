"""The laws of streams with real workers: they persist, on many ranks, and go on from anywhere."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.support.resuming import as_pickle, check_every_stop
from tests.support.strategies import problems
from tests.support.streams import (
    KINDS,
    TOKENS,
    bytes_of,
    loader_of,
    numbers,
    same,
    shards_of,
    size_of,
    source_of,
)
from torchbudget import BudgetedIterableDataset, transforms
from torchbudget.errors import UnevenRanksError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:This DataLoader will create:UserWarning",
        "ignore:'set_vital' is deprecated:UserWarning",  # torchdata's own
    ),
]


@settings(max_examples=25)
@given(
    problems(most=120),
    st.sampled_from(KINDS),
    st.one_of(st.integers(1, 3), st.integers(1, 8)),
    st.integers(0, 4),
    st.data(),
)
def test_exactly_once_in_workers_that_persist(
    problem: Any, kind: str, ranks: int, workers: int, data: st.DataObject
) -> None:
    """Three epochs: all samples once, none over, and as many batches on every rank.

    A function's parts are unequal: with `uneven` their numbers of batches are, too.
    """
    sizes, cost, budget = problem
    apart = kind == "function"
    options: dict[str, Any] = {
        "size": size_of,
        "window": data.draw(st.integers(4 * ranks, 60 + 4 * ranks), label="window"),
        "shuffle": data.draw(st.booleans(), label="shuffle"),
        "look_ahead": data.draw(st.sampled_from([None, 40_000]), label="look_ahead"),
        "split": "workers" if kind == "splits itself" else None,
        "num_replicas": ranks,
        "uneven": apart,
        "collate_fn": same,
    }
    source = source_of(kind, sizes, data.draw(st.lists(st.integers(0, 200), max_size=4)))
    found: list[list[list[Any]]] = [[], [], []]  # of each epoch, the batches of each rank
    for rank in range(ranks):
        stream = BudgetedIterableDataset(source, cost, max(budget, 1), rank=rank, **options)
        loader = DataLoader(
            stream, batch_size=None, num_workers=workers, persistent_workers=workers > 0
        )
        for epoch in range(3):
            stream.set_epoch(epoch)
            try:
                found[epoch].append(list(loader))
            except UnevenRanksError:
                found[epoch].append([])
                break
    for ranks_batches in found:
        if any(not batches for batches in ranks_batches) and not apart:
            assert not any(ranks_batches)  # all ranks say so
            break
        assert numbers([batch for batches in ranks_batches for batch in batches]) == list(
            range(len(sizes))
        )
        assert apart or len({len(batches) for batches in ranks_batches}) == 1
        for batch in (batch for batches in ranks_batches for batch in batches):
            assert bytes_of(cost, [size for _, size in batch]) <= max(budget, 1)


# ---------------------------------------------------------------------- resumed anywhere

SIZES = np.random.default_rng(1).integers(1, 60, 2600)
MOST = 500


def only_numbers(batch: Any) -> list[int]:
    return [number for number, _ in batch]


def run_of_500(kind: str) -> BudgetedIterableDataset:
    source = source_of(kind, SIZES, [900, 1000])
    return BudgetedIterableDataset(
        source, TOKENS, 160, size=size_of, window=200, collate_fn=only_numbers
    )


def stops(workers: int) -> int:
    """One in so many: starting two workers takes a third of a second."""
    if os.environ.get("TORCHBUDGET_HYPOTHESIS") == "thorough":
        return 1
    return 20 if workers else 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["iterable", "shards"])
def test_a_run_of_500_batches_goes_on_from_each(kind: str, workers: int) -> None:
    """In a `StatefulDataLoader`: the rest equals the rest."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        return stateful(run_of_500(kind), batch_size=None, num_workers=workers)

    whole = check_every_stop(loader, file=as_pickle, every=stops(workers))
    assert len(whole) >= MOST
    assert sorted(number for batch in whole for number in batch) == list(range(len(SIZES)))


def as_tuple(batch: list[int]) -> tuple[int, ...]:
    return tuple(batch)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["iterable", "shards", "map"])
def test_a_tracked_run_of_500_batches_goes_on_from_each(kind: str, workers: int) -> None:
    """In a plain `DataLoader` with a collate of its own."""

    def loop(stream: BudgetedIterableDataset) -> Any:
        loader = DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=as_tuple)
        return stream.tracked(loader)

    whole = check_every_stop(lambda: run_of_500(kind), loop=loop, every=stops(workers))
    assert len(whole) >= MOST
    assert sorted(number for batch in whole for number in batch) == list(range(len(SIZES)))


# ---------------------------------------------------------------------- randomness


def jitter(sample: Any) -> Any:
    return (*sample, float(transforms.rng().random()))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_augmentations_of_shards_do_not_depend_on_workers(workers: int) -> None:
    """What a sample draws is a function of its shard and its place there."""

    def draws(num_workers: int) -> list[Any]:
        stream = BudgetedIterableDataset(
            shards_of(SIZES[:300], [50, 51, 120, 120, 260]),
            TOKENS,
            160,
            size=size_of,
            window=64,
            transforms=[jitter],
            collate_fn=same,
        )
        return sorted(sample for batch in loader_of(stream, num_workers) for sample in batch)

    found = draws(workers)
    assert found == draws(0)
    assert len({one[2] for one in found}) == 300
