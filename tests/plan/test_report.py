"""A plan reports itself: each figure is that of the batches themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from tests.support.refusals import Refusals, reasons_of
from tests.support.strategies import problems, rules
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.plan.report import PlanReport
from torchbudget.plan.tally import BatchFigures, BudgetShares
from torchbudget.units import MAX_BYTES

TOKENS = PaddedCost(unit_bytes=1)
REFUSALS = Refusals()


@pytest.fixture(scope="module", autouse=True)
def most_cases_are_accepted() -> Iterator[None]:
    yield
    REFUSALS.check()


@st.composite
def reported(draw: st.DrawFn) -> Any:
    """Sizes, cost, budget, ranks, options, and the samplers of all ranks."""
    sizes, cost, budget = draw(problems(most=150))
    ranks = draw(st.integers(1, min(4, len(sizes))))
    window = draw(st.integers(ranks, max(len(sizes), ranks)))
    options: dict[str, Any] = {
        draw(st.sampled_from(["window", "samples_per_step"])): window,
        "seed": draw(st.integers(0, 99)),
        "size_multiple": draw(st.sampled_from([1, 4])),
        "drop_last": draw(st.booleans()),
        **draw(rules(packed=hasattr(cost, "base_bytes"))),
    }
    if "samples_per_step" in options:
        options["samples_per_step"] = min(window, len(sizes))
    largest = -(-sizes.max(axis=0).astype(np.int64) // 4) * 4
    budget = max(budget, int(cost.batch_bytes(1, largest)))
    those = [
        MemoryBudgetBatchSampler(sizes, cost, budget, num_replicas=ranks, rank=rank, **options)
        for rank in range(ranks)
    ]
    reasons = reasons_of(sizes, cost, budget, ranks, options)
    if REFUSALS.accepted(those[0].__len__, reasons) is None:
        reject()  # what cannot be drawn has no report
    return sizes.astype(np.int64), cost, budget, those, options


def rounded(sizes: Any, multiple: int) -> Any:
    return -(-sizes // multiple) * multiple


def bytes_of(sizes: Any, cost: Any, batch: Any, multiple: int) -> int:
    own = rounded(sizes[batch], multiple)
    if hasattr(cost, "base_bytes"):
        return int(cost.base_bytes + cost.item_bytes(own).sum())
    return int(cost.batch_bytes(len(batch), own.max(axis=0)))


def model_bytes(sizes: Any, cost: Any) -> int:
    """What a batch of nothing costs, where the cost says it."""
    found = int(cost.batch_bytes(0, np.zeros_like(sizes[0])))
    return 0 if found == MAX_BYTES else found


def shares_of(
    sizes: Any, cost: Any, budget: int, batches: Any, options: dict[str, Any]
) -> BudgetShares:
    """Where the budget goes, batch by batch and sample by sample."""
    names = BudgetShares.__slots__
    sums = dict.fromkeys(names, 0.0)
    most = options.get("max_batch_size", MAX_BYTES)
    multiple, step = options["size_multiple"], options.get("batch_size_multiple", 1)
    packed = hasattr(cost, "base_bytes")
    for batch in batches:
        n, own = len(batch), sizes[batch]
        total = bytes_of(sizes, cost, batch, multiple)
        model = min(model_bytes(sizes, cost), total)
        if packed:
            real = cost.base_bytes + int(cost.item_bytes(own).sum())
        else:
            each = [int(cost.batch_bytes(n, size)) for size in own]
            real = sum(min(one, budget + 1) if one == MAX_BYTES else one for one in each) / n
        real = min(max(real, model), total)
        sums["model"] += model
        sums["data"] += real - model
        sums["padding"] += total - real
        if packed:
            smallest = int(cost.item_bytes(rounded(sizes.min(axis=0), multiple)))
            fits, allowed = smallest <= max(budget - total, 0), n < most
        else:
            fitting = int(cost.capacity(rounded(own.max(axis=0), multiple), budget))
            capped = min(fitting, most)
            capped = capped - capped % step if capped >= step else capped
            fits, allowed = n < fitting, n < capped
        cause = "no_room" if not fits else "left_over" if allowed else "limited"
        sums[cause] += max(budget - total, 0)
    whole = max(len(batches), 1) * budget
    return BudgetShares(**{name: value / whole for name, value in sums.items()})


def figures_of(
    sizes: Any, cost: Any, budget: int, batches: Any, options: dict[str, Any]
) -> BatchFigures:
    """The figures, batch by batch and element by element."""
    multiple = options["size_multiple"]
    columns = sizes.reshape(len(sizes), -1)
    axes = columns.shape[1]
    real, padded = np.zeros(axes), np.zeros(axes)
    costs = []
    for batch in batches:
        own = rounded(columns[batch], multiple)
        real += columns[batch].sum(axis=0)
        if hasattr(cost, "base_bytes"):
            padded += own.sum(axis=0)
        else:
            padded += own.max(axis=0) * len(batch)
        costs.append(bytes_of(sizes, cost, batch, multiple))

    def share(part: float, whole: float) -> float:
        return 1 - part / whole if whole else 0.0

    numbers = [len(batch) for batch in batches]
    return BatchFigures(
        batches=len(batches),
        samples=sum(numbers),
        fill=float(np.mean(costs)) / budget if costs else 0.0,
        shares=shares_of(sizes, cost, budget, batches, options),
        padding=share(real.sum(), padded.sum()),
        axis_padding=tuple(share(*pair) for pair in zip(real, padded, strict=True)),
        smallest=min(numbers, default=0),
        largest=max(numbers, default=0),
        over_budget=sum(cost > budget for cost in costs),
    )


def assert_alike(found: BatchFigures, expected: BatchFigures) -> None:
    for name, value in dataclasses.asdict(expected).items():
        got = getattr(found, name)
        if name == "shares":
            got = dataclasses.asdict(got)
        assert got == pytest.approx(value, rel=1e-9, abs=1e-9), name


@given(reported())
def test_a_report_is_that_of_the_batches(case: Any) -> None:
    """Fill, padding per axis, numbers, steps and imbalance follow from what the ranks draw."""
    sizes, cost, budget, those, options = case
    report = those[0].report()
    steps = list(those[0].steps)
    epochs = [list(sampler) for sampler in those]
    multiple = options["size_multiple"]
    batches = [batch for mine in epochs for batch in mine]
    assert_alike(report.plan, figures_of(sizes, cost, budget, batches, options))
    assert report.ranks == len(those)
    assert report.steps == len(steps)
    assert report.skipped == 0
    assert report.dropped == len(sizes) - report.plan.samples
    costs = np.array(
        [[bytes_of(sizes, cost, batch, multiple) for batch in mine] for mine in epochs], np.float64
    )
    if batches:
        ends = np.cumsum(steps)
        per_step = np.add.reduceat(costs, ends - steps, axis=1)
        imbalance = per_step.max(axis=0).sum() / per_step.mean(axis=0).sum()
        assert report.imbalance == pytest.approx(imbalance if costs.any() else 1.0)
    assert report.imbalance >= 1 - 1e-12


@given(reported())
def test_fixed_batches_are_the_largest_that_always_fit(case: Any) -> None:
    """Beside the plan stand batches of one number, in the same random order, none over budget."""
    sizes, cost, budget, those, options = case
    report = those[0].report()
    multiple = options["size_multiple"]
    largest = rounded(sizes.max(axis=0), multiple)
    number = min(int(cost.capacity(largest, budget)), options.get("max_batch_size", 2**62))
    step = options.get("batch_size_multiple", 1)
    number = number - number % step if number >= step else number
    number = min(number, len(sizes))
    order = those[0].plan.order.epoch(0).indices(0, len(sizes))
    batches = [order[start : start + number] for start in range(0, len(sizes), number)]
    assert_alike(report.fixed, figures_of(sizes, cost, budget, batches, options))
    assert report.fixed.over_budget == 0


def test_the_table() -> None:
    """For people: the plan beside fixed batches, and one line for the rest."""
    sizes = np.repeat([10, 20, 40], [40, 20, 10])
    sampler = MemoryBudgetBatchSampler(sizes, TOKENS, 80, shuffle=False)
    lines = str(sampler.report()).splitlines()
    assert [line[:53].rstrip() for line in lines[:9]] == [
        "                     torchbudget  fixed batches of 2",
        "batches              15           35",
        "samples in a batch   2 to 8       2 to 2",
        "fill of the budget   100.0%       42.9%",
        "  by the model       0.0%         0.0%",
        "  by data            100.0%       42.9%",
        "  by padding         0.0%         0.0%",
        "padding of elements  0.0%         0.0%",
        "batches over budget  0            0",
    ]
    assert lines[0].endswith("2 of similar length  at most 80 tokens")
    assert lines[9:] == [
        "empty: 0.0% no room for another sample, 0.0% option limits, 0.0% left over by windows",
        "70 samples in 15 steps (1 windows) on 1 rank(s), imbalance 1.0000, dropped 0, skipped 0",
    ]


def test_the_table_has_columns_and_no_loose_ends() -> None:
    """Columns are as wide as their widest cell; numbers have thousands, shares one digit."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 500, 30_000)
    text = str(MemoryBudgetBatchSampler(sizes, TOKENS, 1000).report())
    lines = text.splitlines()
    assert len(lines) == 12  # the last one is an advice
    assert not any(line != line.rstrip() for line in lines)
    column = lines[0].index("torchbudget")
    assert all(line[column - 1] == " " and line[column] != " " for line in lines[:9])
    assert "30,000 samples" in lines[10]
    assert "%" in lines[3]


