"""Samples that are over the budget alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import CostError, OptionError, OversizeError
from torchbudget.plan.groups import Units
from torchbudget.plan.rules import BatchRules, Limit
from torchbudget.plan.size_table import SizeTable
from torchbudget.units import MAX_BYTES

Oversize: TypeAlias = Literal["raise", "skip", "alone"]

_CHUNK: Final = 2**17
_log: Final = logging.getLogger("torchbudget")
_NONE: Final = np.empty(0, np.int64)


def check_oversize(oversize: object, rules: BatchRules | None = None) -> None:
    """Raise an `OptionError` unless the option is one of `Oversize`, and goes with the rules."""
    if oversize not in get_args(Oversize):
        raise OptionError(
            f"oversize must be one of {', '.join(map(repr, get_args(Oversize)))}, got {oversize!r}"
        )
    if oversize == "alone" and rules is not None and rules.max_shapes is not None:
        raise OptionError(
            "with max_shapes a sample that is over the budget has no shape: choose "
            "oversize='raise' or 'skip'"
        )


def skipped_samples(
    sizes: SizeTable, rules: BatchRules, oversize: Oversize, units: Units | None = None
) -> IntArray:
    """The samples of a data set that are never drawn: see `oversized`.

    O(1) if the largest size on every axis fits, else O(N). Units that stay in one micro-batch are
    judged as a whole.

    Raises:
        OversizeError: also if every sample is over the budget with `"skip"`.
    """
    check_oversize(oversize, rules)
    if units is not None and units.whole:
        firsts = units.firsts[:-1]
        over = np.flatnonzero(rules.exceeded_alone(sizes.values[units.members], firsts) >= 0)
        if oversize == "alone" or not over.size:
            return _NONE
        message = (
            f"{over.size:,} of {len(units):,} units are over the budget or a limit as a whole, the "
            f"first that of index {units.members[firsts[over[0]]]}"
        )
        if oversize == "raise":
            raise OversizeError(f"{message}; raise it, or choose oversize='skip' or 'alone'")
        _log.warning("%s; they are skipped", message)
        over = np.sort(units.samples(over))
    elif (rules.exceeded_alone(sizes.largest) < 0).all():
        return _NONE
    else:
        over = oversized(sizes.values, rules, oversize, lambda place: f"index {place}")
    if over.size == len(sizes):
        raise OversizeError(
            f"all {len(sizes):,} samples are over the budget alone: nothing would be left to draw"
        )
    return over


def oversized(
    sizes: npt.NDArray[Any],
    rules: BatchRules,
    oversize: Oversize,
    called: Callable[[int], str],
) -> IntArray:
    """The places of samples to skip.

    Args:
        sizes: shape `(n,)` or `(n, d)`.
        rules: cost models and budgets.
        oversize: a sample over the budget raises (`"raise"`), is skipped (`"skip"`, logged once a
            call) or gets a micro-batch of its own, over the budget (`"alone"`).
        called: returns the name of the sample at a place, for messages.

    Returns:
        Sorted places, shape `(k,)`; none with `"alone"`.

    Raises:
        OversizeError: a sample is over the budget with `"raise"`.
    """
    if oversize == "alone":
        return _NONE
    if (rules.exceeded_alone(sizes.max(axis=0, initial=0)) < 0).all():
        return _NONE  # costs are monotone
    found = [
        first + np.flatnonzero(rules.exceeded_alone(sizes[first : first + _CHUNK]) >= 0)
        for first in range(0, len(sizes), _CHUNK)
    ]
    over = np.concatenate([_NONE, *found])
    if not over.size:
        return over
    worst = sizes[over[0]]
    limit = rules.limits[int(rules.exceeded_alone(worst))]
    what = "the budget" if limit.name == "cost" else limit.name
    message = (
        f"{over.size:,} of {len(sizes):,} samples are over {what} alone, the first at "
        f"{called(int(over[0]))}: size {worst.tolist()} {_needs(limit, rules.padded(worst))}"
    )
    model_bytes, budget = rules.model_bytes(worst), rules.limits[0]
    if rules.budget_bytes < model_bytes < MAX_BYTES:
        raise OversizeError(
            f"the model alone needs {budget.text(model_bytes)} of "
            f"{budget.text(rules.budget_bytes)}, before any sample is added (parameters, "
            "gradients, optimizer state): raise the budget, or shard, offload or shrink the model"
        )
    if oversize == "raise":
        raise OversizeError(
            f"{message}; raise {what}, shorten those samples, or choose oversize='skip' or 'alone'"
        )
    _log.warning("%s; they are skipped", message)
    return over


def _needs(limit: Limit, padded: IntArray) -> str:
    try:
        alone = int(np.max(limit.cost.batch_bytes(1, padded)))
    except CostError as error:
        return f"has a cost that cannot be computed ({error})"
    if alone == MAX_BYTES:
        return "is beyond the longest shape, or what was measured for the cost"
    return f"needs {limit.text(alone)} of {limit.text(limit.amount)}"
