"""Hypothesis strategies for sizes, costs, rules and samplers: one place for all laws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from tests.support.costs import measured
from torchbudget import PackedCost, PaddedCost, TableCost


@st.composite
def one_axis_sizes(draw: st.DrawFn, *, most: int = 150) -> npt.NDArray[np.int64]:
    """Sizes of one axis, shape `(N,)`: every kind of distribution that broke some sampler."""
    n = draw(st.integers(1, most))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    match draw(st.sampled_from(["uniform", "constant", "ones", "heavy", "bimodal", "giant"])):
        case "uniform":
            sizes = rng.integers(0, 200, n)
        case "constant":
            sizes = np.full(n, draw(st.integers(0, 50)))
        case "ones":
            sizes = np.ones(n)
        case "heavy":
            sizes = np.clip(rng.lognormal(3, 1.5, n), 1, 3000)
        case "bimodal":
            sizes = np.where(rng.random(n) < 0.2, rng.integers(400, 500, n), rng.integers(1, 9, n))
        case _:
            sizes = rng.integers(1, 9, n)
            sizes[rng.integers(n)] = 5000
    return sizes.astype(draw(st.sampled_from([np.int64, np.int32, np.uint16])))


@st.composite
def several_axes_sizes(
    draw: st.DrawFn, *, most: int = 120, axes: int | None = None
) -> npt.NDArray[np.int64]:
    """Sizes of two or three axes, shape `(N, d)`, correlated or not."""
    first = draw(one_axis_sizes(most=most)).astype(np.float64)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    columns = [first]
    for _ in range((draw(st.integers(2, 3)) if axes is None else axes) - 1):
        if draw(st.booleans()):
            columns.append(first * rng.uniform(0.5, 2, len(first)))
        else:
            columns.append(rng.permutation(first))
    return np.stack(columns, axis=1).astype(np.int64)


def sizes(most: int = 150) -> st.SearchStrategy[npt.NDArray[Any]]:
    """Sizes of one axis or several."""
    return st.one_of(one_axis_sizes(most=most), several_axes_sizes(most=most))


coefficients = st.one_of(st.integers(0, 50), st.floats(0, 50, allow_nan=False))


@dataclass(frozen=True)
class StairCost:
    """A cost model of somebody else's: bytes rise in steps of 16 units, and nothing is linear."""

    step_bytes: int

    def batch_bytes(self, n: Any, padded_size: Any) -> npt.NDArray[np.int64]:
        return np.asarray(n, np.int64) * self._item(padded_size)

    def capacity(self, padded_size: Any, budget_bytes: Any) -> npt.NDArray[np.int64]:
        return np.asarray(budget_bytes, np.int64) // self._item(padded_size)

    def _item(self, padded_size: Any) -> npt.NDArray[np.int64]:
        stair = np.asarray(padded_size, np.int64) // 16 + 1
        return self.step_bytes * stair * np.sqrt(stair).astype(np.int64)


@st.composite
def costs(draw: st.DrawFn, axes: int = 1, *, packed: bool | None = None) -> Any:
    """A cost of that many axes, by formula or as it is measured; every sample costs something."""
    kind = draw(st.sampled_from(["formula", "formula", "measured", "table"]))
    if kind == "formula" or packed:
        return draw(formulas(axes, packed=packed))
    margin = draw(st.sampled_from([0.0, 0.01, 0.3]))
    if kind == "table":
        return draw(tables(axes))
    formula = draw(formulas(axes, packed=False))
    # Beyond all that is drawn. Tables of all sizes of three axes have 185,193 columns.
    largest, multiple = (5_120, 1) if axes == 1 else (20_480, 1024)
    return measured(formula, margin=margin, largest=(largest,) * axes, multiple=multiple)


@st.composite
def tables(draw: st.DrawFn, axes: int = 1) -> TableCost:
    """A few measured batches, one of them of larger samples than any that are drawn."""
    sizes = st.tuples(*[st.integers(0, 400)] * axes)
    batch = st.tuples(st.integers(1, 64), sizes, st.integers(1, 10_000))
    most = (draw(st.integers(1, 8)), (20_000,) * axes, draw(st.integers(10_000, 10**6)))
    numbers, shapes, peaks = zip(*[*draw(st.lists(batch, max_size=5)), most], strict=True)
    return TableCost(numbers=numbers, sizes=shapes, peak_bytes=peaks)


@st.composite
def formulas(draw: st.DrawFn, axes: int = 1, *, packed: bool | None = None) -> Any:
    """A `PaddedCost` or `PackedCost` of that many axes; every sample costs something."""
    options: dict[str, Any] = {
        "fixed_bytes": draw(st.integers(0, 1000)),
        "sample_bytes": draw(st.one_of(st.integers(1, 9), st.floats(0.1, 9))),
    }
    if axes == 1:
        options["unit_bytes"] = draw(coefficients)
        options["pair_bytes"] = draw(st.sampled_from([0, 0.01, 1]))
    else:
        vector = st.lists(coefficients, min_size=axes, max_size=axes)
        options["unit_bytes"] = draw(vector)
        if draw(st.booleans()):
            rows = st.lists(st.sampled_from([0, 0.01, 1]), min_size=axes, max_size=axes)
            options["pair_bytes"] = draw(st.lists(rows, min_size=axes, max_size=axes))
    if draw(st.booleans()) if packed is None else packed:
        return PackedCost(**options)
    return PaddedCost(**options, floor_bytes=draw(st.sampled_from([0, 500])))


@st.composite
def limits(draw: st.DrawFn, largest: Any, *, packed: bool, least: int = 1) -> list[tuple[Any, int]]:
    """Up to two further limits of any kinds that go with the budget, which the largest size fits.

    Args:
        draw: of hypothesis.
        largest: the largest size on every axis, after rounding, shape `()` or `(d,)`.
        packed: whether the budget is one of packed batches, which has no padded limits.
        least: samples of the largest size that fit at the least.
    """
    axes = np.size(largest)
    counted = st.sampled_from(
        [PackedCost(sample_bytes=1, unit="samples"), PackedCost(sample_bytes=3)]
    )
    summed = formulas(axes, packed=True)
    kinds = [counted, summed] if packed else [counted, summed, formulas(axes, packed=False)]
    found = draw(st.lists(st.one_of(*kinds), max_size=2))
    return [
        (one, int(np.max(one.batch_bytes(1, largest))) * draw(st.integers(least, 8)))
        for one in found
    ]


@st.composite
def problems(
    draw: st.DrawFn, *, most: int = 150, packed: bool | None = None, fits: bool = True
) -> tuple[npt.NDArray[Any], Any, int]:
    """Sizes, a cost for their axes, and a budget; with `fits` every sample fits it alone."""
    values = draw(sizes(most))
    axes = values.shape[1] if values.ndim == 2 else 1
    cost = draw(costs(axes, packed=packed))
    largest = values.max(axis=0)
    alone = int(cost.batch_bytes(1, largest))
    if fits:
        budget = alone + draw(st.integers(0, 20)) * max(alone // 2, 1)
    else:
        smallest = int(cost.batch_bytes(1, values.min(axis=0)))
        budget = draw(st.integers(smallest, max(alone, smallest)))
    return values, cost, budget


@st.composite
def rules(draw: st.DrawFn, *, packed: bool = False) -> dict[str, Any]:
    """Options that shape a micro-batch."""
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["batch_size_multiple"] = 1 if packed else draw(st.sampled_from([1, 2, 8]))
    if draw(st.booleans()):
        options["max_batch_size"] = draw(st.integers(options.get("batch_size_multiple", 1), 40))
    return options
