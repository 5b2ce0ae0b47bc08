"""Stated costs: exact at the boundary, monotone, never wrapped; what they refuse; tables."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support import oracles
from tests.support.strategies import formulas, tables
from torchbudget import CostModel, MemoryBudgetBatchSampler, PackedCost, PaddedCost, TableCost
from torchbudget.cost.protocol import AdditiveCost
from torchbudget.errors import CostError, CostOverflowError
from torchbudget.units import MAX_BYTES

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


FLOORED = PaddedCost(fixed_bytes=10, unit_bytes=1, floor_bytes=100), 5


@given(cost_and_size(), st.integers(0, 10_000))
@example(FLOORED, 10)
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


# ---------------------------------------------------------------------- capacity


@given(cost_and_size(), st.integers(0, 60), st.integers(-1, 1))
@example(FLOORED, 0, -1)
def test_capacity_is_exact_at_the_boundary(case: Any, n: int, off: int) -> None:
    """The capacity is what trying every n finds, with the budget at a batch's bytes ± 1."""
    cost, size = case
    budget = max(int(cost.batch_bytes(n, size)) + off, 0)
    # Samples cost a byte or more, so that beyond n only the floor leaves room for others.
    expected = oracles.capacity(cost, size, budget, most=n + 600)
    assert int(cost.capacity(size, budget)) == expected


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
    pairs = ((0, 1), (0, 0))
    assert PaddedCost(pair_bytes=pairs) == PaddedCost(unit_bytes=(0, 0), pair_bytes=pairs)


UNLIMITED = 2**63 - 1
BOTH = pytest.mark.parametrize("kind", [PaddedCost, PackedCost])


# ---------------------------------------------------------------------- the range


@given(
    st.one_of(st.integers(1, 2**53 - 1), st.integers(0, 52).map(lambda power: 2**power)),
    st.one_of(st.just(0), st.integers(0, 2**53 - 1)),
    st.integers(-3, 3),
)
def test_what_passes_64_bits_is_refused_and_never_wrapped(item: int, fixed: int, off: int) -> None:
    """Bytes are exact, or refused; they are refused only from 2**63 less what rounding hides."""
    cost = PaddedCost(fixed_bytes=fixed, sample_bytes=item)
    n = min(max((2**63 - fixed) // item + off, 0), 2**63 - 1)
    exact = fixed + n * item
    if exact >= 2**63:
        with pytest.raises(CostOverflowError, match=r"2\*\*63"):
            cost.batch_bytes(n, 1)
        return
    try:
        assert int(cost.batch_bytes(n, 1)) == exact
    except CostOverflowError:
        assert exact >= 2**63 - 8192


@given(st.integers(1, 2**53 - 1), st.integers(0, 2**53 - 1), st.integers(0, 2**63 - 1))
def test_capacity_is_exact_up_to_the_last_budget(item: int, fixed: int, budget: int) -> None:
    """Under budgets up to 2**63 − 1 the capacity is that of whole-number division."""
    cost = PackedCost(fixed_bytes=fixed, sample_bytes=item)
    assert int(cost.capacity(1, budget)) == max(budget - fixed, 0) // item
    assert int(cost.capacity(1, UNLIMITED)) == (UNLIMITED - fixed) // item


@BOTH
def test_a_sample_of_2_to_the_53_bytes_is_refused(kind: Any) -> None:
    """Past 2**53 floats skip whole bytes: such a sample is refused, one below is exact."""
    cost = kind(unit_bytes=2**40)
    assert int(cost.item_bytes(2**13 - 1)) == 2**53 - 2**40
    for call in (
        lambda: cost.item_bytes(2**13),
        lambda: cost.item_bytes([1, 2**13, 1]),
        lambda: cost.batch_bytes(1, 2**62),
        lambda: cost.capacity(2**13, 100),
    ):
        with pytest.raises(CostOverflowError, match=r"2\*\*53"):
            call()
    assert int(kind(sample_bytes=2**53 - 1).item_bytes(0)) == 2**53 - 1
    with pytest.raises(CostOverflowError):
        kind(sample_bytes=2**53 - 1, unit_bytes=1).item_bytes(1)
    with pytest.raises(CostOverflowError):
        kind(unit_bytes=(1, 1), pair_bytes=((0, 1), (0, 0))).item_bytes([2**30, 2**30])


# ---------------------------------------------------------------------- bad coefficients

NAMES = ("fixed_bytes", "sample_bytes", "unit_bytes", "pair_bytes")
BAD = [-1, -1e-9, math.nan, math.inf, -math.inf, True, False, np.True_, "1", None, 1j, 2**53, 1e300]


@BOTH
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", BAD, ids=repr)
def test_a_coefficient_that_is_no_number_of_bytes(kind: Any, name: str, bad: Any) -> None:
    """Negative, not finite, a bool, no number, or past 2**53: refused by name."""
    with pytest.raises(CostError, match=name):
        kind(**({"unit_bytes": 1} | {name: bad}))


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"unit_bytes": 0.0},
        {"unit_bytes": (0, 0)},
        {"unit_bytes": (0, 0), "pair_bytes": np.zeros((2, 2))},
    ],
    ids=str,
)
def test_a_batch_must_cost_something(kind: Any, options: Any) -> None:
    with pytest.raises(CostError, match="a batch must cost something"):
        kind(**options)


