"""The measured cost as a value: laws of its bytes, margin, time, files, and observed steps."""

from __future__ import annotations

import json
import math
import resource
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.costs import Nodes, measured, piece
from torchbudget import MeasuredCost, MemoryBudgetBatchSampler, PaddedCost, load_cost
from torchbudget.cost.pieces import Grid, Probe
from torchbudget.errors import CostError, MeasureWarning
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


def peak(peak_bytes: int, allocated_bytes: int = 90_000, before_bytes: int = 0) -> Peak:
    """What a caching allocator tells of a step that began with bytes in reserve."""
    options = {"reserved_bytes": 9_000_000, "reserved_before_bytes": before_bytes}
    given = options if before_bytes else {}
    return Peak(bytes=peak_bytes, allocated_bytes=allocated_bytes, **given)


LARGE, MORE = peak(10_000_000, 9_000_000), peak(10_200_000)


@pytest.mark.parametrize(
    ("known", "surprise", "said", "least", "most"),
    [
        # A small step under what a large one left reserved; more than that.
        ([(100, 100, LARGE), (1, 100, peak(10_000_000))], MORE, "needed", 0.02, 0.03),
        # What a sample took beyond all that was measured, which has no prediction.
        ([(1, 101, LARGE), (1, 100, peak(10_000_000))], MORE, "needed 9.73 MiB", 0.02, np.inf),
        # What earlier work left reserved, and was enough, says nothing; if it grew, it does.
        (
            [(1, 100, peak(10_000_000, before_bytes=9_000_000))],
            peak(10_000_000, before_bytes=8_000_000),
            "needed 9.54 MiB", 90, np.inf,
        ),
    ],
    ids=["kept by the allocator", "without a prediction", "reserved before"],
)  # fmt: skip
def test_what_was_known_is_no_surprise(
    known: Any, surprise: Peak, said: str, least: float, most: float
) -> None:
    cost = measured(margin=0.01, largest=(100,))
    for one in known:
        cost.observe(*one)
    assert cost.with_observed_margin() is cost
    with pytest.warns(MeasureWarning, match=said):
        cost.observe(1, 100, surprise)
    assert least <= cost.with_observed_margin().margin <= most


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
    """Another format, an unknown operation, one on what comes after it, anything else."""
    path = tmp_path / "cost.json"
    measured().save(path)
    read = json.loads(path.read_text())
    refused = {json.dumps({**read, "format": 1}): "format 1 is not 10; measure again"}
    refused |= dict.fromkeys(("{}", "[]"), "not a saved cost")
    for node in (["eval", "print(1)"], ["__import__", 0], ["Add", 0, 5], ["int", "1"], ["symbol"]):
        read["pieces"][0]["nodes"][1] = node
        refused[json.dumps(read)] = "no rule to evaluate"
    for text, said in refused.items():
        path.write_text(text)
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


# ---------------------------------------------------------------------- laws of its bytes


LARGEST = 700


@st.composite
def sums(draw: st.DrawFn, nodes: Nodes, axes: int) -> int:
    """Storages that round, pad, are cut, or fall with a size: of any number of samples."""
    n, *lengths = (nodes.make("symbol", k) for k in range(axes + 1))
    parts = [nodes.number(draw(st.integers(0, 10**6)))]
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from(lengths))
        multiple = nodes.number(draw(st.integers(2, 64)))
        minus = nodes.make("Mul", nodes.number(-1), size)
        kind = draw(st.sampled_from(["plain", "padded", "cut", "chunk", "both", "whole"]))
        if kind == "padded":
            size = nodes.make("Add", size, nodes.make("Mod", minus, multiple))
        elif kind == "cut":
            size = nodes.make("Min", size, multiple)
        elif kind == "chunk":  # falls where there is one more of them
            size = nodes.make("CeilDiv", size, nodes.make("CeilDiv", size, multiple))
        elif kind == "both":
            size = nodes.make("Mul", size, draw(st.sampled_from(lengths)))
        factors = [nodes.number(draw(st.integers(1, 5000))), size]
        factors += [n] * draw(st.integers(0, 2))
        product = nodes.make("Mul", *factors)
        parts.append(nodes.make("FloorDiv", product, multiple) if kind == "whole" else product)
    return nodes.make("Add", *parts)


