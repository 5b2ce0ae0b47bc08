"""The least padding of all cuts into the fewest micro-batches, by an oracle that tries them all."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.strategies import costs, one_axis_sizes
from torchbudget import PaddedCost
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.tight import filled, reserve, tight_cut


def oracle(padded: list[int], most: list[int]) -> tuple[int, int]:
    """The fewest micro-batches of descending samples, and then the fewest padded elements."""

    @cache
    def best(start: int) -> tuple[int, int]:
        if start == len(padded):
            return 0, 0
        ways = []
        for stop in range(start + 1, min(start + most[start], len(padded)) + 1):
            count, elements = best(stop)
            ways.append((count + 1, elements + (stop - start) * padded[start]))
        return min(ways)

    return best(0)


@st.composite
def windows(draw: st.DrawFn) -> tuple[Any, BatchRules]:
    sizes = draw(one_axis_sizes(most=120))
    cost = draw(costs(packed=False))
    alone = int(cost.batch_bytes(1, int(sizes.max())))
    return sizes, BatchRules(
        cost=cost,
        budget_bytes=alone * draw(st.integers(1, 6)),
        size_multiple=draw(st.sampled_from([1, 8])),
        max_batch_size=draw(st.sampled_from([None, 7])),
    )


@given(windows())
def test_it_is_the_best_cut(made: tuple[Any, BatchRules]) -> None:
    """All samples once, none over, as few micro-batches as can be, and no cut pads less."""
    sizes, rules = made
    order, cuts = tight_cut(sizes, rules)
    batches = [order[start:stop] for start, stop in pairwise(cuts)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(sizes)))
    padded = [int(rules.padded(sizes[batch]).max()) for batch in batches]
    for batch in batches:
        assert len(batch) <= rules.capacity(sizes[batch].max(), rules.budget_bytes)
    descending = np.sort(sizes)[::-1]
    most = rules.capacity(descending, rules.budget_bytes).tolist()
    elements = sum(len(batch) * size for batch, size in zip(batches, padded, strict=True))
    assert (len(batches), elements) == oracle(rules.padded(descending).tolist(), most)


@given(windows())
def test_what_is_left_saves_a_micro_batch(made: tuple[Any, BatchRules]) -> None:
    """At least three quarters stay, and where any are left there is one micro-batch fewer."""
    sizes, rules = made
    keep = filled(sizes, rules)
    assert len(sizes) - reserve(len(sizes)) <= keep <= len(sizes)
    if keep < len(sizes):
        assert len(tight_cut(sizes[:keep], rules)[1]) < len(tight_cut(sizes, rules)[1])


def test_a_micro_batch_that_is_hardly_begun_is_left() -> None:
    """Ten fit: of 101 samples one and a little more is left, of 109 nothing, of 8 nothing."""
    rules = BatchRules(cost=PaddedCost(unit_bytes=1), budget_bytes=100)
    alike = np.full(109, 10)
    assert 95 <= filled(alike[:101], rules) <= 100
    assert filled(alike, rules) == 100  # a twelfth of the window
    assert filled(alike[:8], rules) == 8


def test_no_more_than_a_part_is_left() -> None:
    """Where it would take half of the samples to save a micro-batch, all stay."""
    rules = BatchRules(cost=PaddedCost(unit_bytes=1), budget_bytes=100)
    sizes = np.array([10] * 10 + [1] * 50)
    assert filled(sizes, rules) == len(sizes)