@BOTH
def test_a_sample_must_cost_something(kind: Any) -> None:
    """A cost that never grows would put a whole data set into one batch; a time may be constant."""
    with pytest.raises(CostError, match="cost: a sample must cost something"):
        MemoryBudgetBatchSampler([1, 2], kind(fixed_bytes=5), 10)
    with pytest.raises(CostError, match=r"limits\[0\]: a sample must cost something"):
        MemoryBudgetBatchSampler([1, 2], kind(unit_bytes=1), 10, limits=[(kind(fixed_bytes=5), 10)])


# ---------------------------------------------------------------------- packed


class Tokens:
    """A user's cost that happens to have what an additive one has."""

    base_bytes = 0

    def item_bytes(self, sizes: Any) -> Any:
        return np.asarray(sizes, np.int64)

    def batch_bytes(self, n: Any, padded_size: Any) -> Any:
        return np.asarray(n, np.int64) * self.item_bytes(padded_size)

    def capacity(self, padded_size: Any, budget_bytes: Any) -> Any:
        return np.asarray(budget_bytes, np.int64) // np.maximum(self.item_bytes(padded_size), 1)


class PackedTokens(Tokens, AdditiveCost):
    """The same, which says that its batches are packed."""


def test_only_what_derives_is_packed() -> None:
    """Two attributes do not make a cost additive; deriving from `AdditiveCost` does."""
    sizes = [9, 1, 1, 1]
    padded = MemoryBudgetBatchSampler(sizes, Tokens(), 12, shuffle=False)
    packed = MemoryBudgetBatchSampler(sizes, PackedTokens(), 12, shuffle=False)
    assert [len(batch) for batch in padded] == [1, 3]
    assert [len(batch) for batch in packed] == [4]


def test_an_additive_cost_has_both_parts() -> None:
    class Half(AdditiveCost):
        base_bytes = 0

    with pytest.raises(TypeError, match="item_bytes"):
        Half()


# ---------------------------------------------------------------------- a table of measured batches


@given(tables(), st.integers(1, 500), st.integers(0, 2 * 10**6))
def test_a_table_is_exact_and_monotone(table: TableCost, size: int, budget: int) -> None:
    """And predicts nothing for batches that no measured one covers."""
    fits = int(table.capacity(size, budget))
    assert fits == 0 or table.batch_bytes(fits, size) <= budget
    assert table.batch_bytes(fits + 1, size) > budget
    rows = zip(table.numbers, table.sizes, table.peak_bytes, strict=True)
    covering = [peak for n, [length], peak in rows if n >= 7 and length >= size]
    assert table.batch_bytes(7, size) == min(covering, default=MAX_BYTES)
    lengths = np.arange(1, max(table.sizes)[0] + 9)
    assert (np.diff(table.batch_bytes(np.arange(1, 200), size) - MAX_BYTES) >= 0).all()
    assert (np.diff(table.batch_bytes(7, lengths) - MAX_BYTES) >= 0).all()


def test_columns_of_one_length() -> None:
    with pytest.raises(CostError, match="numbers and sizes must be as many as peaks"):
        TableCost(numbers=(1, 2), sizes=((1,), (2,)), peak_bytes=(10,))
    with pytest.raises(CostError, match="at least one"):
        TableCost(numbers=(), sizes=(), peak_bytes=())