def test_a_report_is_a_value() -> None:
    """Frozen, equal to the report of the same epoch, and only read from."""
    sampler = MemoryBudgetBatchSampler(np.arange(1, 100), TOKENS, 300)
    report = sampler.report()
    assert isinstance(report, PlanReport)
    assert report == sampler.report()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.steps = 0  # type: ignore[misc]


def test_reporting_draws_nothing() -> None:
    """A report leaves the sampler where it stands, also within an epoch."""
    sampler = MemoryBudgetBatchSampler(np.arange(1, 100), TOKENS, 300)
    expected = list(MemoryBudgetBatchSampler(np.arange(1, 100), TOKENS, 300))
    batches = iter(sampler)
    drawn = [next(batches) for _ in range(3)]
    state = sampler.state_dict()
    sampler.report()
    assert sampler.state_dict() == state
    assert drawn + list(batches) == expected


def test_the_report_is_of_the_coming_epoch() -> None:
    """With replacement epochs hold different samples, and so do their reports."""
    sampler = MemoryBudgetBatchSampler(np.arange(1, 200), TOKENS, 500, replacement=True)
    first = sampler.report()
    list(sampler)
    assert sampler.report() != first
    sampler.set_epoch(0)
    assert sampler.report() == first


def test_skipped_and_dropped_are_counted() -> None:
    sizes = [5, 500, 5, 5, 500, 5, 5]
    skipping = MemoryBudgetBatchSampler(sizes, TOKENS, 10, oversize="skip")
    assert (skipping.report().skipped, skipping.report().dropped) == (2, 0)
    dropping = MemoryBudgetBatchSampler([5] * 7, TOKENS, 10, samples_per_step=3, drop_last=True)
    assert (dropping.report().skipped, dropping.report().dropped) == (0, 1)
    alone = MemoryBudgetBatchSampler(sizes, TOKENS, 10, oversize="alone")
    assert alone.report().plan.over_budget == 2


