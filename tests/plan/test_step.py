"""`plan_step`: a step that is in memory, cut for the budget and dealt evenly; and few shapes."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import measured
from tests.support.oracles import bytes_of, capacity
from tests.support.sampler_cases import check_units, together, whole_bytes
from tests.support.samplers import TOKENS, counted
from tests.support.strategies import costs, limits, one_axis_sizes, problems, rules
from torchbudget import (
    BudgetedIterableDataset,
    MemoryBudgetBatchSampler,
    PackedCost,
    PadCollate,
    PaddedCost,
    TableCost,
    best_shapes,
    plan_step,
)
from torchbudget.checks import shape_of
from torchbudget.cost.protocol import AdditiveCost
from torchbudget.errors import (
    BudgetError,
    CostError,
    MeasureWarning,
    OptionError,
    OversizeError,
    SizesError,
    UnevenRanksError,
)


@given(
    problems(most=120),
    st.data(),
    st.integers(1, 8),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from([1, 1, 8]),
)
def test_laws_of_a_step(
    problem: Any, data: Any, ranks: int, multiple: int, size_multiple: int
) -> None:
    """Each sample once, none over, as many on every rank, multiples; `inverse` restores the order.

    The one refusal is of too few samples, and as many as its message asks for, of the same sizes,
    are not refused for having too few.
    """
    sizes, cost, budget = problem
    options = data.draw(rules(packed=isinstance(cost, AdditiveCost)))
    largest = -(-sizes.astype(np.int64).max(axis=0) // size_multiple) * size_multiple
    budget = max(budget, bytes_of(largest[None], cost, [0]))
    options |= {
        "limits": data.draw(limits(largest, packed=isinstance(cost, AdditiveCost))),
        "groups": np.arange(len(sizes)) % data.draw(st.integers(1, 3)),
        "num_replicas": ranks,
        "micro_batches_multiple": multiple,
        "size_multiple": size_multiple,
    }
    form = data.draw(st.sampled_from([None, None, "rank", "micro_batch"]))
    if form is not None and not isinstance(cost, TableCost):
        seed, whole = data.draw(st.integers(0, 2**32)), form == "micro_batch"
        together(seed, sizes, options, whole=whole)
        budget = max(budget, whole_bytes(sizes, cost, options))
    try:
        step = plan_step(sizes, cost, budget, **options)
    except UnevenRanksError as error:
        if "units" in options:
            return
        wanted = int(str(error).split("at least ")[1].split()[0])
        assert wanted > len(sizes)
        assert wanted % (ranks * multiple) == 0
        return
    micro_batches = step.micro_batches
    assert len(micro_batches) == ranks
    assert {len(mine) for mine in micro_batches} == {len(micro_batches[0])}
    assert len(micro_batches[0]) % multiple == 0
    joined = [index for mine in micro_batches for batch in mine for index in batch]
    assert np.array(joined)[step.inverse].tolist() == list(range(len(sizes)))
    most = options.get("max_batch_size")
    if "units" in options:
        check_units(micro_batches, [len(micro_batches[0])], options)
    for batch in (batch for mine in micro_batches for batch in mine):
        for model, amount in [(cost, budget), *options["limits"]]:
            assert bytes_of(sizes, model, batch, size_multiple) <= amount
        assert len(set(options["groups"][batch])) == 1
        assert most is None or len(batch) <= most
    again = plan_step(sizes, cost, budget, **options)
    assert again.micro_batches == micro_batches


@given(problems(most=80, fits=False), st.integers(1, 4))
def test_oversize_samples_are_skipped_or_alone(problem: Any, ranks: int) -> None:
    """Skipped: named, and in no micro-batch. Alone: a micro-batch each. Otherwise an error."""
    sizes, cost, budget = problem
    over = [i for i in range(len(sizes)) if bytes_of(sizes, cost, [i]) > budget]
    if not over or len(over) == len(sizes):
        return
    with pytest.raises(OversizeError, match=f"the first at index {over[0]}"):
        plan_step(sizes, cost, budget, num_replicas=ranks)
    for oversize in ("skip", "alone"):
        try:
            step = plan_step(sizes, cost, budget, num_replicas=ranks, oversize=oversize)
        except UnevenRanksError:
            continue
        batches = [batch for mine in step.micro_batches for batch in mine]
        joined = [index for batch in batches for index in batch]
        if oversize == "skip":
            assert step.skipped_samples.tolist() == over
            kept = [i for i in range(len(sizes)) if i not in over]
            assert np.array(joined)[step.inverse].tolist() == kept
        else:
            assert step.skipped_samples.size == 0
            assert all([i] in batches for i in over)
            assert sorted(joined) == list(range(len(sizes)))


@pytest.mark.parametrize("ranks", [8, 64])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("cost", "budget", "bound"),
    [
        (TOKENS, 16_384, {8: 0.003, 64: 0.02}),
        (PackedCost(unit_bytes=1), 16_384, {8: 0.003, 64: 0.02}),
        (PaddedCost(pair_bytes=1), 2 * 4096**2, {8: 0.01, 64: 0.02}),
    ],
    ids=["linear", "packed", "quadratic"],
)
def test_ranks_do_the_same_work(
    cost: Any, budget: int, bound: dict[int, float], ranks: int, seed: int
) -> None:
    """4,096 log-normal lengths: the costliest rank is near the mean, or is one sample alone."""
    sizes = np.clip(np.random.default_rng(seed).lognormal(5, 1, 4096), 16, 4096).astype(np.int64)
    step = plan_step(sizes, cost, budget, num_replicas=ranks)
    sums = np.array(
        [sum(bytes_of(sizes, cost, batch) for batch in mine) for mine in step.micro_batches]
    )
    largest = bytes_of(sizes, cost, [int(sizes.argmax())])
    assert sums.max() / sums.mean() <= max(1, largest / sums.mean()) + bound[ranks]


@pytest.mark.parametrize(("ranks", "most"), [(8, 1.002), (64, 1.01)])
def test_packed_samples_are_balanced_by_their_work(ranks: int, most: float) -> None:
    """4,096 rollouts of 512 prompts, whose work is quadratic: no rank is far above the mean.

    They take the least number of micro-batches that the ranks can share, and none is over.
    """
    rng = np.random.default_rng(0)
    each = rng.lognormal(7, 0.8, (512, 1)) * rng.lognormal(0, 0.5, (512, 8))
    sizes = np.clip(each, 16, 16_384).astype(np.int64).reshape(-1)
    cost, work = PackedCost(unit_bytes=1), PackedCost(unit_bytes=24_576, pair_bytes=1)
    step = plan_step(sizes, cost, 32_768, num_replicas=ranks, time=work)
    batches = [sizes[batch].sum() for mine in step.micro_batches for batch in mine]
    assert max(batches) <= 32_768
    assert len(batches) == -(-sizes.sum() // (32_768 * ranks)) * ranks
    done = [np.concatenate(mine) for mine in step.micro_batches]
    sums = np.array([work.item_bytes(sizes[mine]).sum() for mine in done])
    assert sums.max() / sums.mean() <= most
    assert step.report().imbalance == pytest.approx(sums.max() / sums.mean())


@pytest.mark.parametrize(
    ("sizes", "cost", "budget", "options", "error", "match"),
    [
        ([], TOKENS, 10, {}, SizesError, "no samples"),
        ([1], TOKENS, None, {}, BudgetError, "must state at least one"),
        ([1], TOKENS, 9, {"num_replicas": 0}, OptionError, "num_replicas must be an int of at"),
        ([1], TOKENS, 9, {"micro_batches_multiple": True}, OptionError, "must be an int"),
        ([1], TOKENS, 9, {"time": "time"}, OptionError, "time must be a cost model"),
        ([1], PackedCost(unit_bytes=1), 9, {"time": TOKENS}, OptionError, "be a PackedCost"),
        ([1], TOKENS, 9, {"num_replicas": 4}, UnevenRanksError, "use at least 4 samples"),
    ],
    ids=str,
)
def test_bad_input(
    sizes: Any, cost: Any, budget: Any, options: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        plan_step(sizes, cost, budget, **options)


# ---------------------------------------------------------------------- few shapes


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
