"""What `PaddedCost` and `PackedCost` refuse: too many bytes, and coefficients that are none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.errors import CostError, CostOverflowError

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