@st.composite
def costs(draw: st.DrawFn, axes: int = 1, largest: int = LARGEST) -> MeasuredCost:
    """Up to two pieces, of which the first may hold up to a size only, and maybe a grid."""
    pieces, has_grid = [], draw(st.booleans())
    for first in [True, False][: draw(st.integers(1 - has_grid, 2))]:
        nodes = Nodes()
        totals = [draw(sums(nodes, axes)) for _ in range(draw(st.integers(1, 2)))]
        conditions: tuple[int, ...] = ()
        if first and draw(st.booleans()):
            symbol = nodes.make("symbol", draw(st.integers(0, axes)))
            up_to = nodes.number(draw(st.integers(1, largest)))
            conditions = (nodes.make("LessThan", symbol, up_to),)
        if draw(st.booleans()):
            totals = [*map(nodes.in_blocks, totals)]
        pieces.append(piece(nodes, *totals, axes=axes, conditions=conditions))
    grid = None
    if has_grid:
        sizes, numbers = ((1, 40, 90, largest),) * axes, (1, 4, 64)
        areas = np.array([math.prod(one) for one in product(*sizes)])[:, None]
        if draw(st.booleans()):
            stairs = np.ceil(areas * numbers / draw(st.integers(1, 100)))
            values = draw(st.integers(0, 10**6)) + draw(st.integers(0, 10**5)) * stairs
        else:  # curved, over a floor
            grown = draw(st.floats(0.5, 200)) * np.array(numbers) * areas**1.1
            floor = draw(st.integers(0, 10**5)) + draw(st.integers(0, 3)) * areas
            values = np.maximum(np.round(grown), floor)
        raised = draw(st.sampled_from([0.0, 0.1]))
        reached = draw(st.sampled_from([MAX_BYTES, 10**6]))
        columns = tuple(map(tuple, values.tolist()))
        ends = tuple(draw(st.sampled_from([16, 64])) for _ in values)
        grid = Grid(sizes, (numbers,) * len(columns), columns, ends, reached, raised)
    return MeasuredCost(
        pieces=tuple(pieces), grid=grid, smallest=(1,) * axes, largest=(largest,) * axes,
        multiple=draw(st.sampled_from([1, 7])), margin=draw(st.floats(0, 0.5)),
        offset=draw(st.sampled_from([0.0, 1e5])), scale=draw(st.sampled_from([1.0, 1.37])),
        empty=draw(st.integers(0, 10**5)),
    )  # fmt: skip


@given(costs(), st.integers(0, 2 * LARGEST), st.integers(0, 2**40))
def test_capacity_is_exact(cost: MeasuredCost, size: int, budget: int) -> None:
    """As many samples as fit, and not one more."""
    n = int(cost.capacity(size, budget))
    assert n == 0 or cost.batch_bytes(n, size) <= budget
    assert n == MAX_BYTES or cost.batch_bytes(n + 1, size) > budget


@given(costs())
def test_bytes_beside_tensors_do_not_change_what_is_known(cost: MeasuredCost) -> None:
    """A grid is known up to the traced bytes that were reached, on any process."""
    plain, larger = (replace(cost, offset=a, scale=b) for a, b in ((0.0, 1.0), (1e9, 2.0)))
    sizes = np.arange(1, LARGEST + 1, 7)
    found, same = (np.minimum(one.capacity(sizes, 2**60), 64) for one in (plain, larger))
    assert (np.abs(found - same) <= 1).all()


