"""Figures are tested by what they draw: the data of their artists, and that grey tells it too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.costs import forms_of
from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.cost.models.probe import Probe
from torchbudget.errors import MissingExtraError, OptionError
from torchbudget.observe.figures import (
    plot_batch,
    plot_cost,
    plot_memory,
    plot_predictions,
    plot_sizes,
)

pytest.importorskip("matplotlib")

TOKENS = PaddedCost(unit_bytes=1)
MIB = 2**20


def sampler(cost: Any = TOKENS, **options: Any) -> MemoryBudgetBatchSampler:
    sizes = np.random.default_rng(0).integers(10, 200, 500)
    return MemoryBudgetBatchSampler(sizes, cost, 2000, **options)


def measured() -> MeasuredCost:
    probes = tuple(
        Probe(n=n, size=(size,), peak_bytes=n * size * MIB, how="run", held_out=n > 2)
        for n, size in ((1, 8), (2, 32), (4, 16))
    )
    return MeasuredCost(forms=forms_of(PaddedCost(unit_bytes=MIB)), margin=0.0, probes=probes)


def widths_of(bars: Any) -> list[float]:
    return [bar.get_width() for bar in bars]


def is_told_without_colour(artists: Any) -> bool:
    """Every pair differs by hatch or by a clear step of grey."""
    looks = [(one[0].get_hatch(), sum(one[0].get_facecolor()[:3]) / 3) for one in artists]
    return all(
        a[0] != b[0] or abs(a[1] - b[1]) > 0.15
        for number, a in enumerate(looks)
        for b in looks[:number]
    )


@pytest.mark.parametrize("cost", [TOKENS, PackedCost(unit_bytes=1)])
@pytest.mark.parametrize("multiple", [1, 16])
def test_sizes_are_those_of_an_epoch(cost: Any, multiple: int) -> None:
    """The bars sum up to the epoch's elements, and to its padding."""
    planned = sampler(cost, size_multiple=multiple)
    data, padding = plot_sizes(planned.plan).axes[0].containers
    elements = sum(bar.get_height() for bar in data)
    assert elements == planned.plan.sizes.values.sum()
    padded = sum(bar.get_height() for bar in padding)
    assert padded / (padded + elements) == pytest.approx(planned.report().padding)
    for bar, above in zip(data, padding, strict=True):
        assert above.get_y() == pytest.approx(bar.get_height())
    assert is_told_without_colour([data, padding])


def test_sizes_of_one_of_several_axes() -> None:
    sizes = np.random.default_rng(0).integers(1, 99, (300, 2))
    planned = MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=(1, 1)), 5000)
    for axis in (0, 1):
        data, padding = plot_sizes(planned.plan, axis=axis).axes[0].containers
        elements = sum(bar.get_height() for bar in data)
        padded = sum(bar.get_height() for bar in padding)
        assert elements == sizes[:, axis].sum()
        expected = planned.report().axis_padding[axis]
        assert padded / (padded + elements) == pytest.approx(expected)
    with pytest.raises(OptionError, match="axis must be 0 to 1"):
        plot_sizes(planned.plan, axis=2)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.sampled_from([1, 8]))
def test_a_batch_is_as_wide_as_it_is_padded(sizes: list[int], multiple: int) -> None:
    """Each sample's bar and its padding end where the batch ends."""
    axes = plot_batch(sizes, size_multiple=multiple).axes[0]
    data, padding = axes.containers
    assert widths_of(data) == sizes
    padded = -(-max(sizes) // multiple) * multiple
    for bar in padding:
        assert bar.get_x() + bar.get_width() == padded
    assert axes.get_title().startswith(f"{len(sizes)} samples, ")
    assert is_told_without_colour([data, padding])


def test_a_batch_needs_sizes_of_one_axis() -> None:
    for wrong in ([], [[1, 2]]):
        with pytest.raises(OptionError, match=r"shape \(n,\)"):
            plot_batch(wrong)


def test_a_costs_probes_and_frontier() -> None:
    """Points stand at the probes, by kind; the line is the capacity under the budget."""
    axes = plot_cost(measured(), budget_bytes=64 * MIB).axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert lines["probe"].get_xydata().tolist() == [[8, 1], [32, 2]]
    assert lines["held out"].get_xydata().tolist() == [[16, 4]]
    assert lines["probe"].get_marker() != lines["held out"].get_marker()
    sizes, numbers = lines["budget"].get_xydata().T
    assert numbers == pytest.approx(64 // sizes)
    levels = axes.collections[0].levels
    assert levels[-1] == pytest.approx(32 * 64)  # MiB of the longest and the most


def test_a_cost_that_was_not_measured() -> None:
    axes = plot_cost(TOKENS, max_size=100).axes[0]
    assert axes.get_lines()[:] == []
    assert axes.get_xlim()[1] == 100
    with pytest.raises(OptionError, match="max_size is needed"):
        plot_cost(TOKENS)
    with pytest.raises(OptionError, match="one ragged axis"):
        plot_cost(PaddedCost(unit_bytes=(1, 1)), max_size=9)


def test_predictions_that_were_too_low_have_another_marker() -> None:
    figure = plot_predictions([MIB, 2 * MIB, 3 * MIB], [MIB, MIB, 4 * MIB], budget_bytes=5 * MIB)
    left, right = figure.axes
    predicted, real, budget = left.get_lines()
    assert predicted.get_ydata().tolist() == [1, 2, 3]
    assert real.get_ydata().tolist() == [1, 1, 4]
    assert set(budget.get_ydata()) == {5}
    assert len({line.get_linestyle() for line in (predicted, real, budget)}) == 3
    _, within, over = right.get_lines()
    assert within.get_xydata().tolist() == [[1, 1], [2, 1]]
    assert over.get_xydata().tolist() == [[3, 4]]
    assert within.get_marker() != over.get_marker()
    for wrong in (([], []), ([1, 2], [1])):
        with pytest.raises(OptionError, match="as many predicted as measured"):
            plot_predictions(*wrong)


def test_memory_and_its_budgets_over_time() -> None:
    """A line for each series, its budget in the same style, and a mark at its time."""
    figure = plot_memory(
        [0, 1, 2],
        {"host": [MIB, 2 * MIB, np.nan], "device": [0, MIB, MIB]},
        budget_bytes={"host": 3 * MIB},
        marks=[(1.5, "epoch 1")],
    )
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert lines["host"].get_xydata().tolist() == [[0, 1], [1, 2]]  # what was not read is no gap
    assert lines["device"].get_ydata().tolist() == [0, 1, 1]
    assert set(lines["budget of host"].get_ydata()) == {3}
    assert lines["host"].get_linestyle() != lines["device"].get_linestyle()
    assert [text.get_text() for text in figure.axes[0].texts] == ["epoch 1"]
    with pytest.raises(OptionError, match="host has"):
        plot_memory([0, 1], {"host": [1]})


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_every_figure_can_be_written(tmp_path: Path, suffix: str) -> None:
    planned = sampler()
    for number, figure in enumerate(
        (
            plot_sizes(planned.plan),
            plot_batch([3, 4]),
            plot_cost(measured(), budget_bytes=64 * MIB),
            plot_predictions([1], [2]),
            plot_memory([0], {"host": [1]}),
        )
    ):
        path = tmp_path / f"{number}.{suffix}"
        figure.savefig(path)
        assert path.stat().st_size > 1000


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed: importing it fails."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*\[plot\]"):
        plot_batch([1])
