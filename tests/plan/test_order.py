"""Which sample stands at which position: without and with replacement, weighted, and skipped."""

from __future__ import annotations

import itertools
from collections import Counter
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


def whole(order: Order, epoch: int = 0) -> Any:
    return order.epoch(epoch).indices(0, len(order))


@st.composite
def skips(draw: st.DrawFn, n: int) -> Any:
    """Sorted indices to skip, at least one sample left."""
    some = draw(st.sets(st.integers(0, n - 1), max_size=min(n - 1, 20)))
    return np.array(sorted(some), np.int64)


@st.composite
def orders(draw: st.DrawFn, *, kinds: str = "plain replacement weights both") -> Order:
    n = draw(st.integers(1, 120))
    skipped = draw(skips(n))
    options: dict[str, Any] = {"skipped": skipped, "seed": draw(st.integers(0, 2**70))}
    kind = draw(st.sampled_from(kinds.split()))
    available = n - len(skipped)
    if kind in ("weights", "both"):
        rng = np.random.default_rng(draw(st.integers(0, 2**32)))
        weights = rng.exponential(size=n) * (rng.random(n) < 0.7)
        weights[np.setdiff1d(np.arange(n), skipped)[0]] = 1
        options["weights"] = weights
        kept = np.delete(weights, skipped)
        available = int(np.count_nonzero(kept))
    options["replacement"] = kind in ("replacement", "both")
    if kind == "weights":
        options["num_samples"] = draw(st.integers(1, available))
    elif draw(st.booleans()):
        options["num_samples"] = draw(st.integers(1, 400))
    if kind == "plain":
        options["shuffle"] = draw(st.booleans())
    return order_of(n, **options)


# ---------------------------------------------------------------------- any stretch


@given(orders(), st.integers(0, 50), st.data())
def test_any_stretch_is_a_slice_of_the_whole(order: Order, epoch: int, data: Any) -> None:
    """`indices(start, stop)` is the epoch's slice, wherever it is entered and in which order."""
    everything = whole(order, epoch)
    assert everything.dtype == np.int64
    assert everything.shape == (len(order),)
    one = order.epoch(epoch)
    for _ in range(4):
        start = data.draw(st.integers(0, len(order)))
        stop = data.draw(st.integers(start, len(order)))
        stretch = one.indices(start, stop)
        assert np.array_equal(stretch, everything[start:stop])
        assert stretch.dtype == np.int64


@given(orders(), st.integers(0, 50))
def test_the_same_seed_and_epoch_give_the_same_order(order: Order, epoch: int) -> None:
    """An epoch is a function of seed and epoch alone: asked again, it is the same."""
    assert np.array_equal(whole(order, epoch), whole(order, epoch))


@given(orders())
def test_indices_are_samples_that_may_be_drawn(order: Order) -> None:
    """Nothing out of range, nothing skipped, nothing of weight 0."""
    indices = whole(order)
    assert indices.min() >= 0
    assert indices.max() < order.dataset_length
    assert not set(indices.tolist()) & set(order.skipped.tolist())
    if order.weights is not None:
        assert (order.weights[indices] > 0).all()


# ---------------------------------------------------------------------- without replacement


@given(orders(kinds="plain"))
def test_without_replacement_every_pass_brings_every_sample(order: Order) -> None:
    """Each whole pass holds each sample once, and the started one none twice."""
    expected = set(range(order.dataset_length)) - set(order.skipped.tolist())
    indices = whole(order)
    for start in range(0, len(order), order.available):
        one = indices[start : start + order.available].tolist()
        assert len(set(one)) == len(one)
        assert set(one) <= expected
        assert len(one) < order.available or set(one) == expected


def test_passes_differ_and_so_do_epochs() -> None:
    """Each pass of each epoch has an order of its own."""
    order = order_of(200, num_samples=600, seed=4)
    passes = [tuple(row) for epoch in range(3) for row in whole(order, epoch).reshape(3, 200)]
    assert len(set(passes)) == 9


def test_without_shuffling_the_data_sets_order_comes_again_and_again() -> None:
    order = order_of(5, shuffle=False, num_samples=12, skipped=np.array([2]))
    assert whole(order, 7).tolist() == [0, 1, 3, 4] * 3


