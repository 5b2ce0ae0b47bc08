"""`PaddedCost` and `PackedCost`: exact at the boundary, monotone, never wrapped."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import oracles
from tests.support.strategies import formulas
from torchbudget import CostModel, PackedCost, PaddedCost
from torchbudget.cost.protocol import AdditiveCost
from torchbudget.errors import CostError

# Coefficients whose sums and products round: thirds, tenths, neighbours of whole numbers.
adversarial = st.one_of(
    st.sampled_from([0.1, 1 / 3, 1 - 2**-53, 1 + 2**-52, 0.5, 2**20 + 0.1, 5e-324, 1e-9]),
    st.floats(0, 2**20),
    st.integers(0, 2**20),
)


@st.composite
def adversarial_costs(draw: st.DrawFn, axes: int) -> Any:
    options: dict[str, Any] = {
        "fixed_bytes": draw(adversarial),
        "sample_bytes": draw(st.floats(2**-20, 2**20)),
        "unit_bytes": draw(adversarial),
        "pair_bytes": draw(st.one_of(st.just(0), adversarial.map(lambda c: c / 2**20))),
    }
    if axes > 1:
        options["unit_bytes"] = draw(st.lists(adversarial, min_size=axes, max_size=axes))
        entry = st.one_of(st.just(0), adversarial.map(lambda c: c / 2**20))
        row = st.lists(entry, min_size=axes, max_size=axes)
        options["pair_bytes"] = draw(st.lists(row, min_size=axes, max_size=axes))
    if draw(st.booleans()):
        return PackedCost(**options)
    return PaddedCost(**options, floor_bytes=draw(adversarial))


def size_of(draw: Any, axes: int, most: int) -> Any:
    lengths = [draw(st.integers(0, most)) for _ in range(axes)]
    return lengths[0] if axes == 1 else lengths


@st.composite
def cost_and_size(draw: st.DrawFn, *, most: int = 60, strategy: Any = formulas) -> Any:
    axes = draw(st.integers(1, 3))
    return draw(strategy(axes)), size_of(draw, axes, most)


def exact_bytes(cost: Any, n: int, size: Any) -> tuple[int, int]:
    """The formula in exact arithmetic: bytes of a batch, and of one sample."""
    lengths = [size] if np.ndim(size) == 0 else list(size)
    units = np.atleast_1d(np.array(cost.unit_bytes, dtype=object))
    pairs = np.array(cost.pair_bytes, dtype=object).reshape(len(lengths), len(lengths))
    item = Fraction(cost.sample_bytes)
    for i, length in enumerate(lengths):
        item += Fraction(units[i]) * length
        for j, other in enumerate(lengths):
            item += Fraction(pairs[i, j]) * length * other
    one = math.ceil(item)
    return max(getattr(cost, "floor_bytes", 0), cost.fixed_bytes + n * one), one


# ---------------------------------------------------------------------- the formula


@given(cost_and_size(), st.integers(0, 10_000))
def test_bytes_are_those_of_the_formula(case: Any, n: int) -> None:
    """A batch costs what the formula says in exact arithmetic, to one byte a sample at the most.

    With whole coefficients every byte is exact.
    """
    cost, size = case
    expected, one = exact_bytes(cost, n, size)
    numbers = np.hstack([np.ravel(cost.unit_bytes), np.ravel(cost.pair_bytes), cost.sample_bytes])
    rounds = bool((numbers.astype(float) % 1).any())
    assert abs(int(cost.item_bytes(size)) - one) <= rounds
    assert abs(int(cost.batch_bytes(n, size)) - expected) <= n * rounds


def test_pairs_of_axes() -> None:
    """Entry (i, j) of `pair_bytes` charges axis i times axis j: either triangle, the diagonal."""
    upper = PaddedCost(unit_bytes=(1, 0), pair_bytes=((0, 12), (0, 0)))
    lower = PaddedCost(unit_bytes=(1, 0), pair_bytes=((0, 0), (12, 0)))
    diagonal = PaddedCost(unit_bytes=(0, 0), pair_bytes=((2, 0), (0, 3)))
    assert int(upper.item_bytes([5, 7])) == int(lower.item_bytes([5, 7])) == 5 + 12 * 35
    assert int(diagonal.item_bytes([5, 7])) == 2 * 25 + 3 * 49
    scalar_zero = PaddedCost(unit_bytes=(0, 0), pair_bytes=((0, 1), (0, 0)))
    assert PaddedCost(pair_bytes=((0, 1), (0, 0))) == scalar_zero


# ---------------------------------------------------------------------- capacity


@given(cost_and_size(), st.integers(0, 60), st.integers(-1, 1))
def test_capacity_is_exact_at_the_boundary(case: Any, n: int, off: int) -> None:
    """The capacity is what trying every n finds, with the budget at a batch's bytes ± 1."""
    cost, size = case
    budget = max(int(cost.batch_bytes(n, size)) + off, 0)
    # Samples cost a byte or more, so that beyond n only the floor leaves room for others.
    expected = oracles.capacity(cost, size, budget, most=n + 600)
    assert int(cost.capacity(size, budget)) == expected


