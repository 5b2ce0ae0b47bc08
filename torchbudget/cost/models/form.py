"""The bytes that live at one moment of a step, as a polynomial of the batch's shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.errors import CostError, CostOverflowError
from torchbudget.units import MAX_BYTES

FloatArray: TypeAlias = npt.NDArray[np.float64]

# Below 2**53 every whole number of bytes is a float64.
_EXACT: Final = float(2**53)


@dataclass(frozen=True, slots=True)
class Term:
    """`bytes · n^samples · Πᵢ Lᵢ^sizesᵢ`.

    Attributes:
        bytes: the coefficient, at least 0.
        samples: the power of n, at most 2.
        sizes: the power of the size on each axis.
    """

    bytes: float
    samples: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        names = ["L"] if len(self.sizes) == 1 else [f"L{i}" for i in range(1, len(self.sizes) + 1)]
        factors = [
            name + ("", "", "²", "³")[power]
            for name, power in zip(["n", *names], [self.samples, *self.sizes], strict=True)
            if power
        ]
        return "·".join([f"{self.bytes:,.4g}", *factors])


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A sum of terms: the bytes of n samples padded to L.

    All that lives at one moment of a step is made of tensors, and their shapes are products of n
    and the sizes. Terms without n are masks, position tables and relative biases; terms in n² are
    losses that compare all samples of a batch.

    Attributes:
        terms: one at least, all of the same number of axes.

    Raises:
        CostError: there are no terms, or a coefficient or a power is out of range.

    >>> form = Form(terms=(Term(10, 0, (0,)), Term(1, 0, (2,)), Term(4, 1, (1,)), Term(2, 2, (0,))))
    >>> str(form)
    '10 + 1·L² + 4·n·L + 2·n²'
    >>> int(form.batch_bytes(3, 5)), int(form.capacity(5, 113))
    (113, 3)
    """

    terms: tuple[Term, ...]

    def __post_init__(self) -> None:
        if len({len(term.sizes) for term in self.terms}) != 1:
            raise CostError(f"a form has terms of the same number of axes, got {self.terms!r}")
        for term in self.terms:
            powers = (term.samples, *term.sizes)
            if not 0 <= term.bytes < _EXACT or not all(0 <= p <= 2 for p in powers):
                raise CostError(f"bytes must be 0 to 2**53, and powers 0 to 2: {term!r}")

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.terms[0].sizes)

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `CostOverflowError` from 2⁶³ bytes on."""
        number = np.asarray(n, np.int64)
        if number.size and number.min() < 0:
            raise CostError(f"a batch has at least 0 samples, got {number.min()}")
        fixed, each, square = self._parts(padded_size)
        floats = number.astype(np.float64)
        # In floating point the sum cannot wrap, so it is what the range is checked on; the slack is
        # what rounding can hide there.
        if np.max(fixed + floats * (each + floats * square), initial=0) >= MAX_BYTES - 8192:
            raise CostOverflowError("this batch costs 2**63 bytes or more")
        total: IntArray = fixed + number * (each + number * square)
        return total

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        fixed, each, square = self._parts(padded_size)
        room = np.asarray(budget_bytes, np.int64) - fixed
        n: IntArray = np.maximum(room, 0) // np.maximum(each, 1)
        if not np.all(each):  # samples that cost nothing
            n = np.where((each == 0) & (room >= 0), MAX_BYTES, n)
        if np.any(square):
            n = np.where(square > 0, _largest_root(square, each, room), n)
        return n

    def _parts(self, padded_size: ArrayLike) -> tuple[Any, Any, Any]:
        """Bytes without n, per n and per n², each rounded up, shape `(…)`."""
        lengths, axes = np.asarray(padded_size), self.axes
        if axes == 1:
            lengths = lengths[..., None]
        elif lengths.ndim == 0 or lengths.shape[-1] != axes:
            raise CostError(
                f"this cost has {axes} axes: expected sizes of shape (…, {axes}), "
                f"got {lengths.shape}"
            )
        length = [lengths[..., axis].astype(np.float64) for axis in range(axes)]
        parts: list[Any] = [0.0, 0.0, 0.0]
        for term in self.terms:  # sums and products of what is at least 0 are monotone
            value: Any = term.bytes
            for one, power in zip(length, term.sizes, strict=True):
                for _ in range(power):
                    value = value * one
            parts[term.samples] = parts[term.samples] + value
        if any(np.size(part) and not np.max(part) < _EXACT for part in parts):
            raise CostOverflowError("a batch of these sizes costs 2**53 bytes or more")
        fixed, each, square = (np.ceil(part).astype(np.int64) for part in parts)
        # A form without sizes still has the shape of those that it is asked about.
        return fixed + np.zeros(lengths.shape[:-1], np.int64), each, square


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