def test_fewer_positions_than_samples() -> None:
    """A short epoch is the head of the long one, and over epochs it reaches every sample."""
    short, full = order_of(100, num_samples=10), order_of(100)
    assert np.array_equal(whole(short, 3), whole(full, 3)[:10])
    seen = Counter(index for epoch in range(2000) for index in whole(short, epoch).tolist())
    variance = 2000 * 0.1 * 0.9
    assert len(seen) == 100
    assert max(abs(count - 200) for count in seen.values()) < 4.5 * variance**0.5


def test_several_passes_are_entered_at_their_seams() -> None:
    """A stretch over several passes, and one that begins where a pass does."""
    order = order_of(7, num_samples=50, seed=1)
    everything = whole(order)
    one = order.epoch(0)
    for start, stop in itertools.combinations_with_replacement([0, 6, 7, 8, 14, 21, 49, 50], 2):
        assert np.array_equal(one.indices(start, stop), everything[start:stop])


# ---------------------------------------------------------------------- with replacement


@pytest.mark.parametrize("skipped", [[], [0, 4, 5, 29]])
def test_with_replacement_every_sample_is_as_likely(skipped: list[int]) -> None:
    """Over an epoch all samples come equally often, and so do pairs of neighbours."""
    n, times = 30, 60_000
    order = order_of(n, skipped=np.array(skipped, np.int64), replacement=True, num_samples=times)
    drawn = whole(order)
    kept = sorted(set(range(n)) - set(skipped))
    counts = np.bincount(drawn, minlength=n)
    assert counts.sum() == counts[kept].sum()
    assert abs(chi_square(counts[kept], times / len(kept))) < FAIR
    pairs = np.zeros((n, n))
    np.add.at(pairs, (drawn[0::2], drawn[1::2]), 1)
    pairs = pairs[np.ix_(kept, kept)]
    assert abs(chi_square(pairs, times / 2 / len(kept) ** 2)) < FAIR


