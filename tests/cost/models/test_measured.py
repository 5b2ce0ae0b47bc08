"""The measured cost as a value: margin, packed batches, time, and what training observes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MeasuredCost, PaddedCost, TableCost
from torchbudget.errors import CostError, MeasureWarning
from torchbudget.machine.peaks import Peak


@st.composite
def costs(draw: st.DrawFn) -> MeasuredCost:
    number = st.integers(0, 10**6)
    forms = draw(
        st.lists(
            st.builds(
                PaddedCost,
                fixed_bytes=number,
                sample_bytes=st.integers(1, 10**4),
                unit_bytes=number,
                pair_bytes=st.integers(0, 100),
                floor_bytes=number,
            ),
            min_size=1,
            max_size=4,
        )
    )
    return MeasuredCost(forms=tuple(forms), margin=draw(st.floats(0, 0.5)))


@given(costs(), st.integers(0, 5000), st.integers(0, 2**40))
def test_capacity_is_exact_with_a_margin(cost: MeasuredCost, size: int, budget: int) -> None:
    """As many samples as fit, and not one more, whatever the margin."""
    n = int(cost.capacity(size, budget))
    assert n == 0 or cost.batch_bytes(n, size) <= budget
    assert cost.batch_bytes(n + 1, size) > budget


@given(costs(), st.integers(1, 100), st.integers(1, 1000))
def test_the_margin_is_added(cost: MeasuredCost, n: int, size: int) -> None:
    fitted = int(cost.fitted_bytes(n, size))
    assert (
        fitted * (1 + cost.margin)
        <= int(cost.batch_bytes(n, size))
        <= (fitted * (1 + cost.margin + 2**-13) + 2**14)
    )


@given(st.integers(0, 2**32))
def test_packed_is_above_every_form(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forms = [
        PaddedCost(
            fixed_bytes=rng.integers(0, 10**6),
            unit_bytes=rng.integers(1, 10**3, 2),
            pair_bytes=rng.integers(0, 9, (2, 2)),
            floor_bytes=rng.integers(0, 10**6),
        )
        for _ in range(3)
    ]
    cost = MeasuredCost(forms=tuple(forms), margin=0.05)
    sizes = rng.integers(1, 100, (20, 2))
    n = np.arange(1, 21)
    exact = np.stack([form.batch_bytes(n, sizes) for form in forms]).max(axis=0) * 1.05
    assert (cost.packed().batch_bytes(n, sizes) >= exact - 1).all()


def test_a_table_is_not_packed() -> None:
    table = TableCost(numbers=(8,), sizes=((100,),), peak_bytes=(1000,))
    with pytest.raises(CostError, match="what each sample costs"):
        MeasuredCost(forms=(table,), margin=0).packed()


def test_observed_steps_correct_the_margin() -> None:
    """One warning for all that is over; the cost with the observed margin covers it."""
    cost = MeasuredCost(forms=(PaddedCost(unit_bytes=1000),), margin=0.01)
    cost.observe(10, 100, 900_000)
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning, match=r"needed .*with_observed_margin"):
        cost.observe(10, 100, Peak(bytes=1_100_000))
    cost.observe(20, 100, 2_300_000)  # warnings are errors here: no second one
    assert cost.with_observed_margin().batch_bytes(20, 100) >= 2_300_000
    assert cost.batch_bytes(20, 100) < 2_300_000


def test_a_caching_allocator_keeps_what_the_largest_step_took() -> None:
    """A small step under what a large one left reserved is no surprise; more than that is."""
    cost = MeasuredCost(forms=(PaddedCost(unit_bytes=1000),), margin=0.01)
    cost.observe(100, 100, Peak(bytes=10_000_000, allocated_bytes=9_000_000))
    cost.observe(1, 100, Peak(bytes=10_000_000, allocated_bytes=90_000))
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning):
        cost.observe(1, 100, Peak(bytes=10_200_000, allocated_bytes=90_000))
    assert 0.02 <= cost.with_observed_margin().margin <= 0.03


def test_allocations_that_were_tried_again_raise_the_margin() -> None:
    """What such a step needed is unknown: each margin grows by 0.02, with one warning."""
    cost = MeasuredCost(forms=(PaddedCost(unit_bytes=1000),), margin=0.01)
    with pytest.warns(MeasureWarning, match="did not get the memory"):
        cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, retries=1))
    once = cost.with_observed_margin().margin
    assert once > 0.03
    cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, retries=2))
    assert cost.with_observed_margin().margin == once  # later batches still have the old margin
    cost.with_margin(once)
    cost.observe(10, 100, None)
    assert once + 0.02 <= cost.with_observed_margin().margin <= once + 0.03


def test_a_cost_that_was_only_traced_has_no_time() -> None:
    """The error says how to get one."""
    time = PaddedCost(sample_bytes=7)
    cost = MeasuredCost(forms=(PaddedCost(unit_bytes=1),), margin=0, time_form=time)
    assert cost.time is time
    with pytest.raises(CostError, match=r"no time: .* method='auto' or 'run'"):
        MeasuredCost(forms=cost.forms, margin=0).time  # noqa: B018
