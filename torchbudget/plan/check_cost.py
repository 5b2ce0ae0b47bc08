"""Checks of a user's cost: it is vectorised, returns whole bytes, and its capacity fits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measured import MeasuredCost
from torchbudget.cost.protocol import AdditiveCost, CostModel, IntArray
from torchbudget.errors import CostError, MeasureWarning, SizesError, TorchBudgetError, warn
from torchbudget.plan.rules import BatchRules, Limit

_ASKED: Final = 2**12  # samples whose sizes a cost is called with
_NUMBERS: Final = np.array([1, 2, 8, 64])  # of samples for which a time is asked
_MOST: Final = 2**31  # samples: bytes must not wrap if a sample costs nothing


def check_keeps_gradients(cost: CostModel) -> None:
    """Raise a `CostError` if a measured cost lacks the gradients of earlier micro-batches."""
    if not getattr(cost, "keeps_gradients", True):
        raise CostError(
            "the cost was measured on a step that drops its gradients, but micro-batches of one "
            "optimizer step keep those of earlier ones: pass accumulate=True to measure_cost"
        )


def check_cost(rules: BatchRules, sizes: npt.NDArray[Any], largest: npt.NDArray[Any]) -> None:
    """Call the cost models of the rules with some of the planned sizes.

    Args:
        rules: cost models and budgets.
        sizes: at least one, shape `(n,)` or `(n, d)`; those of up to 4,096 samples, evenly spread,
            are used.
        largest: largest size on every axis, shape `()` or `(d,)`, which is used too.

    Raises:
        CostError: a model takes no arrays; does not return whole bytes, one for each size; or its
            capacity does not fit the budget by its own `batch_bytes`; or a time is negative, or
            falls where a batch grows.
        SizesError: a model takes sizes of another number of axes.

    Warns:
        MeasureWarning: a cost was predicted for another budget.
    """
    some = np.concatenate([sizes[:: -(-len(sizes) // _ASKED)], largest[None]])
    padded = np.unique(rules.padded(some), axis=0)
    # The budget, the limits that depend on sizes, and the work.
    limits = [limit for limit in rules.limits if limit.name == "cost" or limit.most is None]
    if rules.time is not None:
        limits.append(Limit("time", rules.time, rules.budget_bytes))
    most = _MOST if rules.most is None else rules.most
    for limit in limits:
        _check_shapes(limit.name, limit.cost, padded, limit.amount)
        if isinstance(limit.cost, AdditiveCost):  # samples are added one by one
            name, function = f"{limit.name}.item_bytes", limit.cost.item_bytes
            _answer(name, function, padded, shape=(len(padded),))
        else:
            _check_capacity(limit, padded, most)
        if isinstance(limit.cost, MeasuredCost) and limit.cost.caution:
            warn(limit.cost.caution, MeasureWarning)
    if rules.time is not None:
        _check_rises(rules.time, padded)


def _check_rises(time: CostModel, padded: IntArray) -> None:
    """Check that a time is not negative, and never falls where a batch grows."""

    def taken(n: IntArray, sizes: IntArray) -> IntArray:
        return _answer("time.batch_bytes", time.batch_bytes, n, sizes, shape=n.shape)

    larger = np.maximum(padded, np.roll(padded, -1, axis=0))
    n = np.repeat(_NUMBERS, len(padded))
    sizes, larger = (np.concatenate([one] * len(_NUMBERS)) for one in (padded, larger))
    before = taken(n, sizes)
    for more, longer in ((2 * n, sizes), (n, larger)):
        after = taken(more, longer)
        wrong = np.flatnonzero((before < 0) | (after < before))
        if wrong.size:
            at = wrong[0]
            raise CostError(
                f"time.batch_bytes says that {n[at]} samples of size {sizes[at].tolist()} take "
                f"{before[at]:,}, and {more[at]} of size {longer[at].tolist()} take "
                f"{after[at]:,}: a time is not negative, and never falls where a batch grows"
            )


def _check_capacity(limit: Limit, padded: IntArray, most: int) -> None:
    n = np.minimum(limit.cost.capacity(padded, limit.amount), most)
    some_fit = n >= 1
    n, padded = n[some_fit], padded[some_fit]
    needed = limit.cost.batch_bytes(n, padded)
    over = np.flatnonzero(needed > limit.amount)
    if over.size:
        first, name = over[0], limit.name
        raise CostError(
            f"{name}.capacity says that {n[first]} samples of size {padded[first].tolist()} fit "
            f"{limit.text(limit.amount)}, but {name}.batch_bytes says that they need "
            f"{limit.text(int(needed[first]))}: capacity must be the largest n with "
            "batch_bytes(n, padded_size) <= budget_bytes"
        )


def _check_shapes(name: str, model: CostModel, padded: IntArray, budget: int) -> None:
    axes, given = getattr(model, "axes", None), padded[0].size
    if axes not in (None, given):
        takes, came = ("(N,)" if number == 1 else f"(N, {number})" for number in (axes, given))
        raise SizesError(
            f"the {name} takes sizes of the shape {takes}, got {came}: pass unit_bytes or "
            "pair_bytes for every axis, and a key with a field for each to sizes_of(dataset, key)"
        )
    many = np.full(len(padded), 1)
    _answer(f"{name}.batch_bytes", model.batch_bytes, many, padded, shape=many.shape)
    _answer(f"{name}.capacity", model.capacity, padded, many * budget, shape=many.shape)


def _answer(
    name: str, function: Callable[..., Any], *arguments: IntArray, shape: tuple[int, ...]
) -> IntArray:
    shapes = ", ".join(str(argument.shape) for argument in arguments)
    asked = f"{name}, called with int64 arrays of the shapes {shapes},"
    try:
        found = np.asarray(function(*arguments))
    except TorchBudgetError:
        raise
    except Exception as error:
        raise CostError(
            f"{asked} raised {type(error).__name__}: {error}; it must take arrays and return one: "
            "use np.maximum instead of max, np.where instead of if"
        ) from error
    if found.shape != shape:
        raise CostError(
            f"{asked} must return an array of the shape {shape}, returned {found.shape}"
        )
    if found.dtype.kind != "i":
        raise CostError(
            f"{asked} must return whole numbers (int64), returned {found.dtype}: round bytes up, "
            "np.ceil(…).astype(np.int64), and capacities down, np.floor(…).astype(np.int64)"
        )
    return found