@pytest.mark.parametrize("axes", [1, 2])
@settings(max_examples=16)
@given(st.data())
def test_more_or_longer_samples_never_cost_less(axes: int, data: st.DataObject) -> None:
    """On every axis, beyond what was measured too.

    And never less than what was traced, where no size of the data is between those of the table.
    """
    largest = data.draw(st.sampled_from([250, LARGEST]))
    cost = data.draw(costs(axes, largest))
    steps = (3, 1) if axes == 1 else (9, 11)
    n, sizes = np.arange(0, 200, steps[0]), np.arange(0, largest + 30, steps[1])
    grids = np.stack(np.meshgrid(n, *[sizes] * axes, indexing="ij"), axis=-1)
    size = grids[..., 1:] if axes > 1 else grids[..., 1]
    found = cost.batch_bytes(grids[..., 0], size)
    for axis in range(axes + 1):
        assert (np.diff(found, axis=axis) >= 0).all()
    inside = (grids[..., 0] >= 1) & (grids[..., 1:] >= 1).all(-1)
    inside &= (grids[..., 1:] % cost.multiple == 1 % cost.multiple).all(-1)
    inside &= (found < MAX_BYTES) & (largest**axes <= 2**16)
    held = np.zeros(inside.sum(), bool)
    shapes = grids[inside]
    for one in cost.pieces:
        held |= one.holds(shapes) > 0
    traced = cost.traced_bytes(shapes[:, 0], shapes[:, 1:] if axes > 1 else shapes[:, 1])
    assert (found[inside] >= traced)[held].all()


@given(costs(), st.lists(st.integers(0, 900), max_size=6), st.lists(st.integers(0, 2**40)))
def test_many_at_once_are_each_alone(
    cost: MeasuredCost, sizes: list[int], budgets: list[int]
) -> None:
    found = cost.capacity(np.array(sizes, int), np.array(budgets, int)[:, None])
    assert found.shape == (len(budgets), len(sizes))
    each = [[int(cost.capacity(size, budget)) for size in sizes] for budget in budgets]
    assert found.tolist() == each
    numbers = np.array([0, 3, 200])[:, None]
    each = [[int(cost.batch_bytes(n, size)) for size in sizes] for n in (0, 3, 200)]
    assert cost.batch_bytes(numbers, np.array(sizes, int)).tolist() == each


def test_outside_of_the_domain() -> None:
    """No sample: what lives between steps; shorter than the smallest: as that; longer: nothing."""
    cost = measured(PaddedCost(unit_bytes=10, fixed_bytes=500), smallest=(8,), largest=(100,))
    assert cost.batch_bytes(0, [8, 100]).tolist() == [500, 500]
    assert cost.batch_bytes(3, [1, 8]).tolist() == [740, 740]
    assert cost.capacity([1, 8, 100, 101], 1500).tolist() == [12, 12, 1, 0]
    assert cost.batch_bytes(1, 101) == cost.batch_bytes(2**62, 100) == MAX_BYTES
    with pytest.raises(CostError, match="at least 0 samples, got -1"):
        cost.batch_bytes(-1, 8)
    unknown = Grid(((1, 100),), ((1, 4), ()), ((1e6, 2e6), ()), (4, 4))
    found = measured(pieces=(), grid=unknown).traced_bytes(1, [1, 100])
    assert found.tolist() == [10**6, MAX_BYTES]
    one = Grid(((1, 100),), ((0, 1),) * 2, ((5.0, 6.0), (5.0, 105.0)), (1, 1))
    alone = measured(pieces=(), grid=one, largest=(100,))
    assert alone.batch_bytes([1, 1, 2], [1, 100, 1]).tolist() == [6, 105, MAX_BYTES]
    assert alone.capacity([1, 100, 100], [2**40, 105, 104]).tolist() == [1, 1, 0]
    two = measured(PaddedCost(unit_bytes=(1, 2)))
    with pytest.raises(CostError, match=r"2 axes: expected sizes of shape \(…, 2\), got \(3,\)"):
        two.capacity([1, 2, 3], 100)


def test_pieces_that_meet() -> None:
    """Beyond a branch bytes fall, but not those that batches are planned with."""
    pieces = []
    for each, name in ((1000, "LessThan"), (10, "StrictGreaterThan")):
        nodes = Nodes()
        n, size = nodes.make("symbol", 0), nodes.make("symbol", 1)
        total = nodes.make("Mul", nodes.number(each), n, size)
        condition = nodes.make(name, size, nodes.number(512))
        pieces.append(piece(nodes, total, conditions=(condition,)))
    cost = MeasuredCost(pieces=tuple(pieces), grid=None, smallest=(1,), largest=(1000,))
    assert cost.traced_bytes(3, [512, 513]).tolist() == [3 * 512_000, 3 * 5130]
    assert cost.batch_bytes(3, [512, 513]).tolist() == [3 * 512_000] * 2
    assert [cost.label(3, size) for size in (513, 1)] == ["exact", "tested"]
    assert cost.label(3, 1001) == "raised"
    # One sample that no piece holds costs what shorter ones do, or its piece for more samples.
    hole = nodes.make("Unequality", n, nodes.number(1))
    alone = replace(
        cost,
        pieces=(pieces[0], replace(pieces[1], conditions=(condition, hole), nodes=tuple(nodes))),
    )
    assert alone.batch_bytes(1, [512, 1000]).tolist() == [512_000] * 2


