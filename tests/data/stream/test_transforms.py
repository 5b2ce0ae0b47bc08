"""Transforms, as their users write them."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.streams import make
from torchbudget import transforms
from torchbudget.errors import OptionError, SampleError


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
    assert list(make([[sample]], size=always_one, transforms=[transform])) == [[expected]]


def always_one(sample: Any) -> int:
    return 1


def uniform() -> float:
    return float(transforms.rng().random())


def draws(transform: Any, n: int = 2000, **options: Any) -> list[Any]:
    stream = make([range(n)], size=always_one, transforms=[transform], **options)
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


@pytest.mark.parametrize("sample", ["ab", b"ab", {"x": 1}])
def test_one_sample_is_not_several(sample: Any) -> None:
    """Its characters or keys would be the samples."""
    with pytest.raises(SampleError, match=f"item 0 of shard 0.* {type(sample).__name__}: return"):
        draws(transforms.expand(lambda _: sample), 3)