def test_with_replacement_past_32_bits() -> None:
    """More samples than a 32-bit word can name are all within reach."""
    n = 2**40
    drawn = whole(order_of(n, replacement=True, num_samples=20_000))
    assert drawn.min() >= 0
    assert drawn.max() < n
    assert abs(chi_square(np.bincount(drawn * 64 // n, minlength=64), 20_000 / 64)) < FAIR


def test_epochs_draw_anew() -> None:
    order = order_of(1000, replacement=True)
    assert np.count_nonzero(whole(order, 0) == whole(order, 1)) < 12


# ---------------------------------------------------------------------- weights


def test_weights_with_replacement_are_frequencies() -> None:
    """Each sample comes in proportion to its weight; 0 never; skipped ones lose theirs."""
    weights = np.array([0.0, 1, 2, 3, 0, 4, 1e-300, 10, 7, 0])
    times = 100_000
    order = order_of(
        10, weights=weights, replacement=True, num_samples=times, skipped=np.array([8])
    )
    counts = np.bincount(whole(order), minlength=10)
    assert counts[[0, 4, 6, 8, 9]].tolist() == [0] * 5
    kept = [1, 2, 3, 5, 7]
    assert abs(chi_square(counts[kept], times * weights[kept] / weights[kept].sum())) < FAIR


def test_weights_are_relative() -> None:
    """Weights of any scale say the same, from the smallest to the largest floats."""
    weights = np.array([1.0, 2, 3, 4, 0])
    for replacement in (False, True):
        drawn = [
            whole(order_of(5, weights=weights * s, replacement=replacement, num_samples=4))
            for s in (1, 2.0**-900, 2.0**900)
        ]
        assert np.array_equal(drawn[0], drawn[1])
        assert np.array_equal(drawn[0], drawn[2])


def test_weights_at_the_ends() -> None:
    """Zero weights in front and behind never come, however the sums round."""
    weights = np.concatenate([np.zeros(5), np.full(1000, 0.1), np.zeros(5)])
    drawn = whole(order_of(1010, weights=weights, replacement=True, num_samples=200_000))
    assert drawn.min() >= 5
    assert drawn.max() < 1005
    assert abs(chi_square(np.bincount(drawn - 5, minlength=1000), 200)) < FAIR


def test_one_positive_weight() -> None:
    weights = np.array([0.0, 0, 5, 0])
    assert set(whole(order_of(4, weights=weights, replacement=True)).tolist()) == {2}
    assert whole(order_of(4, weights=weights, num_samples=1)).tolist() == [2]


def test_weights_without_replacement_are_successive_draws() -> None:
    """The first is drawn by weight; the second by weight among the rest: all orders of a few."""
    weights = np.array([1.0, 2, 0, 3, 4])
    order = order_of(5, weights=weights, num_samples=2)
    times = 20_000
    counts = Counter(tuple(whole(order, epoch).tolist()) for epoch in range(times))
    observed, expected = [], []
    for one, other in itertools.permutations([0, 1, 3, 4], 2):
        observed.append(counts[one, other])
        chance = weights[one] / 10 * weights[other] / (10 - weights[one])
        expected.append(times * chance)
    assert sum(observed) == times
    assert abs(chi_square(observed, expected)) < FAIR


@given(orders(kinds="weights"))
def test_weights_without_replacement_repeat_nothing(order: Order) -> None:
    """Every sample at most once, and one of weight 0 never."""
    indices = whole(order)
    assert len(set(indices.tolist())) == len(indices)


def test_skipped_samples_take_no_part_in_weighted_draws() -> None:
    """The rest is drawn as if the skipped ones had never been there."""
    weights = np.array([100.0, 1, 2, 100, 3])
    order = order_of(5, weights=weights, num_samples=1, skipped=np.array([0, 3]))
    times = 6000
    counts = Counter(int(whole(order, epoch)[0]) for epoch in range(times))
    observed = [counts[index] for index in (1, 2, 4)]
    assert abs(chi_square(observed, times * np.array([1, 2, 3]) / 6)) < FAIR


# ---------------------------------------------------------------------- skipped


@given(st.integers(1, 300), st.data())
def test_kept_samples_are_numbered_in_order(n: int, data: Any) -> None:
    """Kept sample number k is the k-th index that is not skipped."""
    skipped = data.draw(skips(n))
    order = order_of(n, skipped=skipped)
    kept = np.setdiff1d(np.arange(n), skipped)
    assert order.available == len(kept)
    assert np.array_equal(order.to_index(np.arange(len(kept))), kept)


@pytest.mark.parametrize("skipped", [[0], [9], [0, 1, 2], [7, 8, 9], [0, 2, 4, 6, 8], [4]])
def test_skipping_at_the_edges(skipped: list[int]) -> None:
    order = order_of(10, skipped=np.array(skipped))
    assert sorted(whole(order).tolist()) == sorted(set(range(10)) - set(skipped))


# ---------------------------------------------------------------------- what cannot hold


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shuffle": False, "replacement": True}, "need shuffle=True"),
        ({"shuffle": False, "weights": np.ones(4)}, "need shuffle=True"),
        ({"weights": np.ones(3)}, r"shape \(4,\), got \(3,\)"),
        ({"weights": np.ones((4, 1))}, r"got \(4, 1\)"),
        ({"weights": np.array([1, 1, -1.0, 1])}, "weight 2 is -1.0"),
        ({"weights": np.array([1, np.nan, 1, 1])}, "weight 1 is nan"),
        ({"weights": np.array([1, 1, 1, np.inf])}, "weight 3 is inf"),
        ({"weights": np.array([1.0, 0, 1, 1])}, "only 3 samples have a weight above 0"),
        ({"weights": np.ones(4), "num_samples": 5}, "drawing 5 of them needs replacement=True"),
        ({"weights": np.zeros(4), "replacement": True}, "a positive weight"),
        ({"weights": np.zeros(4)}, "only 0 samples"),
        (
            {"weights": np.array([0, 0, 0, 1.0]), "replacement": True, "skipped": np.array([3])},
            "only 0 samples",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_hold(options: Any, told: str) -> None:
    """Refused when the order is made, with what came."""
    with pytest.raises(OptionError, match=told):
        order_of(4, **options)
