"""Cutting windows into micro-batches: each is the longest run that fits.

Many windows of one length are cut together, in lockstep: step k finds the k-th micro-batch of
every window with a handful of NumPy calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray
from torchbudget.plan.rules import BatchRules

Longest: TypeAlias = Callable[[IntArray, IntArray], IntArray]


def cut(sizes: npt.NDArray[Any], rules: BatchRules, budget_bytes: IntArray) -> IntArray:
    """Where the micro-batches of each window start.

    Args:
        sizes: shape `(windows, S)` in descending order, or `(windows, S, d)` in any order.
        rules: what a micro-batch may be.
        budget_bytes: of each window, shape `(windows,)`.

    Returns:
        Offsets within the windows, shape `(micro-batches, windows)`, ascending along the first
        axis and filled with S behind a window's last micro-batch. O(windows·S) in all (times
        log of the longest run for d > 1).
    """
    windows, length = sizes.shape[:2]
    if sizes.ndim == 2:
        longest = _by_head(sizes, rules, budget_bytes)
    else:
        longest = _by_prefix_maximum(sizes, rules, budget_bytes)
    first = np.arange(windows) * length
    start = np.zeros(windows, np.int64)
    starts: list[IntArray] = []
    while True:
        left = length - start
        if not left.any():
            return np.array(starts)
        starts.append(start)
        # A window that is done stays where it is: its runs are empty.
        inside = np.minimum(first + start, first + length - 1)
        start = start + rules.rounded(np.minimum(longest(inside, left), left))


def _by_head(sizes: npt.NDArray[Any], rules: BatchRules, budget_bytes: IntArray) -> Longest:
    """In descending order of one axis the first sample alone decides."""
    flat = sizes.reshape(-1)
    largest = int(sizes[:, 0].max())
    whole = bool((budget_bytes == rules.budget_bytes).all())
    table = rules.table(largest) if whole else None
    if table is not None:
        return lambda at, _left: table[flat[at]]
    return lambda at, _left: rules.capacity(flat[at], budget_bytes)


def _by_prefix_maximum(
    sizes: npt.NDArray[Any], rules: BatchRules, budget_bytes: IntArray
) -> Longest:
    """The padded size of a run is the maximum over it, on every axis.

    `maxima[k][i]` is the maximum over the 2ᵏ samples from i on. A run fits only if every shorter
    one does, so its longest length is built from its highest bit down.
    """
    length = sizes.shape[1]
    most = min(int(rules.capacity(sizes.min(axis=(0, 1)), rules.budget_bytes)), length)
    maxima = [sizes]
    while 2 ** len(maxima) <= most:
        reach = 2 ** (len(maxima) - 1)
        wider = maxima[-1].copy()
        np.maximum(wider[:, :-reach], maxima[-1][:, reach:], out=wider[:, :-reach])
        maxima.append(wider)
    flat = [level.reshape(-1, sizes.shape[2]) for level in maxima]

    def longest(at: IntArray, left: IntArray) -> IntArray:
        run = np.zeros_like(at)
        padded = np.zeros((len(at), sizes.shape[2]), sizes.dtype)
        for level in range(len(flat) - 1, -1, -1):
            longer = run + 2**level
            possible = longer <= left
            wider = np.maximum(padded, flat[level][np.where(possible, at + run, at)])
            fits = possible & (rules.capacity(wider, budget_bytes) >= longer)
            run = np.where(fits, longer, run)
            padded = np.where(fits[:, None], wider, padded)
        return np.maximum(run, 1)

    return longest
