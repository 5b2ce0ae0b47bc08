"""The largest of several polynomials of a batch's shape, evaluated together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from torchbudget.cost.models.protocol import ArrayLike, FloatArray, IntArray
from torchbudget.errors import CostError, CostOverflowError
from torchbudget.units import MAX_BYTES

# Below 2**53 every whole number of bytes is a float64.
EXACT: Final = float(2**53)


@dataclass(frozen=True, slots=True)
class Term:
    """`bytes · n^samples · Πᵢ max(Lᵢ − startᵢ, 0)^sizesᵢ`.

    Attributes:
        bytes: the coefficient, at least 0.
        samples: the power of n, at most 2.
        sizes: the power of the size on each axis.
        start: sizes up to which there is nothing, one for each axis; below 0, each size counts as
            that much more; empty: 0.
    """

    bytes: float
    samples: int
    sizes: tuple[int, ...]
    start: tuple[int, ...] = ()

    def __str__(self) -> str:
        names = ["L"] if len(self.sizes) == 1 else [f"L{i}" for i in range(1, len(self.sizes) + 1)]
        starts = zip(names, self.start or [0] * len(names), strict=True)
        names = [
            f"({name} {'−' if start > 0 else '+'} {abs(start)})" if start else name
            for name, start in starts
        ]
        factors = [
            name + ("", "", "²", "³")[power]
            for name, power in zip(["n", *names], [self.samples, *self.sizes], strict=True)
            if power
        ]
        return "·".join([f"{self.bytes:,.4g}", *factors])


class Polynomials:
    """The maximum of sums of terms.

    A planner asks about a few shapes at a time, and very often: each product of sizes is made once,
    and multiplied by the coefficients of all sums.

    Args:
        sums: of terms, one at least; all terms are of the same number of axes.
    """

    __slots__ = ("_axes", "_coefficients", "_powers", "_products")

    def __init__(self, sums: Sequence[Sequence[Term]]) -> None:
        terms = [term for terms in sums for term in terms]
        self._axes = len(terms[0].sizes)
        self._products = sorted({(term.start, term.sizes) for term in terms})
        # Powers of n: 0 and 1 always, 2 where there is a term of it.
        self._powers = 1 + max(1, *(term.samples for term in terms))
        self._coefficients = np.zeros((len(self._products), self._powers, len(sums)))
        for number, some in enumerate(sums):
            for term in some:
                at = self._products.index((term.start, term.sizes)), term.samples, number
                self._coefficients[at] += term.bytes

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `CostOverflowError` from 2⁶³ bytes on."""
        number = np.asarray(n, np.int64)
        if number.size and number.min() < 0:
            raise CostError(f"a batch has at least 0 samples, got {number.min()}")
        parts = self._parts(padded_size, number.ndim)
        # In floating point the sum cannot wrap, so it is what the range is checked on; the slack is
        # what rounding can hide there.
        if _summed(parts, number.astype(np.float64)).max(initial=0) >= MAX_BYTES - 8192:
            raise CostOverflowError("this batch costs 2**63 bytes or more")
        total: IntArray = _summed(parts, number).max(axis=0)
        return total

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        budget = np.asarray(budget_bytes, np.int64)
        fixed, each, *square = self._parts(padded_size, budget.ndim)
        room = budget - fixed
        n: IntArray = np.maximum(room, 0) // np.maximum(each, 1)
        if not each.all():  # samples that cost nothing
            n = np.where((each == 0) & (room >= 0), MAX_BYTES, n)
        if square:
            n = np.where(square[0] > 0, _largest_root(square[0], each, room), n)
        least: IntArray = n.min(axis=0)
        return least

    def _parts(self, padded_size: ArrayLike, axes_beside: int) -> IntArray:
        """Bytes without n, per n and per n², each rounded up, of every sum.

        Of shape `(powers of n, sums, …)`, where `…` has as many axes as what it is combined with.
        """
        lengths = np.asarray(padded_size)
        if self._axes == 1:
            lengths = lengths[..., None]
        elif lengths.ndim == 0 or lengths.shape[-1] != self._axes:
            raise CostError(
                f"this cost has {self._axes} axes: expected sizes of shape (…, {self._axes}), "
                f"got {lengths.shape}"
            )
        shape = (1,) * (axes_beside - lengths.ndim + 1) + lengths.shape[:-1]
        length = [lengths[..., axis].astype(np.float64) for axis in range(self._axes)]
        # Sums and products of what is at least 0, in one order for all shapes: they are monotone.
        parts: FloatArray = np.zeros((*self._coefficients.shape[1:], *shape))
        columns = self._coefficients.reshape(*self._coefficients.shape, *(1,) * len(shape))
        of_start: dict[tuple[int, ...], list[Any]] = {(): length}
        for coefficients, (start, powers) in zip(columns, self._products, strict=True):
            if start not in of_start:
                beyond = zip(length, start, strict=True)
                of_start[start] = [np.maximum(one - least, 0) for one, least in beyond]
            product: Any = 1.0
            for one, power in zip(of_start[start], powers, strict=True):
                for _ in range(power):
                    product = product * one
            parts += coefficients * product
        if parts.size and not parts.max() < EXACT:
            raise CostOverflowError("a batch of these sizes costs 2**53 bytes or more")
        return np.ceil(parts).astype(np.int64)


@lru_cache(maxsize=256)
def polynomial(terms: tuple[Term, ...]) -> Polynomials:
    """Of one sum of terms."""
    return Polynomials([terms])


def _summed(parts: IntArray, n: Any) -> Any:
    """`parts[0] + parts[1]·n + parts[2]·n²`, by Horner's rule."""
    total = parts[-1]
    for part in parts[-2::-1]:
        total = part + n * total
    return total


def _largest_root(square: IntArray, each: IntArray, room: IntArray) -> IntArray:
    """The largest n ≥ 0 with `each·n + square·n² ≤ room`, where `square` is at least 1."""
    square, room = np.maximum(square, 1), np.clip(room, 0, 2**62)  # beyond, products could wrap
    half = each / 2
    # The form of the root that does not subtract two nearly equal numbers.
    root = room / np.maximum(half + np.sqrt(half * half + square * room.astype(np.float64)), 1)
    n: IntArray = np.maximum(np.floor(root).astype(np.int64) - 1, 0)
    for _ in range(2):  # n is below 2**32, where its error is below 1
        more = n + 1
        n = np.where(more * each + more * more * square <= room, more, n)
    return n
