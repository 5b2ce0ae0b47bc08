"""Transforms, as their users write them, and endless draws."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch.utils.data import DataLoader

from torchbudget import BudgetedIterableDataset, PadCollate, PaddedCost, transforms
from torchbudget.errors import OptionError
from torchbudget.readers import sample_forever

TOKENS = PaddedCost(unit_bytes=1)


class Pair(NamedTuple):
    image: Any
    mask: Any


def double(value: Any) -> Any:
    return value * 2


def add(value: Any, other: Any = 1) -> Any:
    return value + other


CASES: dict[str, tuple[Any, Any, Any]] = {
    "unpack_args": (transforms.unpack_args(add), (3, 4), 7),
    "unpack_args of a mapping": (transforms.unpack_args(add), {"value": 3, "other": 5}, 8),
    "apply_at": (transforms.apply_at(1, double), (3, 4), (3, 8)),
    "apply_at several": (transforms.apply_at([0, 1], add, 10), [3, 4], [13, 14]),
    "apply_at a name": (transforms.apply_at("x", add, other=2), {"x": 1, "y": 2}, {"x": 3, "y": 2}),
    "zip_apply": (transforms.zip_apply(double, None), Pair(3, 4), Pair(6, 4)),
    "zip_apply by name": (transforms.zip_apply(double, add), {"x": 1, "y": 2}, {"x": 2, "y": 3}),
    "multiply": (transforms.multiply(add, 5), Pair(3, 4), Pair(8, 9)),
    "multiply of a mapping": (transforms.multiply(double), {"x": 1}, {"x": 2}),
    "never": (transforms.random_apply(0, double), 3, 3),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_does_what_it_says(case: str) -> None:
    """To tuples, lists, named tuples and mappings, of which the kind stays; pickled too."""
    transform, sample, expected = CASES[case]
    if case != "never":
        for one in (transform, pickle.loads(pickle.dumps(transform))):  # noqa: S301  (our own)
            found = one(sample)
            assert found == expected
            assert type(found) is type(expected)
    stream = BudgetedIterableDataset(
        [[sample]], TOKENS, 9, size=always_one, transforms=[transform], collate_fn=list
    )
    assert list(stream) == [[expected]]


def always_one(sample: Any) -> int:
    return 1


def uniform() -> float:
    return float(transforms.rng().random())


def draws(transform: Any, n: int = 2000, **options: Any) -> list[Any]:
    stream = BudgetedIterableDataset(
        [range(n)], TOKENS, n, size=always_one, transforms=[transform], collate_fn=list, **options
    )
    return [one for batch in stream for one in batch]


def negative(value: int) -> int:
    return -value - 1


def test_random_apply_takes_its_share() -> None:
    """A tenth, other samples in another seed, the same ones in the same."""
    transform = transforms.random_apply(0.1, negative)
    found = draws(transform)
    share = np.mean(np.array(found) < 0)
    assert 0.07 < share < 0.13
    assert draws(transform) == found
    assert sorted(draws(transform, seed=1)) != sorted(found)
    with pytest.raises(OptionError, match="between 0 and 1"):
        transforms.random_apply(2, negative)


def test_arguments_are_drawn() -> None:
    found = draws(transforms.sample_args(add, uniform))
    parts = np.array(found) % 1
    assert len(set(parts.tolist())) == len(found)
    assert abs(parts.mean() - 0.5) < 0.05
    with pytest.raises(OptionError, match="stream"):
        transforms.rng()


def pieces(value: int) -> list[int]:
    return [value] * (value % 3)


def odd(value: int) -> bool:
    return value % 2 == 1


def test_many_of_one_and_none() -> None:
    found = draws(transforms.expand(pieces), 100)
    assert Counter(found) == {n: n % 3 for n in range(100) if n % 3}
    assert sorted(draws(transforms.keep_if(odd), 100)) == list(range(1, 100, 2))


def test_zip_apply_wants_one_function_for_each_field() -> None:
    with pytest.raises(ValueError, match="2 functions for 3"):
        transforms.zip_apply(double, None)((1, 2, 3))


# ---------------------------------------------------------------------- endless draws


def test_weights_are_frequencies() -> None:
    found = Counter(islice(sample_forever("abc", weights=[1, 0, 3], seed=1), 4000))
    assert set(found) == {"a", "c"}
    assert abs(found["c"] / 4000 - 0.75) < 0.03


@pytest.mark.parametrize("workers", [0, 2])
def test_endless_batches(workers: int) -> None:
    """As many batches as asked for, other ones in another epoch, weighted."""
    dataset = [{"x": np.arange(n)} for n in range(1, 50)]
    stream = BudgetedIterableDataset(
        sample_forever(dataset, weights=np.arange(49)),
        TOKENS,
        500,
        size="x",
        batches_per_epoch=30,
        collate_fn=PadCollate(),
    )
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    assert len(loader) == 30
    first = [batch.lengths.tolist() for batch in loader]
    assert len(first) == 30
    assert min(length for batch in first for length in batch) > 1
    stream.set_epoch(1)
    second = [batch.lengths.tolist() for batch in loader]
    assert len(second) == 30
    assert second != first
    stream.close()


def test_endless_draws_seek() -> None:
    """The source goes on from a number: nothing is skipped through."""
    stream = BudgetedIterableDataset(
        sample_forever(range(1, 40)), TOKENS, 100, size=int, window=64, batches_per_epoch=50,
        collate_fn=list,
    )  # fmt: skip
    walk = iter(stream)
    begun = list(islice(walk, 33))
    state = walk.state_dict()
    assert state["goes_on_by"] == "seeking"
    assert state["start"]["source"]["position"] > 0
    other = BudgetedIterableDataset(
        sample_forever(range(1, 40)), TOKENS, 100, size=int, window=64, batches_per_epoch=50,
        collate_fn=list,
    )  # fmt: skip
    whole = list(other)
    assert begun == whole[:33]
    other.load_state_dict(state)
    assert list(other) == whole[33:]


def test_nothing_to_draw() -> None:
    with pytest.raises(OptionError, match="empty"):
        sample_forever([])
    with pytest.raises(OptionError, match="one weight per sample"):
        sample_forever("ab", weights=[1])
    with pytest.raises(OptionError, match="numbers"):
        sample_forever("ab", weights=["x", "y"])
