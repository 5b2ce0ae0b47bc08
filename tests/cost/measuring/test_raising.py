"""Forms of steps whose layers round sizes, and of steps with other operations."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchbudget import MeasuredCost, measure_cost, trace_peak_bytes
from torchbudget.cost.measuring.raising import fitted_bytes, raised, with_missed
from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term
from torchbudget.cost.models.probe import Probe
from torchbudget.cost.models.protocol import FloatArray

LARGEST = 1000
FLOOR = Form(terms=(Term(2e4, 0, (0,)),))


def stairs(n: Any, size: Any, stride: int) -> Any:
    """A floor, and a kilobyte for each stride that is whole and one more."""
    return np.maximum(2e4 + 0 * n * size, 1e4 + 1000.0 * n * (size // stride + 1))


def line_above(stride: int, sizes: list[int]) -> tuple[tuple[Form, ...], list[Probe]]:
    """The lowest line that is above the stairs at some sizes, as forms are fitted; these steps."""
    least = min(size % stride for size in sizes)
    constant = Term(1000 * (1 - least / stride), 1, (0,))
    line = Form(terms=(Term(1e4, 0, (0,)), constant, Term(1000 / stride, 1, (1,))))
    shapes = [(n, size) for n in (2, 16, 256) for size in sizes]
    peaks = [int(stairs(n, size, stride)) for n, size in shapes]
    return (FLOOR, line), [
        Probe(n, (size,), peak, False, "trace")
        for (n, size), peak in zip(shapes, peaks, strict=True)
    ]


@pytest.mark.parametrize("stride", [2, 7, 16, 50])
def test_stairs_are_covered(stride: int) -> None:
    """Also at sizes between the traced ones; and the longest samples are hardly raised.

    A share of the bytes would have to be that by which the shortest sizes are off: half of them.
    """
    sizes = [max(stride // 4, 1), stride - 1, 5 * stride, 10 * stride - 1, LARGEST - 1]
    forms, probes = line_above(stride, sizes)
    forms, margin = raised(forms, probes)
    n, size = np.meshgrid([1, 3, 40, 500], np.arange(1, LARGEST + 1), indexing="ij")
    truth = stairs(n, size, stride)
    found = (1 + margin) * MeasuredCost(forms=forms, margin=0).fitted_bytes(n, size)
    assert (found >= truth).all()
    assert (found[:, -1] <= (1 + 2 * stride / LARGEST) * truth[:, -1]).all()


@given(st.integers(1, 60), st.lists(st.integers(1, LARGEST), min_size=4, max_size=8, unique=True))
def test_nothing_is_lowered(stride: int, sizes: list[int]) -> None:
    """No batch costs less than before, and what is exact stays as it is."""
    forms, probes = line_above(stride, sizes)
    higher, margin = raised(forms, probes)
    assert margin >= 0
    assert (fitted_bytes(higher, probes) >= fitted_bytes(forms, probes)).all()
    if stride == 1:
        assert margin < 1e-3
        assert higher == forms


SHORT = (20,)


@given(st.integers(1, 500), st.integers(2, 2000))
def test_steps_of_other_operations_are_covered(n: int, times: int) -> None:
    """And fewer and more samples of them, where bytes grow with n from the floor or from 0."""
    forms = (Form(terms=(Term(1e6, 0, (0,)), Term(100, 1, (1,)))),)
    peak = int(times * fitted_bytes(forms, [Probe(n, (10,), 1, False, "trace")])[0])
    other = Probe(n, (10,), peak, False, "trace")
    covering = MeasuredCost(forms=with_missed(forms, [other], SHORT), margin=0)
    fewer, more = np.arange(1, n + 1), np.arange(n, 3 * n)
    from_floor = 1e6 + (peak - 1e6) / n * fewer
    assert (covering.fitted_bytes(fewer, 10) >= from_floor - 2).all()
    assert (covering.fitted_bytes(more, 10) >= peak / n * more - 2).all()
    assert with_missed(forms, [], SHORT) == forms


@given(st.integers(1, 500), st.integers(2, 30), st.floats(0, 1e6), st.sampled_from([1, 2]))
def test_between_two_numbers_of_samples(n: int, times: int, least: float, degree: int) -> None:
    """What grows from below the floor is covered up to the larger batch, and by no more than it."""
    forms = (Form(terms=(Term(1e6, 0, (0,)),)),)
    counts = np.unique(np.linspace(n, n * times, 50).astype(int))

    def taken(number: npt.ArrayLike) -> FloatArray:
        return least + 2e6 * np.asarray(number, float) ** degree

    probes = [Probe(one, (10,), int(taken(one)), False, "trace") for one in (n, n * times)]
    covering = MeasuredCost(forms=with_missed(forms, probes, SHORT), margin=0)
    found = covering.fitted_bytes(counts, 10)
    assert (found >= taken(counts) - 2).all()
    if degree == 1:
        assert (found <= (1 + 1e-6) * taken(counts) + (1e6 - least)).all()


@given(st.integers(1, 500), st.integers(2, 1000), st.sampled_from([1, 2]))
def test_a_sample_that_is_short_on_one_axis_says_what_its_length_takes(
    n: int, length: int, degree: int
) -> None:
    """Of other operations on the axis alone that is 1: covered, and shorter ones cost less."""
    nothing = Form(terms=(Term(1e6, 0, (0, 0)),))

    def taken(size: int) -> float:
        return 1e6 + 5000.0 * n * size**degree

    other = Probe(n, (length, 1), int(taken(length)), False, "trace")
    covering = MeasuredCost(forms=with_missed((nothing,), [other], (2, 2)), margin=0)
    sizes = np.unique(np.geomspace(1, length, 9).astype(int))
    found = covering.fitted_bytes(n, np.stack([sizes, np.ones_like(sizes)], axis=1))
    assert (found >= [taken(size) - n * length - 2 for size in sizes]).all()
    assert found[0] <= max(2 * taken(length) / length, 1e6 + taken(length) / length) + 2


@given(st.integers(1, 500), st.floats(0.3, 1.0))
def test_steps_of_other_operations_that_are_covered_add_nothing(n: int, share: float) -> None:
    forms = (Form(terms=(Term(1e6, 0, (0,)), Term(100, 1, (1,)))),)
    fitted = fitted_bytes(forms, [Probe(n, (10,), 1, False, "trace")])[0]
    other = Probe(n, (10,), int(share * fitted), False, "trace")
    assert with_missed(forms, [other], SHORT) == forms


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "stride"), [(160, 80), (40, 20)])
def test_convolutions_without_padding_over_sizes_of_any_kind(kernel: int, stride: int) -> None:
    """No trace is above the cost, down to one frame, and long samples cost little more."""
    layers = torch.nn.Sequential(
        torch.nn.Conv1d(1, 16, kernel, stride), torch.nn.ReLU(), torch.nn.Conv1d(16, 16, 3, 2, 1)
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        layers(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def make_batch(n: int, size: int) -> torch.Tensor:
        return torch.zeros(n, 1, size)

    cost = measure_cost(step, make_batch, min_size=kernel, max_size=100 * kernel, method="trace")
    lengths = [kernel, kernel + stride - 1, 3 * kernel + 1, 10 * kernel, 50 * kernel + stride // 2]
    for n, size in product((1, 16, 256), lengths):
        peak = trace_peak_bytes(step, make_batch(n, size))
        predicted = int(cost.batch_bytes(n, size))
        assert peak <= predicted
        if size > 20 * kernel:
            assert predicted <= 1.1 * peak
