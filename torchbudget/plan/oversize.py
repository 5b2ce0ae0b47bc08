"""Samples that alone are over the budget."""

from __future__ import annotations

import logging
from typing import Final, Literal, TypeAlias, get_args

import numpy as np

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import CostError, OptionError, OversizeError
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.size_table import SizeTable
from torchbudget.units import format_bytes

Oversize: TypeAlias = Literal["raise", "skip", "alone"]

_CHUNK: Final = 2**17
_log: Final = logging.getLogger("torchbudget")


def skipped_samples(sizes: SizeTable, rules: BatchRules, oversize: Oversize) -> IntArray:
    """The samples that are never drawn, as `oversize` decides.

    O(1) where the largest size on every axis fits, else O(N).

    Args:
        sizes: of all samples.
        rules: with the budget.
        oversize: `"raise"`, `"skip"` (they are counted and logged once) or `"alone"` (each is a
            micro-batch of its own, over the budget).

    Returns:
        Sorted indices, shape `(k,)`.

    Raises:
        OversizeError: a sample is over the budget with `"raise"`, or every sample is with `"skip"`.
    """
    if oversize not in get_args(Oversize):
        raise OptionError(
            f"oversize must be one of {', '.join(map(repr, get_args(Oversize)))}, got {oversize!r}"
        )
    if oversize == "alone" or _fits(rules, _one(sizes.largest)).all():
        return np.empty(0, np.int64)
    found = [
        first + np.flatnonzero(~_fits(rules, sizes.values[first : first + _CHUNK]))
        for first in range(0, len(sizes), _CHUNK)
    ]
    over = np.concatenate(found)
    if not over.size:
        return over
    worst = sizes.values[over[0]]
    try:
        needs = f"needs {format_bytes(int(rules.cost.batch_bytes(1, rules.padded(worst))))}"
    except CostError as error:
        needs = f"costs nobody knows what ({error})"
    told = (
        f"{over.size:,} of {len(sizes):,} samples are over the budget alone, the first at index "
        f"{over[0]}: size {worst.tolist()} {needs} of {format_bytes(rules.budget_bytes)}"
    )
    if oversize == "raise":
        raise OversizeError(
            f"{told}; raise the budget, shorten those samples, or choose oversize='skip' or 'alone'"
        )
    if over.size == len(sizes):
        raise OversizeError(f"{told}: nothing would be left to draw")
    _log.warning("%s; they are skipped", told)
    return over


def _fits(
    rules: BatchRules, sizes: np.ndarray[tuple[int, ...], np.dtype[np.integer]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    return np.asarray(rules.cost.capacity(rules.padded(sizes), rules.budget_bytes) >= 1)


def _one(largest: IntArray) -> IntArray:
    """The largest size as one sample's: shape `()` or `(d,)`."""
    return largest if len(largest) > 1 else largest[0]