def test_a_size_without_a_piece_costs_what_a_longer_one_does() -> None:
    """Of two axes as well: sizes beyond it are known."""
    nodes = Nodes()
    n, height, width = (nodes.make("symbol", k) for k in range(3))
    total = nodes.make("Mul", n, nodes.make("Mul", height, width))
    condition = nodes.make("Unequality", nodes.make("Mul", height, width), nodes.number(35))
    pieces = (piece(nodes, total, conditions=(condition,)),)
    cost = MeasuredCost(pieces=pieces, grid=None, smallest=(1, 1), largest=(50, 50))
    sizes = [[5, 6], [5, 7], [6, 7], [7, 5], [8, 5]]
    assert cost.batch_bytes(3, sizes).tolist() == [3 * 30, *[3 * 42] * 2, *[3 * 40] * 2]
    assert cost.capacity([[5, 7], [50, 50]], 10**6).tolist() == [10**6 // 42, 10**6 // 2500]


@pytest.mark.parametrize("last", [3, 41, 1000])
def test_pieces_that_meet_at_a_number_of_samples(last: int) -> None:
    """Each row ends where its piece does."""
    pieces = []
    for each, name in ((1000, "LessThan"), (1, "StrictGreaterThan")):
        nodes = Nodes()
        n = nodes.make("symbol", 0)
        rising = nodes.make("Mul", nodes.number(each), n)
        total = nodes.make("Add", nodes.number(1000 * last), rising)
        condition = nodes.make(name, n, nodes.number(last))
        pieces.append(piece(nodes, total, conditions=(condition,)))
    cost = MeasuredCost(pieces=tuple(pieces), grid=None, smallest=(1,), largest=(100,))
    assert cost.batch_bytes([last - 1, last], 50).tolist() == [1000 * (2 * last - 1), 2000 * last]
    assert cost.batch_bytes([last + 1, 10**5], 50).max() <= max(2000 * last, 1000 * last + 10**5)


@given(st.data())
def test_bounds_hold(data: st.DataObject) -> None:
    """A polynomial in n is nowhere below the expression that it stands for."""
    nodes = Nodes()
    one = piece(nodes, nodes.in_blocks(data.draw(sums(nodes, 1))))
    n, size = np.arange(1, 60)[:, None], np.arange(1, 80)
    rows = np.ceil(one.in_n(size[:, None])[0])  # as a table has them
    bound = rows[0] + n * rows[1] + n**2 * rows[2]
    shapes = np.stack(np.broadcast_arrays(n, size), axis=-1).reshape(-1, 2)
    assert (bound.ravel() >= one.bytes_at(shapes)).all()


@given(st.floats(0, 10), st.integers(1, 3))
def test_packed_costs(margin: float, axes: int) -> None:
    """A packed cost is nowhere below the one that it comes from, and near it."""
    pairs = np.triu(np.full((axes, axes), 2))
    stated = PaddedCost(
        fixed_bytes=1000, sample_bytes=70, unit_bytes=[3] * axes if axes > 1 else 3,
        pair_bytes=pairs.tolist() if axes > 1 else 2,
    )  # fmt: skip
    cost = measured(stated, margin=margin, largest=(30,) * axes)
    packed = cost.packed()
    size = np.random.default_rng(0).integers(0, 31, (50, axes))
    size = size if axes > 1 else size[:, 0]
    need, found = cost.batch_bytes(5, size), packed.batch_bytes(5, size)
    assert (found >= need).all()
    assert (found <= need + 100 + 2**15 * margin).all()  # margins are added in steps
    beyond = [31] * axes if axes > 1 else 31
    assert packed.capacity(beyond, 2**40) == 0


def test_what_is_not_packed() -> None:
    """Terms of the size without n, terms in n², a grid."""
    nodes = Nodes()
    n, size = nodes.make("symbol", 0), nodes.make("symbol", 1)
    for total in (size, nodes.make("Mul", n, n)):
        with pytest.raises(CostError, match="a packed cost must be a constant plus a share"):
            measured(pieces=(piece(nodes, total),), largest=(99,)).packed()
    grid = Grid(((1, 9),), ((1, 2),) * 2, ((1.0, 1.0),) * 2, (2, 2))
    with pytest.raises(CostError, match="interpolated"):
        measured(pieces=(), grid=grid, largest=(9,)).packed()


def by_runs(runs: list[tuple[int, tuple[int, ...]]], bytes_of: Any, **options: Any) -> MeasuredCost:
    """A cost that rests on runs of n samples of a size."""
    probes = tuple(Probe(n, size, int(bytes_of(n, size)), False, "run") for n, size in runs)
    sizes = np.array([size for _, size in runs])
    reached = max(one.peak_bytes for one in probes)
    low, high = sizes.min(axis=0).tolist(), sizes.max(axis=0).tolist()
    axes = tuple(zip(low, high, strict=True))
    columns = 2 ** len(axes)
    grid = Grid(axes, ((1, 2),) * columns, ((1.0, 1.0),) * columns, (2,) * columns, reached)
    ends = {"smallest": tuple(low), "largest": tuple(high)}
    return measured(pieces=(), grid=grid, probes=probes, **ends, **options)


CORNERS = [(n, (a, b)) for n in (1, 3, 10) for a, b in product((2, 50), (4, 90))]


@given(
    st.lists(st.integers(1, 2**20), min_size=3, max_size=3), st.integers(0, 40), st.floats(0, 0.1)
)
def test_a_packed_cost_by_runs(terms: list[int], square: int, margin: float) -> None:
    """No run is above the plane; it is the bytes themselves if they are one.

    Bytes with the square of a row's length are nowhere above it, up to the longest row that was
    run. No row is larger than the runs, whatever the budget; no sample is longer.
    """
    fixed, *units = terms

    def bytes_of(n: Any, size: Any) -> Any:
        sums = n * np.array(size, float)
        return fixed + sums @ units + square * sums[..., 0] ** 2

    cost = by_runs(CORNERS, bytes_of, margin=margin)
    packed = cost.packed(no_padding=True)
    rng = np.random.default_rng(0)
    for size in rng.integers((2, 4), (51, 91), (50, 2)):
        n = int(min(500 // size[0], 900 // size[1]))
        real, found = bytes_of(n, size), int(packed.batch_bytes(n, size))
        assert found >= real - 4
        if not square:
            assert found <= (1 + margin) * real + n + 4
    reached = max(one.peak_bytes for one in cost.probes)
    assert packed.room_bytes(2**40) <= (1 + margin) * reached
    assert int(packed.capacity((2, 4), 2**50)) == int(packed.capacity((2, 4), packed.most_bytes))
    assert packed.capacity([(51, 4), (2, 91)], 2**40).tolist() == [0, 0]
    assert packed.item_bytes((0, 0)) == packed.item_bytes((2, 4))  # shorter than any that was run


def test_what_runs_do_not_show() -> None:
    """Whether the step pads; the bytes of an axis that grew with another one in all runs."""

    def bytes_of(n: int, size: tuple[int, ...]) -> int:
        return 1000 + n * sum(size)

    with pytest.raises(CostError, match=r"packed\(no_padding=True\), .* states that"):
        by_runs(CORNERS, bytes_of).packed()
    one_ratio = [(n, (size, 2 * size)) for n in (1, 7) for size in (4, 40)]
    with pytest.raises(CostError, match="all sizes that were run have one ratio"):
        by_runs(one_ratio, bytes_of).packed(no_padding=True)
    assert by_runs([(1, (4,)), (5, (9,))], bytes_of).packed(no_padding=True).unit_bytes == 1.0
    four = [(n, size) for n in (1, 7) for size in product((1, 9), repeat=4)]
    with pytest.raises(CostError, match="interpolated"):
        by_runs(four, bytes_of).packed(no_padding=True)
