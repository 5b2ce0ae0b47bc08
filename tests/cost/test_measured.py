"""The measured cost as a value: margin, time, files, and what training observes."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.costs import Nodes, measured, piece
from torchbudget import MemoryBudgetBatchSampler, PaddedCost, load_cost
from torchbudget.cost.pieces import Grid, Probe
from torchbudget.errors import CostError, MeasureWarning, MissingExtraError
from torchbudget.machine.peaks import Peak
from torchbudget.units import MAX_BYTES


def test_a_cost_that_cannot_be_saved_leaves_the_one_of_before(tmp_path: Path) -> None:
    """A file that may not grow, as on a full disk: none that is cut off, and nothing beside it."""
    path = tmp_path / "cost.json"
    measured(margin=0.01).save(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            measured(margin=0.02).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_cost(path).margin == 0.01
    assert list(tmp_path.iterdir()) == [path]


def test_observed_steps_correct_the_margin() -> None:
    """One warning for all that is over; the cost with the observed margin covers it."""
    cost = measured(margin=0.01)
    for needed in (900_000, int(cost.batch_bytes(10, 100))):  # as predicted is not more
        cost.observe(10, 100, needed)
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning, match=r"needed .*with_observed_margin"):
        cost.observe(10, 100, Peak(bytes=1_100_000))
    cost.observe(20, 100, 2_300_000)  # warnings are errors here: no second one
    assert cost.with_observed_margin().batch_bytes(20, 100) >= 2_300_000
    assert cost.batch_bytes(20, 100) < 2_300_000


def test_a_caching_allocator_keeps_what_the_largest_step_took() -> None:
    """A small step under what a large one left reserved is no surprise; more than that is."""
    cost = measured(margin=0.01)
    cost.observe(100, 100, Peak(bytes=10_000_000, allocated_bytes=9_000_000))
    cost.observe(1, 100, Peak(bytes=10_000_000, allocated_bytes=90_000))
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning):
        cost.observe(1, 100, Peak(bytes=10_200_000, allocated_bytes=90_000))
    assert 0.02 <= cost.with_observed_margin().margin <= 0.03


def test_a_batch_without_a_prediction_hides_no_later_one() -> None:
    """What a sample beyond all that was measured took is known; more than that is a surprise."""
    cost = measured(margin=0.01, largest=(100,))
    assert cost.batch_bytes(1, 101) == MAX_BYTES
    cost.observe(1, 101, Peak(bytes=10_000_000, allocated_bytes=9_000_000))
    cost.observe(1, 100, Peak(bytes=10_000_000, allocated_bytes=90_000))
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning, match="needed 9.73 MiB"):
        cost.observe(1, 100, Peak(bytes=10_200_000, allocated_bytes=90_000))


@given(st.floats(0, 1000), st.integers(0, 2**21))
def test_bytes_with_a_margin_do_not_wrap(margin: float, n: int) -> None:
    """A batch of nearly 2⁶³ bytes or more is over every budget, and no other one is free."""
    cost = measured(PaddedCost(sample_bytes=2**42), margin=margin)
    exact = n * 2**42 * (1 + margin)
    found = int(cost.batch_bytes(n, 1))
    assert found == MAX_BYTES or found == pytest.approx(exact, rel=1e-3, abs=2**25)
    assert found < MAX_BYTES or exact > 2**61.9


@given(st.floats(0, 0.5), st.integers(1, 100), st.integers(1, 1000))
def test_the_margin_is_added(margin: float, n: int, size: int) -> None:
    known, found = 1000 * n * size, int(measured(margin=margin).batch_bytes(n, size))
    assert known * (1 + margin) <= found <= known * (1 + margin + 2**-13) + 2**14


def test_what_was_reserved_before_a_step_is_no_surprise() -> None:
    """What earlier work left reserved, and was enough, does not show what the step needs."""
    cost = measured(margin=0.01)
    left = Peak(bytes=10_000_000, allocated_bytes=90_000, reserved_bytes=9_000_000)
    left.reserved_before_bytes = 9_000_000
    cost.observe(1, 100, left)
    assert cost.with_observed_margin() is cost
    left.reserved_before_bytes = 8_000_000  # now it grew
    with pytest.warns(MeasureWarning, match="needed 9.54 MiB"):
        cost.observe(1, 100, left)


def test_allocations_that_failed_raise_the_margin() -> None:
    """What such a step needed is unknown: each margin grows by 0.02, with one warning."""
    cost = measured(margin=0.01)
    with pytest.warns(MeasureWarning, match="ran out of memory"):
        cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, failures=1))
    once = cost.with_observed_margin().margin
    assert once > 0.03
    cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, failures=2))
    assert cost.with_observed_margin().margin == once  # later batches still have the old margin
    cost.planned_with(once)
    cost.observe(10, 100, None)
    assert once + 0.02 <= cost.with_observed_margin().margin <= once + 0.03


def test_allocations_that_succeeded_at_the_second_attempt_are_noted() -> None:
    """A flush of the cache is no lack of memory: no warning, no margin, a line in the report."""
    cost = measured(margin=0.01)
    assert "flushed" not in cost.report()
    for _ in range(2):
        cost.observe(10, 100, Peak(bytes=1_000_000, allocated_bytes=900_000, retries=3))
    assert cost.with_observed_margin() is cost
    assert "note: in training, 6 allocations succeeded only after" in cost.report()


def test_time() -> None:
    """The sum of its terms, monotone; a cost that was only traced has none."""
    nodes = Nodes()
    n, size = nodes.make("symbol", 0), nodes.make("symbol", 1)
    flops = nodes.make("Mul", nodes.number(1000), n, size, size)
    of_flops = piece(nodes, nodes.make("Mul", n, size), flops=flops)
    seconds = 0.5, 1e-3, 1e-4, 1e-5, 1e-9, 1e-6, 2e-6
    cost = measured(pieces=(of_flops,), largest=(99,), seconds=seconds, knee=100)
    # 1, n, L, n·L, operations, bytes, bytes above the knee
    terms = [1, 7, 20, 140, 7000 * 400, 140, 40]
    expected = 1e9 * np.dot(seconds, terms)
    assert int(cost.time.batch_bytes(7, 20)) == pytest.approx(expected, rel=1e-6)
    budget = int(cost.time.batch_bytes(7, 20))
    assert int(cost.time.capacity(20, budget)) == 7
    with pytest.raises(CostError, match=r"no time: .* method='auto' or 'run'"):
        measured().time  # noqa: B018


def test_time_of_a_grid() -> None:
    """It has no operations: its bytes, sizes and numbers of samples."""
    grid = Grid(((10, 20),), ((1, 4), (1, 4)), ((10.0, 40.0), (20.0, 80.0)), (4, 4), 4)
    seconds = 0.5, 1e-3, 1e-4, 1e-5, 0.0, 1e-6, 2e-6
    cost = measured(pieces=(), grid=grid, largest=(20,), seconds=seconds, knee=50)
    for n, size, of_bytes in [(1, 10, 10), (4, 20, 80), (4, 10, 40)]:
        terms = [1, n, size, n * size, 0, of_bytes, max(of_bytes - 50, 0)]
        expected = 1e9 * np.dot(seconds, terms)
        assert int(cost.time.batch_bytes(n, size)) == pytest.approx(expected, rel=1e-6)


def test_a_traced_cost_is_cautioned_of() -> None:
    """Every sampler says that what only runs show is not in it."""
    cost = measured(caution="workspaces of kernels are not counted")
    with pytest.warns(MeasureWarning, match="workspaces of kernels"):
        MemoryBudgetBatchSampler([10] * 50, cost, "1MB")


def test_everything_is_saved(tmp_path: Path) -> None:
    """Expressions, grid, time and probes come back, and say the same."""
    grid = Grid(((1, 9),), ((1, 4), ()), ((1.0, 5.0), ()), (4, 4), 4, 0.1)
    probes = (Probe(8, (100,), 1000, False, "run", 0.25), Probe(2, (9,), 7, True, "trace"))
    for either in (None, grid):
        cost = measured(
            grid=either, margin=0.1, probes=probes, notes=("a note",), parts={"parameters": 5},
            seconds=(1.0, 2.0, 3.0), knee=5, room=2**30, offset=7.0, scale=1.25,
            measured_on={"model": "m"},
        )  # fmt: skip
        cost.save(tmp_path / "cost.json")
        loaded = load_cost(tmp_path / "cost.json")
        n, size = np.arange(9)[:, None], np.arange(99)
        for one in ("batch_bytes", "traced_bytes"):
            assert (getattr(loaded, one)(n, size) == getattr(cost, one)(n, size)).all()
        assert loaded.report() == cost.report()
        assert len(repr(loaded)) < 200
        again = tmp_path / "again.json"
        loaded.save(again)
        assert again.read_text() == (tmp_path / "cost.json").read_text()


def test_files_that_are_refused(tmp_path: Path) -> None:
    """Another format, an unknown operation, anything else."""
    path = tmp_path / "cost.json"
    measured().save(path)
    read = json.loads(path.read_text())
    read["pieces"][0]["nodes"][1] = ["eval", "print(1)"]
    others = [
        ({**read, "format": 1}, "format 1 is not 9; measure again"),
        (read, "no rule to evaluate"),
        ({}, "not a saved cost"),
        ([], "not a saved cost"),
    ]
    for changed, said in others:
        path.write_text(json.dumps(changed))
        with pytest.raises(CostError, match=said):
            load_cost(path)


def test_the_report() -> None:
    """Labels and errors of probes, the parts of a peak, and how many samples fit."""
    probes = (
        Probe(8, (100,), 790_000, True, "trace"), Probe(1, (9,), 9000, False, "run", 0.5),
        Probe(1, (9999,), 9000, False, "run", 0.5),
    )  # fmt: skip
    cost = measured(probes=probes, parts={"parameters": 2**20}, room=10**8, offset=2.0**20)
    for said in (
        "tested", "held out", "largest error, tested", "1 symbolic trace, 2 runs", "unknown",
        "1 MiB of parameters, 1 MiB outside tensors", "longest sample (8191): 12 at once",
    ):  # fmt: skip
        assert said in cost.report()


def test_the_figure_shows_each_probe_its_error_and_the_margin() -> None:
    """Predicted against measured MiB beside a diagonal; errors in percent above a line."""
    pytest.importorskip("matplotlib")
    probes = [
        Probe(n, (size,), 2**20 * n * size, held_out, "trace")
        for n, size, held_out in ((1, 2, False), (2, 4, False), (3, 9, True))
    ]
    cost = measured(PaddedCost(unit_bytes=1.1 * 2**20), margin=0.25, probes=tuple(probes))
    left, right = cost.plot().axes
    diagonal, fitted, held_out = left.get_lines()
    assert list(diagonal.get_xdata()) == list(diagonal.get_ydata()) == [2, 27]
    assert list(fitted.get_ydata()) == pytest.approx([2.2, 8.8])
    assert list(held_out.get_ydata()) == pytest.approx([29.7])
    errors, of_held_out, margin = right.get_lines()
    assert list(errors.get_ydata()) == pytest.approx([10, 10], rel=1e-4)
    assert list(of_held_out.get_ydata()) == pytest.approx([10], rel=1e-4)
    assert list(margin.get_ydata()) == [-25, -25]


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is not installed: importing it fails."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*\[plot\]"):
        measured().plot()
