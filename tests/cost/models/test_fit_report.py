"""The report and the figure of a measured cost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.training_cases import CASES
from torchbudget import MeasuredCost, measure_cost
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term
from torchbudget.cost.models.probe import Probe
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


def test_the_figure_shows_each_probe_its_error_and_the_margin() -> None:
    """Fitted against measured MiB beside a diagonal; errors in percent above a line."""
    pytest.importorskip("matplotlib")
    probes = [
        Probe(n, (size,), 2**20 * n * size, held_out, "trace")
        for n, size, held_out in ((1, 2, False), (2, 4, False), (3, 9, True))
    ]
    form = Form(terms=(Term(1.1 * 2**20, 1, (1,)),))
    cost = MeasuredCost(forms=(form,), margin=0.25, probes=tuple(probes))
    left, right = cost.plot().axes
    diagonal, fitted, held_out = left.get_lines()
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [2, 27]
    assert list(fitted.get_xdata()) == [2, 8]
    assert list(fitted.get_ydata()) == pytest.approx([2.2, 8.8])
    assert list(held_out.get_xdata()) == [27]
    assert list(held_out.get_ydata()) == pytest.approx([29.7])
    errors, of_held_out, margin = right.get_lines()
    assert list(errors.get_ydata()) == pytest.approx([10, 10], rel=1e-4)
    assert list(of_held_out.get_ydata()) == pytest.approx([10], rel=1e-4)
    assert list(margin.get_ydata()) == [-25, -25]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["fitted", "held out"]
    assert left.get_xlabel() == "measured, MiB"
    assert left.get_ylabel() == "fitted, MiB"
    assert right.get_ylabel() == "error, %"
    assert left.get_xscale() == left.get_yscale() == right.get_xscale() == "log"


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed: importing it fails."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    training = CASES["heavy"]()
    cost = measure_cost(training.step, training.make_batch, max_size=100, method="trace")
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*\[plot\]"):
        cost.plot()
