"""Samples that are over the budget alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import CostError, OptionError, OversizeError
from torchbudget.plan.groups import NONE, Members
from torchbudget.plan.rules import BatchRules, Limit
from torchbudget.plan.size_table import SizeTable
from torchbudget.units import MAX_BYTES

Oversize: TypeAlias = Literal["raise", "skip", "alone"]

_CHUNK: Final = 2**17
_log: Final = logging.getLogger("torchbudget")


def check_oversize(oversize: object, rules: BatchRules | None = None) -> None:
    """Raise an `OptionError` unless the option is one of `Oversize`, and goes with the rules."""
    if oversize not in get_args(Oversize):
        raise OptionError(
            f"oversize must be one of {', '.join(map(repr, get_args(Oversize)))}, got {oversize!r}"
        )
    if oversize == "alone" and rules is not None and rules.max_shapes is not None:
        raise OptionError(
            "with max_shapes no shape fits a sample that exceeds the budget: choose "
            "oversize='raise' or 'skip'"
        )


def skipped_samples(
    sizes: SizeTable, rules: BatchRules, oversize: Oversize, units: Members | None = None
) -> IntArray:
    """The samples of a data set that are never drawn: see `oversized`.

    O(1) if the largest size on every axis fits and there are no units, else O(N).

    Raises:
        OversizeError: also if every sample is over the budget with `"skip"`.
    """
    check_oversize(oversize, rules)
    called = lambda at: f"index {at if units is None else units.leaders[at]}"  # noqa: E731
    over = oversized(sizes.values, sizes.largest, rules, oversize, called, units)
    if units is not None:
        over = np.sort(units.samples(over))
    if over.size == len(sizes):
        raise OversizeError(
            f"all {len(sizes):,} samples exceed the budget alone, so none is left: raise it"
        )
    return over


def oversized(
    sizes: npt.NDArray[Any],
    largest: npt.NDArray[Any],
    rules: BatchRules,
    oversize: Oversize,
    called: Callable[[int], str],
    units: Members | None = None,
) -> IntArray:
    """The places of samples to skip, or the numbers of units.

    Args:
        sizes: shape `(n,)` or `(n, d)`.
        largest: maximum on every axis, shape `()` or `(d,)`.
        rules: cost models and budgets.
        oversize: a sample over the budget raises (`"raise"`), is skipped (`"skip"`, logged once a
            call) or gets a micro-batch of its own, over the budget (`"alone"`).
        called: returns the name of the sample at a place (of the unit of a number), for messages.
        units: that stay in one micro-batch and are judged as a whole; `None`: samples are.

    Returns:
        Sorted places, shape `(k,)`; none with `"alone"`.

    Raises:
        OversizeError: a sample or unit is over the budget with `"raise"`.
    """
    if oversize == "alone":
        return NONE
    if units is None and (rules.exceeded_alone(largest) < 0).all():
        return NONE  # costs are monotone
    if units is None:
        kind, number = "samples", len(sizes)
        chunks = (sizes[first : first + _CHUNK] for first in range(0, max(number, 1), _CHUNK))
        exceeded = np.concatenate([rules.exceeded_alone(chunk).astype(np.int8) for chunk in chunks])
    else:
        kind, number = "units", len(units)
        exceeded = rules.exceeded_alone(sizes[units.members], units.firsts[:-1])
    over = np.flatnonzero(exceeded >= 0)
    if not over.size:
        return over
    limit = rules.limits[exceeded[over[0]]]
    what = "the budget" if limit.name == "cost" else limit.name
    message = (
        f"{over.size:,} of {number:,} {kind} exceed {what} alone, the first at "
        f"{called(int(over[0]))}"
    )
    if units is None:
        worst = sizes[over[0]]
        message += f": size {worst.tolist()} {_needs(limit, rules.padded(worst))}"
    model_bytes, budget = rules.model_bytes(sizes[0]), rules.limits[0]
    if rules.budget_bytes < model_bytes < MAX_BYTES:
        raise OversizeError(
            f"a batch without samples needs {budget.text(model_bytes)} of "
            f"{budget.text(rules.budget_bytes)} (parameters, gradients, optimizer state; on the "
            "CPU, the whole process): raise the budget, or shard, offload or shrink the model"
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
        return "is larger than the largest shape, or the largest measured size"
    return f"needs {limit.text(alone)} of {limit.text(limit.amount)}"
