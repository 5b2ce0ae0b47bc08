"""The bytes that live at one moment of a step, as a polynomial of the batch's shape."""

from __future__ import annotations

from dataclasses import dataclass

from torchbudget.cost.models.polynomials import EXACT, Term, polynomial
from torchbudget.cost.models.protocol import ArrayLike, IntArray
from torchbudget.errors import CostError


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A sum of terms: the bytes of n samples padded to L.

    All that lives at one moment of a step is made of tensors, and their shapes are products of n
    and the sizes. Terms without n are masks, position tables and relative biases; terms in n² are
    losses that compare all samples of a batch. Sizes may be counted from a start: of convolutions
    without padding, and of chunks that overlap, less than the size is left, by a constant; where
    layers round sizes up, more.

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
            if not 0 <= term.bytes < EXACT or not all(0 <= p <= 2 for p in powers):
                raise CostError(f"bytes must be 0 to 2**53, and powers 0 to 2: {term!r}")
            if term.start and len(term.start) != len(term.sizes):
                raise CostError(f"a start is a number for each axis: {term!r}")

    def __str__(self) -> str:
        return " + ".join(map(str, self.terms))

    @property
    def axes(self) -> int:
        """The number of ragged axes, d."""
        return len(self.terms[0].sizes)

    def batch_bytes(self, n: ArrayLike, padded_size: ArrayLike) -> IntArray:
        """See `CostModel.batch_bytes`; `CostOverflowError` from 2⁶³ bytes on."""
        return polynomial(self.terms).batch_bytes(n, padded_size)

    def capacity(self, padded_size: ArrayLike, budget_bytes: ArrayLike) -> IntArray:
        """See `CostModel.capacity`; exact at the boundary."""
        return polynomial(self.terms).capacity(padded_size, budget_bytes)
