"""The coefficients of a `PaddedCost` as one vector, and what they are multiplied by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.padded import PackedCost, PaddedCost

FloatArray: TypeAlias = npt.NDArray[np.float64]


def num_coefficients(axes: int) -> int:
    """How many coefficients a form of d axes has: fixed, sample, units and pairs."""
    return 2 + axes + axes * (axes + 1) // 2


def features(n: npt.ArrayLike, sizes: npt.ArrayLike) -> FloatArray:
    """What the coefficients are multiplied by, in their order.

    Args:
        n: numbers of samples, shape `(k,)`.
        sizes: padded sizes, shape `(k,)` or `(k, d)`.

    Returns:
        1, n, n·Lᵢ for every axis, and n·Lᵢ·Lⱼ for i ≤ j: shape `(k, 2 + d + d·(d + 1)/2)`.
    """
    number = np.asarray(n, np.float64)
    length = np.asarray(sizes, np.float64).reshape(len(number), -1)
    axes = range(length.shape[1])
    columns = [np.ones_like(number), number]
    columns += [number * length[:, i] for i in axes]
    columns += [number * length[:, i] * length[:, j] for i in axes for j in axes if i <= j]
    return np.stack(columns, axis=1)


def coefficients_of(cost: PaddedCost) -> FloatArray:
    """The coefficients of a cost without its floor, in the order of `features`."""
    pair = np.reshape(np.asarray(cost.pair_bytes, np.float64), (cost.axes, cost.axes))
    pairs = (pair + np.tril(pair, -1).T)[np.triu_indices(cost.axes)]
    unit = np.reshape(np.asarray(cost.unit_bytes, np.float64), cost.axes)
    return np.concatenate([[cost.fixed_bytes, cost.sample_bytes], unit, pairs])


def cost_of(coefficients: FloatArray, floor_bytes: float) -> PaddedCost:
    """The cost of coefficients in the order of `features`, and of a floor."""
    options = _options(coefficients)
    if not coefficients[1:].any():
        options["sample_bytes"] = 1.0  # next to nothing, but a sample must cost something
    return PaddedCost(**options, floor_bytes=floor_bytes)


def additive_bound(costs: Sequence[PaddedCost], factor: float) -> PackedCost:
    """The cheapest additive cost that is nowhere below `factor` times any of these.

    With coefficients of at least 0, the largest of each bounds the largest sum.
    """
    options = _options(factor * np.stack([coefficients_of(cost) for cost in costs]).max(axis=0))
    floor_bytes = factor * max(cost.floor_bytes for cost in costs)
    return PackedCost(**options | {"fixed_bytes": max(options["fixed_bytes"], floor_bytes)})


def _options(coefficients: FloatArray) -> dict[str, Any]:
    """Coefficients in the order of `features` as the arguments of a cost."""
    axes = next(d for d in range(1, len(coefficients)) if num_coefficients(d) == len(coefficients))
    fixed, sample, unit, pairs = np.split(coefficients, [1, 2, 2 + axes])
    pair = np.zeros((axes, axes))
    pair[np.triu_indices(axes)] = pairs
    return {
        "fixed_bytes": float(fixed[0]),
        "sample_bytes": float(sample[0]),
        "unit_bytes": unit if axes > 1 else float(unit[0]),
        "pair_bytes": pair if axes > 1 else float(pair[0, 0]),
    }
