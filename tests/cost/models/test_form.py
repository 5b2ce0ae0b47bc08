"""Forms: sums of products of a batch's shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbudget.cost.models.form import Form
from torchbudget.cost.models.polynomials import Term
from torchbudget.errors import CostError, CostOverflowError
from torchbudget.units import MAX_BYTES

bytes_of = st.one_of(st.just(0.0), st.floats(1e-6, 1e12), st.integers(0, 10**9))
powers = st.integers(0, 2)


def forms(axes: int) -> st.SearchStrategy[Form]:
    start = st.one_of(st.just(()), st.tuples(*[st.integers(-50, 200)] * axes))
    term = st.builds(Term, bytes_of, powers, st.tuples(*[powers] * axes), start)
    return st.lists(term, min_size=1, max_size=8).map(lambda terms: Form(terms=tuple(terms)))


def parts(form: Form, size: tuple[int, ...]) -> list[int]:
    """Bytes without n, per n and per n², in exact arithmetic but for rounding."""

    def product(term: Term) -> int:
        starts = term.start or [0] * len(size)
        beyond = [max(one - start, 0) for one, start in zip(size, starts, strict=True)]
        return math.prod(map(pow, beyond, term.sizes))

    return [
        math.ceil(sum(t.bytes * product(t) for t in form.terms if t.samples == p)) for p in range(3)
    ]


@given(st.integers(1, 3).flatmap(forms), st.data())
def test_a_form_is_the_sum_of_its_terms(form: Form, data: st.DataObject) -> None:
    size = data.draw(st.tuples(*[st.integers(0, 300)] * form.axes))
    n = data.draw(st.integers(0, 1000))
    fixed, each, square = parts(form, size)
    if max(fixed, each, square) >= 2**53 or fixed + n * each + n * n * square > 2**62:
        return
    found = form.batch_bytes(n, size if form.axes > 1 else size[0])
    assert found == pytest.approx(fixed + n * each + n * n * square, rel=1e-12, abs=3 * n * n + 3)


@given(forms(1), st.integers(0, 10**5), st.integers(0, 2**62))
def test_capacity_is_exact(form: Form, size: int, budget: int) -> None:
    """As many samples as fit, and not one more, over the whole range of 64 bits."""
    fixed, each, square = parts(form, (size,))
    if max(fixed, each, square) >= 2**53:
        with pytest.raises(CostOverflowError):
            form.capacity(size, budget)
        return
    fixed, one, two = (int(form.batch_bytes(n, size)) for n in range(3))
    square = (two - 2 * one + fixed) // 2
    each = one - fixed - square
    n = int(form.capacity(size, budget))
    if n == MAX_BYTES:
        assert one == fixed
        return
    assert n == 0 or fixed + n * each + n * n * square <= budget
    assert fixed + (n + 1) * each + (n + 1) ** 2 * square > budget


@given(forms(2), st.integers(0, 2**32))
def test_more_or_longer_samples_never_cost_less(form: Form, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, size = rng.integers(0, 100, 30), rng.integers(0, 200, (30, 2))
    more, larger = n + rng.integers(0, 3, 30), size + rng.integers(0, 3, (30, 2))
    try:
        assert (form.batch_bytes(more, larger) >= form.batch_bytes(n, size)).all()
        assert (form.capacity(larger, 10**9) <= form.capacity(size, 10**9)).all()
    except CostOverflowError:
        pass


def test_bad_terms() -> None:
    for wrong in (Term(-1, 1, (1,)), Term(math.nan, 1, (1,)), Term(1, 3, (1,)), Term(1, 1, (3,))):
        with pytest.raises(CostError, match="powers 0 to 2"):
            Form(terms=(wrong,))
    for start in ((1, 1), (-1, 0)):
        with pytest.raises(CostError, match="a start is a number for each axis"):
            Form(terms=(Term(1, 1, (1,), start),))
    for terms in ((), (Term(1, 1, (1,)), Term(1, 1, (1, 1)))):
        with pytest.raises(CostError, match="same number of axes"):
            Form(terms=terms)
    with pytest.raises(CostError, match="at least 0 samples"):
        Form(terms=(Term(1, 1, (0,)),)).batch_bytes(-1, 3)
    with pytest.raises(CostError, match="2 axes"):
        Form(terms=(Term(1, 1, (1, 0)),)).batch_bytes(1, 3)
