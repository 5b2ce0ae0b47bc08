"""Slow, obvious implementations that fast ones are compared with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


def capacity(cost: Any, padded_size: Any, budget: int, most: int) -> int:
    """The largest n up to `most` that fits, by trying them all."""
    n = 0
    while n < most and int(cost.batch_bytes(n + 1, padded_size)) <= budget:
        n += 1
    return n


def greedy_cut(
    ordered: npt.NDArray[Any],
    cost: Any,
    budget: int,
    *,
    most: int | None = None,
    multiple: int = 1,
) -> list[int]:
    """Numbers of samples of the longest runs that fit, one sample after the other.

    With at most `most` samples in a run, and multiples where a run reaches one.
    """
    runs: list[int] = []
    start = 0
    while start < len(ordered):
        longest = 1
        while start + longest < len(ordered) and longest + 1 <= (most or len(ordered)):
            padded = ordered[start : start + longest + 1].max(axis=0)
            if int(cost.batch_bytes(longest + 1, padded)) > budget:
                break
            longest += 1
        if longest >= multiple:
            longest -= longest % multiple
        runs.append(longest)
        start += longest
    return runs


def chi_square(counts: Any, expected: Any) -> float:
    """Pearson's chi-square of counts, as the normal deviate of Wilson and Hilferty (1931).

    Below −4 or above 4 a fair source comes once in some 30,000 trials. Categories that are tied
    by their total lose one degree of freedom.
    """
    observed = np.asarray(counts, np.float64).reshape(-1)
    wanted = np.broadcast_to(np.asarray(expected, np.float64), np.shape(counts)).reshape(-1)
    return deviate(float(((observed - wanted) ** 2 / wanted).sum()), len(observed) - 1)


def deviate(statistic: float, freedom: int) -> float:
    """The normal deviate of a chi-square statistic with that many degrees of freedom."""
    slack = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - slack)) / np.sqrt(slack))


def bytes_of(sizes: Any, cost: Any, batch: Any = slice(None), multiple: int = 1) -> int:
    """Predicted bytes of a micro-batch, from the definition of its cost.

    Args:
        sizes: of all samples, shape `(N,)` or `(N, d)`.
        cost: a cost model.
        batch: indices of the micro-batch; by default all.
        multiple: sizes are rounded up to it.
    """
    own = -(-np.asarray(sizes)[batch].astype(np.int64) // multiple) * multiple
    if getattr(cost, "counts", False):  # of any number of axes
        whole = int(cost.fixed_bytes + len(own) * math.ceil(cost.sample_bytes))
        return max(whole, int(getattr(cost, "floor_bytes", 0)))
    if hasattr(cost, "base_bytes"):
        return int(cost.base_bytes + cost.item_bytes(own).sum())
    return int(cost.batch_bytes(len(own), own.max(axis=0)))
