"""Few shapes: the best ones for the sizes and the budget, and what they are refused with."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import measured
from tests.support.oracles import capacity
from tests.support.samplers import counted
from tests.support.strategies import costs, one_axis_sizes
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PackedCost,
    PadCollate,
    PaddedCost,
    best_shapes,
    plan_step,
)
from torchbudget.checks import shape_of
from torchbudget.errors import (
    CostError,
    MeasureWarning,
    OptionError,
    OversizeError,
    UnevenRanksError,
)

TOKENS = PaddedCost(unit_bytes=1)


def batches_of(sizes: Any, shapes: Any) -> float:
    """Σ over the samples of 1 / the rows of the shortest shape that has room for it."""
    by_length = sorted((length, rows) for rows, length in shapes)
    return sum(1 / next(rows for length, rows in by_length if length >= one) for one in sizes)


@given(
    one_axis_sizes(most=12), costs(packed=False), st.integers(1, 4), st.sampled_from([1, 8]),
    st.integers(1, 30),
)  # fmt: skip
def test_shapes_are_as_good_as_any(
    sizes: Any, cost: Any, number: int, multiple: int, times: int
) -> None:
    """No choice of lengths takes fewer batches; each shape is full, and within the budget."""
    rounded = -(-sizes.astype(np.int64) // multiple) * multiple
    budget = int(cost.batch_bytes(1, rounded.max())) * times
    found = best_shapes(sizes, cost, budget, number, size_multiple=multiple)
    assert found == sorted(found)
    assert len(found) <= number
    rows = {int(one): capacity(cost, one, budget, len(sizes)) for one in np.unique(rounded)}
    assert all(rows[length] == n for n, length in found)
    *others, longest = rows
    choices = [
        [(rows[length], length) for length in (*chosen, longest)]
        for k in range(min(number, len(rows)))
        for chosen in combinations(others, k)
    ]
    least = min(batches_of(rounded, choice) for choice in choices)
    assert batches_of(rounded, found) == pytest.approx(least)


SIZES = np.arange(1, 41)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_shapes": 0}, "max_shapes must be an int of at least 1"),
        ({"max_shapes": "16"}, "max_shapes must be an int, or pairs"),
        ({"max_shapes": [(1, 40), (1, 20)]}, "the longer, the fewer rows"),
        ({"max_shapes": [(1, 41)], "size_multiple": 4}, "multiples of size_multiple=4"),
        ({"max_shapes": [(3, 40)]}, r"the shape \(3, 40\) of max_shapes needs 120 B"),
        ({"max_shapes": [(2, 40)], "max_batch_size": 1}, "2 samples of 1 samples"),
        ({"max_shapes": 4, "batch_size_multiple": 2}, "batch_size_multiple=2"),
        ({"max_shapes": 4, "limits": [(PaddedCost(unit_bytes=1), 90)]}, r"limits\[0\]"),
        ({"max_shapes": 4, "limits": [(PackedCost(unit_bytes=1), 90)]}, r"limits\[0\]"),
        ({"max_shapes": 4, "oversize": "alone"}, "choose oversize='raise' or 'skip'"),
        ({"max_shapes": 4, "cost": PackedCost(unit_bytes=1)}, "got a PackedCost"),
        ({"max_shapes": 4, "sizes": np.ones((40, 2), int),
          "cost": PaddedCost(unit_bytes=(1, 1))}, "sizes of one axis, got sizes of 2 axes"),
        ({"max_shapes": [(1, 39)]}, r"exceed max_shapes alone.*size 40 is larger than the largest"),
        ({"max_shapes": [(1, 40), (2, 30), (3, 20)], "num_replicas": 3, "rank": 0,
          "sizes": [4] * 10}, "cannot be split evenly over 3 ranks in rounds of one shape"),
        ({"max_shapes": 4, "groups": [0, 1] * 20, "samples_per_step": 20, "num_replicas": 2,
          "rank": 0}, "windows that mix groups"),
        ({"max_shapes": 4, "units": (np.arange(40) // 2, "micro_batch")}, "takes no units"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(options: dict[str, Any], said: str) -> None:
    """By a sampler, before its first batch, and by a stream in the same words."""
    sizes, cost = options.pop("sizes", SIZES), options.pop("cost", TOKENS)
    with pytest.raises((OptionError, OversizeError, UnevenRanksError), match=said):
        next(iter(MemoryBudgetBatchSampler(sizes, cost, 100, **options)))
    if options["max_shapes"] == 4:
        options["max_shapes"] = [(2, 50)]
        if np.ndim(sizes) == 1 and not {"groups", "units"} & options.keys():
            with pytest.raises(OptionError, match=said):
                BudgetedIterableDataset([], cost, 100, size=len, **options)


def test_a_stream_needs_shapes_of_its_own() -> None:
    """Their number says nothing where sizes are unknown; several axes are found in its samples."""
    with pytest.raises(OptionError, match="as best_shapes returns"):
        BudgetedIterableDataset([], TOKENS, 100, size=len, max_shapes=4)
    two = PaddedCost(unit_bytes=(1, 1))
    with pytest.raises(CostError, match="2 axes"):
        BudgetedIterableDataset([], two, 100, size=len, max_shapes=[(1, 50)])


def test_a_process_keeps_its_shapes_or_raises() -> None:
    """Under a margin the shapes that it began with stay, or `replan` raises and changes nothing.

    Where a state with a margin is loaded, shapes are chosen for it.
    """
    cost = measured(PaddedCost(unit_bytes=10**6), largest=(1000,))
    sampler = MemoryBudgetBatchSampler(SIZES, cost, 10**8, max_shapes=[(2, 40), (4, 20)])
    with pytest.warns(MeasureWarning):
        cost.observe(2, 40, 85 * 10**6)
    assert sampler.replan() > 0
    state = sampler.state_dict()
    cost.observe(2, 40, 11 * 10**7)
    with pytest.raises(OptionError, match="a process keeps its shapes"):
        sampler.replan()
    assert sampler.shapes == ((2, 40), (4, 20))
    assert counted(sampler) == counted([list(range(40))])
    fewer = MemoryBudgetBatchSampler(SIZES, cost, 5 * 10**7, max_shapes=2)
    before = fewer.shapes
    fewer.load_state_dict(state)
    assert fewer.shapes != before
    assert counted(fewer) == counted([list(range(40))])


def test_a_step_takes_few_shapes() -> None:
    """All ranks of a round have one shape within the budget, to which the collate pads."""
    sizes = np.random.default_rng(0).integers(1, 100, 64)
    step = plan_step(sizes, PaddedCost(unit_bytes=1), 400, num_replicas=4, max_shapes=3)
    rounds = [*zip(*step.micro_batches, strict=True)]
    shapes = [{shape_of(step.shapes, len(b), sizes[b].max()) for b in mine} for mine in rounds]
    assert all(len(found) == 1 for found in shapes)
    assert all(n * length <= 400 for n, length in step.shapes)
    batch = [torch.ones(int(sizes[i])) for i in rounds[0][0]]
    collate = PadCollate(size_multiple=step, row_mask=True)
    assert {tuple(collate(batch).data.shape)} == shapes[0]
