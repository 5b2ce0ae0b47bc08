"""The report and the figure of a measured cost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.training_cases import CASES
from torchbudget import measure_cost
from torchbudget.errors import MissingExtraError


def test_the_report_and_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    training = CASES["heavy"]()
    cost = measure_cost(training.step, training.make_batch, max_size=100, method="trace")
    report = cost.report()
    assert report.count("trace") == len(cost.probes)
    assert "margin: 0.500%" in report
    assert "held out" in report
    cost.plot().savefig(tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 5000


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed: importing it fails."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    training = CASES["heavy"]()
    cost = measure_cost(training.step, training.make_batch, max_size=100, method="trace")
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*\[plot\]"):
        cost.plot()
