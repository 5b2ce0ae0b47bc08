"""Which sample stands at which position of a pass: shuffled, weighted, in order, and skipped."""

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


def whole(order: Order, first: int = 0, number: int = 0) -> Any:
    return order.of_pass(first, number).indices(0, len(order))


@st.composite
def orders(draw: st.DrawFn) -> Order:
    n = draw(st.integers(1, 120))
    some = draw(st.sets(st.integers(0, n - 1), max_size=min(n - 1, 20)))
    options: dict[str, Any] = {
        "skipped": np.array(sorted(some), np.int64),
        "seed": draw(st.integers(0, 2**70)),
        "shuffle": draw(st.booleans()),
    }
    if options["shuffle"] and draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        options["weights"] = rng.exponential(size=n) * (rng.random(n) < 0.7)
        options["weights"][np.setdiff1d(np.arange(n), options["skipped"])[0]] = 1
    return order_of(n, **options)


@given(orders(), st.integers(0, 50), st.integers(0, 5), st.data())
def test_any_stretch_is_a_slice_of_the_pass(
    order: Order, first: int, number: int, data: Any
) -> None:
    """A pass is a function of seed and pass: the same again, wherever it is entered."""
    everything = whole(order, first, number)
    assert everything.dtype == np.int64
    assert everything.shape == (len(order),)
    assert np.array_equal(everything, whole(order, first, number))
    one = order.of_pass(first, number)
    for _ in range(4):
        start = data.draw(st.integers(0, len(order)))
        stop = data.draw(st.integers(start, len(order)))
        assert np.array_equal(one.indices(start, stop), everything[start:stop])


@given(orders())
def test_a_pass_has_every_sample_once(order: Order) -> None:
    """Without weights; with weights, samples with a weight. Nothing that is skipped."""
    kept = np.setdiff1d(np.arange(order.dataset_length), order.skipped)
    assert len(order) == len(kept)
    assert np.array_equal(order.to_index(np.arange(len(kept))), kept)
    indices = whole(order)
    if order.weights is None:
        assert np.array_equal(np.sort(indices), kept)
        assert order.shuffle or np.array_equal(indices, kept)
    else:
        assert set(indices.tolist()) <= set(kept.tolist())
        assert (order.weights[indices] > 0).all()


@pytest.mark.parametrize("weights", [None, np.ones(200)])
def test_passes_differ(weights: Any) -> None:
    """Each pass, and the passes that begin with each epoch, have an order of their own."""
    order = order_of(200, seed=4, weights=weights)
    passes = [tuple(whole(order, first, number)) for first in range(3) for number in range(3)]
    assert len(set(passes)) == 9


def test_weights_are_frequencies() -> None:
    """Each sample comes in proportion to its weight; 0 never; skipped samples lose theirs."""
    weights = np.array([0.0, 1, 2, 3, 0, 4, 1e-300, 10, 7, 0])
    order = order_of(10, weights=weights, skipped=np.array([8]))
    drawn = np.concatenate([whole(order, 0, number) for number in range(10_000)])
    counts = np.bincount(drawn, minlength=10)
    assert counts[[0, 4, 6, 8, 9]].tolist() == [0] * 5
    kept = [1, 2, 3, 5, 7]
    expected = len(drawn) * weights[kept] / weights[kept].sum()
    assert abs(chi_square(counts[kept], expected)) < FAIR


@pytest.mark.parametrize("scale", [2.0**-900, 1, 2.0**900])
def test_weights_are_relative(scale: float) -> None:
    """Weights of any scale say the same; zero weights at the ends never come."""
    weights = np.concatenate([np.zeros(5), np.full(1000, 0.1), np.zeros(5)])
    drawn = whole(order_of(1010, weights=weights * scale))
    assert np.array_equal(drawn, whole(order_of(1010, weights=weights)))
    assert 5 <= drawn.min() <= drawn.max() < 1005
    assert set(whole(order_of(4, weights=np.array([0, 0, scale, 0]))).tolist()) == {2}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shuffle": False, "weights": np.ones(4)}, "need shuffle=True"),
        ({"weights": np.ones(3)}, r"shape \(4,\), got \(3,\)"),
        ({"weights": np.array([1, 1, -1.0, 1])}, "weight 2 is -1.0"),
        ({"weights": np.array([1, np.nan, 1, 1])}, "weight 1 is nan"),
        ({"weights": np.zeros(4)}, "no sample .* has a weight above 0"),
        ({"weights": np.array([0, 0, 0, 1.0]), "skipped": np.array([3])}, "has a weight above 0"),
    ],
    ids=str,
)
def test_options_that_cannot_hold(options: Any, told: str) -> None:
    """Refused when the order is made, with what came."""
    with pytest.raises(OptionError, match=told):
        order_of(4, **options)
