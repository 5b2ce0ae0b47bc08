"""Which sample stands at which position of a pass: once each, or drawn by weight, and skipped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import chi_square
from torchbudget.errors import OptionError
from torchbudget.plan.order import Order

NONE = np.empty(0, np.int64)
FAIR = 4.0


def order_of(n: int, **options: Any) -> Order:
    return Order(dataset_length=n, **({"skipped": NONE} | options))


def whole(order: Order, *key: int) -> Any:
    return order.indices(key or (0, 0), 0, len(order))


@st.composite
def skips(draw: st.DrawFn, n: int) -> Any:
    """Sorted indices to skip, at least one sample left."""
    some = draw(st.sets(st.integers(0, n - 1), max_size=min(n - 1, 20)))
    return np.array(sorted(some), np.int64)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    n = draw(st.integers(1, 120))
    options: dict[str, Any] = {"skipped": draw(skips(n)), "seed": draw(st.integers(0, 2**70))}
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        weights = rng.exponential(size=n) * (rng.random(n) < 0.7)
        weights[np.setdiff1d(np.arange(n), options["skipped"])[0]] = 1
        options["weights"] = weights
    else:
        options["shuffle"] = draw(st.booleans())
    return order_of(n, **options)


@given(orders(), st.integers(0, 50), st.integers(0, 3), st.data())
def test_a_pass_is_a_function_of_its_key_and_position(
    order: Order, first: int, number: int, data: st.DataObject
) -> None:
    """`indices(start, stop)` is a slice of the pass, wherever it is entered and in which order.

    A pass has every sample once that is not skipped, or as many draws of weights above 0.
    """
    everything = whole(order, first, number)
    assert everything.dtype == np.int64
    kept = np.setdiff1d(np.arange(order.dataset_length), order.skipped)
    assert everything.shape == (len(order),) == (len(kept),)
    assert np.isin(everything, kept).all()
    if order.weights is None:
        assert np.array_equal(np.sort(everything), kept)
        assert order.shuffle or np.array_equal(everything, kept)
    else:
        assert (order.weights[everything] > 0).all()
    key = first, number
    for _ in range(3):
        start = data.draw(st.integers(0, len(order)))
        stop = data.draw(st.integers(start, len(order)))
        assert np.array_equal(order.indices(key, start, stop), everything[start:stop])


@pytest.mark.parametrize("options", [{}, {"weights": np.ones(200)}], ids=["once", "weights"])
def test_each_pass_of_each_epoch_has_an_order_of_its_own(options: Any) -> None:
    order = order_of(200, seed=4, **options)
    passes = {tuple(whole(order, first, number)) for first in range(3) for number in range(3)}
    assert len(passes) == 9
    assert tuple(whole(order_of(200, seed=5, **options))) not in passes


# ---------------------------------------------------------------------- weights


def drawn(weights: Any, passes: int, **options: Any) -> Any:
    """The draws of some passes, one after the other."""
    order = order_of(len(weights), weights=np.array(weights, np.float64), **options)
    return np.concatenate([whole(order, 0, number) for number in range(passes)])


def test_weights_are_frequencies() -> None:
    """Each sample comes in proportion to its weight, each pair to both; skipped ones never."""
    weights = np.array([0.0, 1, 2, 3, 0, 4, 1e-300, 10, 7, 0])
    found = drawn(weights, 6000, skipped=np.array([8]))
    counts = np.bincount(found, minlength=10)
    assert counts[[0, 4, 6, 8, 9]].tolist() == [0] * 5
    kept = [1, 2, 3, 5, 7]
    shares = weights[kept] / weights[kept].sum()
    assert abs(chi_square(counts[kept], len(found) * shares)) < FAIR
    pairs = np.zeros((10, 10))
    np.add.at(pairs, (found[0::2], found[1::2]), 1)
    expected = len(found) / 2 * np.outer(shares, shares)
    assert abs(chi_square(pairs[np.ix_(kept, kept)], expected)) < FAIR


def test_weights_are_relative() -> None:
    """Weights of any scale say the same, from the smallest to the largest floats."""
    weights = np.array([1.0, 2, 3, 4, 0])
    found = [drawn(weights * scale, 20) for scale in (1, 2.0**-900, 2.0**900)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_weights_at_the_ends() -> None:
    """Zero weights in front and behind never come, however the sums round; one may be all."""
    found = drawn(np.concatenate([np.zeros(5), np.full(1000, 0.1), np.zeros(5)]), 200)
    assert (found.min(), found.max()) == (5, 1004)
    assert abs(chi_square(np.bincount(found - 5, minlength=1000), len(found) / 1000)) < FAIR
    assert set(drawn([0, 0, 5, 0], 3).tolist()) == {2}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shuffle": False, "weights": np.ones(4)}, "need shuffle=True"),
        ({"weights": np.ones(3)}, r"shape \(4,\), got \(3,\)"),
        ({"weights": np.ones((4, 1))}, r"got \(4, 1\)"),
        ({"weights": np.array([1, 1, -1.0, 1])}, "weight 2 is -1.0"),
        ({"weights": np.array([1, np.nan, 1, 1])}, "weight 1 is nan"),
        ({"weights": np.array([1, 1, 1, np.inf])}, "weight 3 is inf"),
        ({"weights": np.zeros(4)}, "a weight above 0"),
        ({"weights": np.array([0, 0, 0, 1.0]), "skipped": np.array([3])}, "sample that fits"),
    ],
    ids=str,
)
def test_options_that_cannot_hold(options: Any, told: str) -> None:
    """Refused when the order is made, with what came."""
    with pytest.raises(OptionError, match=told):
        order_of(4, **options)
