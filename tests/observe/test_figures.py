"""Figures are tested by what they draw: the data of their artists, told apart without colour."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from torchbudget import MemoryBudgetBatchSampler, PackedCost, PaddedCost
from torchbudget.errors import OptionError
from torchbudget.observe.figures import plot_memory, plot_predictions, plot_sizes
from torchbudget.observe.report import MonitorReport
from torchbudget.observe.sample import MemorySample

pytest.importorskip("matplotlib")

MIB = 2**20
TOKENS = PaddedCost(unit_bytes=1)
SIZES = np.random.default_rng(0).integers(10, 200, 500)
HISTORY = (
    MemorySample(time_s=0, host_bytes=MIB, shared_bytes=0),
    MemorySample(time_s=1, host_bytes=None, shared_bytes=MIB),
    MemorySample(time_s=2, host_bytes=2 * MIB, shared_bytes=MIB),
)


def run(*batches: tuple[int, int], **budget: int) -> MonitorReport:
    """A run with a snapshot, and batches of predicted and measured MiB."""
    return MonitorReport(
        begin={"budget": budget, "on_cpu": False},
        history=HISTORY,
        snapshots=(("epoch 1", MemorySample(time_s=1.5)),),
        peak=HISTORY[-1],
        limits=(),
        batches=tuple({"predicted_bytes": p * MIB, "bytes": m * MIB} for p, m in batches),
        end={},
    )


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("cost", [TOKENS, PackedCost(unit_bytes=1), PaddedCost(unit_bytes=(1, 1))])
def test_sizes_are_an_epochs(cost: Any, multiple: int) -> None:
    """On each axis the bars sum up to the epoch's elements, and to its padding."""
    sizes = np.stack([SIZES, SIZES[::-1]], 1)[:, : cost.axes]
    sampler = MemoryBudgetBatchSampler(sizes, cost, 2000, size_multiple=multiple)
    for axis in range(cost.axes):
        data, padding = plot_sizes(sampler.plan, axis=axis).axes[0].containers
        elements, padded = (sum(bar.get_height() for bar in bars) for bars in (data, padding))
        assert elements == sizes[:, axis].sum()
        if cost.axes == 1:
            assert padded / (padded + elements) == pytest.approx(sampler.report().padding)
        assert data[0].get_hatch() != padding[0].get_hatch()
    with pytest.raises(OptionError, match="axis must be 0 to"):
        plot_sizes(sampler.plan, axis=2)


def test_predicted_against_real_bytes() -> None:
    figure = plot_predictions(run((1, 1), (2, 1), (3, 4), device=5 * MIB))
    lines: Any = figure.axes[0].get_lines()
    predicted, measured, budget = lines
    assert predicted.get_ydata().tolist() == [1, 2, 3]
    assert measured.get_ydata().tolist() == [1, 1, 4]
    assert set(budget.get_ydata()) == {5}
    assert len({line.get_linestyle() for line in lines}) == 3


def test_memory_and_its_budgets_over_time() -> None:
    """A line for each number that was read, its budget, and a mark at each snapshot's time."""
    axes = plot_memory(run(host=3 * MIB)).axes[0]
    lines: Any = {line.get_label(): line for line in axes.get_lines()}
    assert lines["host"].get_xydata().tolist() == [[0, 1], [2, 2]]  # what was not read is no gap
    assert lines["shared"].get_ydata().tolist() == [0, 1, 1]
    assert set(lines["budget of host"].get_ydata()) == {3}
    assert lines["host"].get_linestyle() != lines["shared"].get_linestyle()
    assert [text.get_text() for text in axes.texts] == ["epoch 1"]
    assert "device" not in lines
