"""A plan reports itself: each figure is that of the batches themselves."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from tests.support.oracles import bytes_of
from tests.support.refusals import REFUSALS, reasons_of
from tests.support.sampler_cases import samplers
from tests.support.strategies import limits, problems, rules
from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost

TOKENS = PaddedCost(unit_bytes=1)


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
    largest = rounded(sizes.max(axis=0).astype(np.int64), options["size_multiple"])
    options["limits"] = draw(limits(largest, packed=hasattr(cost, "base_bytes")))
    if "samples_per_step" in options:
        options["samples_per_step"] = min(window, len(sizes))
    budget = max(budget, int(cost.batch_bytes(1, largest)))
    those = samplers(sizes, cost, budget, ranks, **options)
    reasons = reasons_of(sizes, cost, budget, ranks, options)
    if REFUSALS.accepted(those[0].__len__, reasons) is None:
        reject()  # what cannot be drawn has no report
    return sizes.astype(np.int64), cost, budget, those, options


def rounded(sizes: Any, multiple: int) -> Any:
    return -(-sizes // multiple) * multiple


def figures_of(
    sizes: Any, cost: Any, budget: int, batches: Any, options: dict[str, Any]
) -> dict[str, Any]:
    """The figures, batch by batch and element by element."""
    multiple = options["size_multiple"]
    columns = sizes.reshape(len(sizes), -1)
    real, padded = np.zeros(columns.shape[1]), np.zeros(columns.shape[1])
    for batch in batches:
        own = rounded(columns[batch], multiple)
        real += columns[batch].sum(axis=0)
        packed = hasattr(cost, "base_bytes")
        padded += own.sum(axis=0) if packed else own.max(axis=0) * len(batch)

    def share(part: float, whole: float) -> float:
        return 1 - part / whole if whole else 0.0

    caps = [(cost, budget), *options["limits"]]
    if "max_batch_size" in options:
        caps.insert(1, (PackedCost(sample_bytes=1), options["max_batch_size"]))
    costs = [bytes_of(sizes, cost, batch, multiple) for batch in batches]
    shares = np.array(
        [[bytes_of(sizes, one, own, multiple) / amount for one, amount in caps] for own in batches]
    )
    numbers = [len(batch) for batch in batches]
    return {
        "batches": len(batches),
        "samples": sum(numbers),
        "fill": float(np.mean(costs)) / budget if costs else 0.0,
        "limits": tuple(shares.mean(axis=0)) if costs else (0.0,) * len(caps),
        "ended": tuple(
            (shares.argmax(axis=1) == k).mean() if costs else 0 for k in range(len(caps))
        ),
        "padding": share(real.sum(), padded.sum()),
        "axis_padding": tuple(share(*pair) for pair in zip(real, padded, strict=True)),
        "smallest": min(numbers, default=0),
        "largest": max(numbers, default=0),
        "over_budget": sum(cost > budget for cost in costs),
        "dropped": len(sizes) - sum(numbers),
        "skipped": 0,
    }


@given(reported())
def test_a_report_is_that_of_the_batches(case: Any) -> None:
    """Fill, padding per axis, numbers, steps and imbalance follow from what the ranks draw."""
    sizes, cost, budget, those, options = case
    report = those[0].report()
    epochs = [list(sampler) for sampler in those]  # a report leaves samplers where they stand
    steps = np.array(those[0].steps)
    multiple = options["size_multiple"]
    batches = [batch for mine in epochs for batch in mine]
    figures = figures_of(sizes, cost, budget, batches, options)
    used = {
        "limits": [one.fill for one in report.limits],
        "ended": [one.ended for one in report.limits],
    }
    for name, values in used.items():
        assert values == pytest.approx(figures.pop(name)), name
    for name, value in figures.items():
        assert getattr(report, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert report.ranks == len(those)
    assert report.steps == len(steps)
    costs = np.array(
        [[bytes_of(sizes, cost, batch, multiple) for batch in mine] for mine in epochs], np.float64
    )
    if batches:
        ends = np.cumsum(steps)
        per_step = np.add.reduceat(costs, ends - steps, axis=1)
        imbalance = per_step.max(axis=0).sum() / per_step.mean(axis=0).sum()
        assert report.imbalance == pytest.approx(imbalance if costs.any() else 1.0)
    assert report.imbalance >= 1 - 1e-12


def test_the_table() -> None:
    """One figure in each row; over budget, on ranks, left out: where there are any."""
    sizes = np.repeat([10, 20, 40], [40, 20, 10])
    sampler = MemoryBudgetBatchSampler(sizes, TOKENS, 80, shuffle=False)
    assert str(sampler.report()).splitlines() == [
        "micro-batches        15",
        "samples              70, 2 to 8 in a batch",
        "optimizer steps      15 of 4.7 samples",
        "fill of the budget   100.0%",
        "padded elements      1,200",
        "padding of elements  0.0%",
    ]
    options: dict[str, Any] = {"num_replicas": 2, "rank": 0, "drop_last": True}
    table = str(MemoryBudgetBatchSampler(sizes, TOKENS, 39, oversize="skip", **options).report())
    for row in ("on 2 ranks", "imbalance of ranks   1.", "dropped, 10 skipped"):
        assert row in table
    alone = MemoryBudgetBatchSampler(sizes, TOKENS, 39, oversize="alone")
    assert alone.report().over_budget == 10


def test_limits_have_rows() -> None:
    """The fill of each, with its unit, and the share of batches that it ended."""
    limits = [(PackedCost(unit_bytes=1, unit="nodes"), 100), (PaddedCost(sample_bytes=3), 60)]
    sampler = MemoryBudgetBatchSampler([10] * 30, TOKENS, 400, max_batch_size=20, limits=limits)
    table = str(sampler.report())
    assert re.search(r"fill of the budget +25\.0%, ended 0\.0% of the batches", table)
    assert re.search(r"fill of max_batch_size +50\.0% of 20 samples, ended 0\.0%", table)
    assert re.search(r"fill of limits\[0\] +100\.0% of 100 nodes, ended 100\.0%", table)
    assert re.search(r"fill of limits\[1\] +50\.0% of 60 B, ended 0\.0%", table)


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
    assert report.padding <= 0.0365
    assert report.fill >= 0.972
    assert report.over_budget == 0
    assert report.samples == len(lognormal)


def test_packing_leaves_next_to_nothing(lognormal: Any) -> None:
    """Without padding, windows of 4,096 fill the budget to 99 %."""
    cost = PackedCost(unit_bytes=1)
    report = MemoryBudgetBatchSampler(lognormal[:100_000], cost, 16_384, window=4096).report()
    assert report.padding == 0
    assert report.fill > 0.985
    assert report.over_budget == 0