def test_sizes_of_zero_have_no_padding() -> None:
    """Nothing divided by nothing is no padding."""
    report = MemoryBudgetBatchSampler([0, 0, 0], PaddedCost(sample_bytes=1), 2).report()
    assert report.plan.padding == 0
    assert report.plan.axis_padding == (0.0,)
    assert report.plan.batches == 2


def test_packed_padding_is_that_of_rounding_up() -> None:
    """Packed batches are padded by nothing but `size_multiple`."""
    cost = PackedCost(unit_bytes=1)
    assert MemoryBudgetBatchSampler([5, 6, 7], cost, 100).report().plan.padding == 0
    report = MemoryBudgetBatchSampler([5, 6, 7], cost, 100, size_multiple=8).report()
    assert report.plan.padding == pytest.approx(1 - 18 / 24)


def test_padding_of_each_axis() -> None:
    """By hand: two samples padded to (4, 9)."""
    cost = PaddedCost(unit_bytes=(1, 1))
    report = MemoryBudgetBatchSampler([[4, 3], [2, 9]], cost, 26).report()
    assert report.plan.axis_padding == pytest.approx((1 - 6 / 8, 1 - 12 / 18))
    assert report.plan.padding == pytest.approx(1 - 18 / 26)
    assert report.plan.fill == 1


# ---------------------------------------------------------------------- how good it is


@pytest.fixture(scope="module")
def lognormal() -> Any:
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(5, 1, 200_000), 16, 4096).astype(np.int64)


def test_lognormal_lengths_fill_the_budget(lognormal: Any) -> None:
    """Windows of 4,096 and 16,384 tokens: padding below 3.65 %, fill above 0.972, none over.

    A buffer of batches by length buckets pads such data by 8 %, and overruns its budget.
    """
    report = MemoryBudgetBatchSampler(lognormal, TOKENS, 16_384, window=4096).report()
    assert report.plan.padding <= 0.0365
    assert report.plan.fill >= 0.972
    assert report.plan.over_budget == 0
    assert report.plan.samples == len(lognormal)
    assert report.fixed.fill < 0.3
    assert report.fixed.padding > 0.5


def test_no_more_batches_than_the_greedy_cut(lognormal: Any) -> None:
    """As many micro-batches as cutting each window greedily from its longest sample on."""
    sampler = MemoryBudgetBatchSampler(lognormal, TOKENS, 16_384, window=4096)
    order = sampler.plan.order.epoch(0).indices(0, len(lognormal))
    greedy = 0
    for start in range(0, len(order), 4096):
        ordered = -np.sort(-lognormal[order[start : start + 4096]])
        at = 0
        while at < len(ordered):
            at += 16_384 // int(ordered[at])
            greedy += 1
    assert len(sampler) <= greedy


def test_a_larger_window_pads_less(lognormal: Any) -> None:
    """What a window costs in padding is what the documentation says of it."""
    padding = [
        MemoryBudgetBatchSampler(lognormal, TOKENS, 16_384, window=window).report().plan.padding
        for window in (256, 1024, 4096, 16_384)
    ]
    assert padding == sorted(padding, reverse=True)


def test_packing_leaves_next_to_nothing(lognormal: Any) -> None:
    """Without padding, windows of 4,096 fill the budget to 99 %."""
    cost = PackedCost(unit_bytes=1)
    report = MemoryBudgetBatchSampler(lognormal[:100_000], cost, 16_384, window=4096).report()
    assert report.plan.padding == 0
    assert report.plan.fill > 0.985
    assert report.plan.over_budget == 0