def test_the_floor() -> None:
    """Below the floor nothing fits, however small; at it, all that the formula lets in."""
    cost = PaddedCost(fixed_bytes=10, unit_bytes=1, floor_bytes=100)
    assert cost.batch_bytes([0, 1, 10, 18, 19], 5).tolist() == [100, 100, 100, 100, 105]
    assert cost.capacity(5, [0, 99, 100, 104, 105]).tolist() == [0, 0, 18, 18, 19]


# ---------------------------------------------------------------------- monotone


@given(cost_and_size(most=10**6, strategy=adversarial_costs), st.data())
def test_longer_never_costs_less(case: Any, data: Any) -> None:
    """Along every axis, over neighbouring lengths and far ones, bytes never fall."""
    cost, size = case
    axes = np.ndim(size) and len(size)
    lengths = np.concatenate([np.arange(200), 2 ** np.arange(20), 2 ** np.arange(20) - 1])
    lengths.sort()
    if axes:
        at = data.draw(st.integers(0, axes - 1))
        sizes = np.repeat(np.array(size)[None], len(lengths), axis=0)
        sizes[:, at] = lengths
    else:
        start = data.draw(st.sampled_from([0, size]))
        sizes = lengths + start
    item = cost.item_bytes(sizes)
    assert (item >= 0).all()
    assert (np.diff(item) >= 0).all()
    assert (np.diff(cost.batch_bytes(7, sizes)) >= 0).all()
    assert (np.diff(cost.capacity(sizes, 2**45)) <= 0).all()


# ---------------------------------------------------------------------- shapes


def test_sizes_of_another_number_of_axes_are_refused() -> None:
    two = PaddedCost(unit_bytes=(1, 1))
    for sizes in (5, [1, 2, 3], np.ones((2, 1), np.int64)):
        with pytest.raises(CostError, match="2 axes: expected sizes of shape"):
            two.item_bytes(sizes)


# ---------------------------------------------------------------------- values

VALUES = [
    PaddedCost(unit_bytes=1),
    PaddedCost(fixed_bytes=7, sample_bytes=0.1, unit_bytes=1 / 3, pair_bytes=0.5, floor_bytes=9),
    PaddedCost(unit_bytes=(1, 2), pair_bytes=((0, 1), (0, 0))),
    PackedCost(unit_bytes=1),
    PackedCost(fixed_bytes=3, unit_bytes=np.array([1.5, 2, 0])),
]


@pytest.mark.parametrize("cost", VALUES, ids=repr)
def test_a_cost_is_a_value(cost: Any) -> None:
    """Frozen, hashable, equal to its copies, through pickle and its own text too."""
    twins = [
        pickle.loads(pickle.dumps(cost)),  # noqa: S301
        copy.deepcopy(cost),
        copy.copy(cost),
        dataclasses.replace(cost),
        eval(repr(cost)),  # noqa: S307
    ]
    for twin in twins:
        assert twin == cost
        assert hash(twin) == hash(cost)
        assert type(twin) is type(cost)
    assert len({cost, *twins}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.fixed_bytes = 1
    with pytest.raises((AttributeError, TypeError)):
        cost.anything = 1


def test_the_protocols() -> None:
    """Both are cost models; only the packed one is a sum over its samples."""
    assert isinstance(VALUES[0], CostModel)
    assert not isinstance(VALUES[0], AdditiveCost)
    assert isinstance(VALUES[3], AdditiveCost)
    assert [cost.axes for cost in VALUES] == [1, 1, 2, 1, 3]
