"""Which sample stands at which position: the permutation is fair, and can be entered anywhere."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.oracles import chi_square, deviate
from torchbudget.errors import OptionError
from torchbudget.plan.order import Order
from torchbudget.plan.permutation import Permutation, random_words, scale, shuffled_keys

seeds = st.integers(0, 2**63)
keys = st.lists(st.integers(0, 2**31), min_size=1, max_size=3)

# Every statistic below is a normal deviate of a fixed seed: a fair source stays within four.
FAIR = 4.0
# From here on the network has few rounds; below, many.
LARGE = 2**16


def whole(n: int, seed: int, *key: int) -> Any:
    return Permutation(n, seed, *key)(np.arange(n))


# ---------------------------------------------------------------------- a bijection


@settings(max_examples=25)
@given(
    st.integers(1, 300)
    | st.integers(1, 10**6)
    | st.integers(1, 10**3).map(lambda root: root * root),
    seeds,
)
@example(1, 0)
@example(LARGE, 3)
def test_every_n_is_permuted(n: int, seed: int) -> None:
    """For any n, around squares and where the number of rounds changes too, it is a bijection."""
    for near in {n, n + 1, max(n - 1, 1)}:
        hit = np.zeros(near, np.bool_)
        hit[whole(near, seed, 0)] = True
        assert hit.all()


@settings(max_examples=20)
@given(st.integers(2**32, 2**36), seeds, st.data())
def test_a_permutation_too_large_to_write_down(n: int, seed: int, data: st.DataObject) -> None:
    """Distinct positions go to distinct elements within the range, past 32 bits too."""
    permutation = Permutation(n, seed)
    start = data.draw(st.integers(0, n - 2000))
    elements = permutation.stretch(start, start + 2000)
    assert len(np.unique(elements)) == 2000
    assert elements.min() >= 0
    assert elements.max() < n
    assert np.array_equal(permutation(np.arange(start, start + 2000)), elements)


# ---------------------------------------------------------------------- anywhere


@settings(max_examples=40)
@given(st.integers(1, 200_000), seeds, st.data())
def test_evaluated_anywhere_is_evaluated_whole(n: int, seed: int, data: st.DataObject) -> None:
    """Any positions in any order, and any stretch, give what the whole gives there."""
    permutation = Permutation(n, seed, 5)
    all_of_it = permutation(np.arange(n))
    drawn = np.random.default_rng(data.draw(st.integers(0, 2**32))).integers(0, n, 500)
    assert np.array_equal(permutation(drawn), all_of_it[drawn])
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    assert np.array_equal(permutation.stretch(start, stop), all_of_it[start:stop])


# ---------------------------------------------------------------------- the stream

WORDS = [
    [259491006799949737, 4754966410622352325],
    [5479744983482972683, 9560388134401223218],
    [2053215967584065059, 4249768492371305675],
]


@given(seeds, keys, st.integers(0, 5000), st.integers(0, 50))
def test_a_stream_is_entered_anywhere(seed: int, key: list[int], start: int, count: int) -> None:
    """The words from k on are the tail of the stream's words."""
    stream = random_words(seed, *key, count=start + count)
    assert np.array_equal(random_words(seed, *key, start=start, count=count), stream[start:])


def test_the_stream_never_changes() -> None:
    """Saved positions mean the same samples for ever: these words are pinned."""
    assert random_words(0, count=2).tolist() == WORDS[0]
    assert random_words(7, 1, 2, start=3, count=2).tolist() == WORDS[1]
    assert shuffled_keys(7, 1, numbers=np.array([0, 5])).tolist() == WORDS[2]


@given(st.integers(2, 2**32), seeds)
def test_scaled_words_are_in_range(n: int, seed: int) -> None:
    """`scale` maps words to range(n), its ends included, and keeps their order."""
    words = np.sort(random_words(seed, count=200))
    words[0], words[-1] = 0, 2**64 - 1
    scaled = scale(words, n)
    assert scaled[0] == 0
    assert scaled[-1] == n - 1
    assert (np.diff(scaled) >= 0).all()


# ---------------------------------------------------------------------- uniformity


@pytest.mark.parametrize(("n", "times"), [(2, 600), (3, 1200), (4, 2400), (5, 4800)])
def test_all_orders_are_alike(n: int, times: int) -> None:
    """Over seeds, every one of the n! orders comes equally often, the odd ones included."""
    number = {order: nth for nth, order in enumerate(itertools.permutations(range(n)))}
    counts = np.zeros(len(number))
    for seed in range(times):
        counts[number[tuple(whole(n, seed, 1).tolist())]] += 1
    assert abs(chi_square(counts, times / len(number))) < FAIR


@pytest.mark.parametrize(("n", "times"), [(9, 2000), (16, 3000), (25, 3000)])
def test_pairs_of_images_are_alike(n: int, times: int) -> None:
    """Two positions go to any two elements: neighbours, those of a row, and of a column."""
    root = math.isqrt(n)
    tables = {pair: np.zeros((n, n)) for pair in [(0, 1), (0, root), (1, n - 1), (0, root + 1)]}
    for seed in range(times):
        images = whole(n, seed)
        for (one, other), table in tables.items():
            table[images[one], images[other]] += 1
    for pair, table in tables.items():
        assert not table.diagonal().any()
        counts = table[~np.eye(n, dtype=np.bool_)]
        assert abs(chi_square(counts, times / len(counts))) < FAIR, pair


@pytest.mark.parametrize("n", [1000, 100_000])
def test_every_element_is_in_a_window_equally_often(n: int) -> None:
    """Over seeds, a window of the order holds every element equally often.

    Drawing w of n without replacement, an element's count has the variance k·p·(1 − p), and the
    counts are tied by their total.
    """
    window, times = n // 25, 500
    for start in (0, n // 2 + 1):
        counts = np.zeros(n)
        for seed in range(times):
            elements = Permutation(n, seed, start).stretch(start, start + window)
            counts[elements] += 1
        share = window / n
        variance = times * share * (1 - share) * n / (n - 1)
        statistic = float(((counts - times * share) ** 2).sum() / variance)
        assert abs(deviate(statistic, n - 1)) < FAIR


@pytest.fixture(scope="module")
def images() -> Any:
    """What 4,000 permutations of 100,000 make of a grid of 12 × 12 positions, and of its shape.

    The Feistel network sees a position as a row and a column of a grid; positions that share one
    share a round's table entry, which is where too few rounds would show.
    """
    n = 100_000
    a = 2 * math.isqrt((n - 1) // 4) + 2
    b = -(-n // a)
    rows, columns = np.array([0, 1, 2, 5, 50, 99, 100, 150, 200, 250, 300, 312]), np.arange(12) * 26
    positions = (rows[:, None] * b + columns).reshape(-1)
    found = np.array([Permutation(n, seed)(positions) for seed in range(4000)])
    return found.reshape(-1, 12, 12), a, b, n


def _pairs_in(found: Any, direction: str) -> Any:
    """Pairs of images whose positions share a row, a column or neither: two of `(k,)`."""
    match direction:
        case "row":
            one, other = found[:, :, :-1], found[:, :, 1:]
        case "column":
            one, other = found[:, :-1, :], found[:, 1:, :]
        case _:
            one, other = found[:, :-1, :-1], found[:, 1:, 1:]
    return one.reshape(-1), other.reshape(-1)


@pytest.mark.parametrize("direction", ["row", "column", "diagonal"])
def test_pairs_of_a_row_or_a_column_fall_apart(images: Any, direction: str) -> None:
    """Images of two positions share a row, a column, or a neighbourhood as often as by chance."""
    found, _a, b, n = images
    one, other = _pairs_in(found, direction)
    last = n - (n // b) * b  # elements in the grid's last, incomplete row
    in_row = (n // b) * b * (b - 1) + last * (last - 1)
    filled = np.full(b, n // b) + (np.arange(b) < last)
    in_column = int((filled * (filled - 1)).sum())
    near = 2 * 100 * n - 100 * 101
    for hits, pairs in (
        (one // b == other // b, in_row),
        (one % b == other % b, in_column),
        (np.abs(one - other) <= 100, near),
    ):
        chance = pairs / (n * (n - 1))
        assert abs(_binomial(np.count_nonzero(hits), len(one), chance)) < FAIR


def _binomial(hits: int, times: int, chance: float) -> float:
    return (hits - times * chance) / math.sqrt(times * chance * (1 - chance))


def test_rectangles_do_not_close(images: Any) -> None:
    """For the four corners of a rectangle of the grid, x₁ − x₂ − x₃ + x₄ vanishes no more often.

    It is what distinguishes three and four rounds of a Feistel network from a fair permutation:
    their halves are sums of table entries that cancel around a rectangle.
    """
    found, a, b, _n = images
    corners = [found[:, :-1, :-1], found[:, :-1, 1:], found[:, 1:, :-1], found[:, 1:, 1:]]
    one, two, three, four = (corner.reshape(-1) for corner in corners)
    for half, modulus in ((lambda x: x // b, a), (lambda x: x % b, b)):
        around = (half(one) - half(two) - half(three) + half(four)) % modulus
        counts = np.bincount(around, minlength=modulus)
        hits = int(counts[0])
        # Four distinct elements differ from independent ones by some n⁻¹ only.
        assert abs(_binomial(hits, len(one), 1 / modulus)) < FAIR + 1
        # Corners of neighbouring rectangles are shared, which widens the statistic a little.
        assert abs(chi_square(counts[1:], counts[1:].mean())) < FAIR + 1


@pytest.mark.parametrize("n", [1000, 100_000])
def test_seeds_and_epochs_do_not_resemble_each_other(n: int) -> None:
    """Orders of neighbouring seeds and epochs agree at one position on the average."""
    names = [(seed, epoch) for seed in range(8) for epoch in range(8)]
    orders = [whole(n, *name) for name in names]
    agreeing = [np.count_nonzero(one == other) for one, other in itertools.combinations(orders, 2)]
    assert max(agreeing) < 12
    assert abs(sum(agreeing) - len(agreeing)) < FAIR * math.sqrt(len(agreeing))


# ---------------------------------------------------------------------- orders


NONE = np.empty(0, np.int64)


def order_of(n: int, **options: Any) -> Order:
    return Order(dataset_length=n, **({"skipped": NONE} | options))


def indices_of(order: Order, *key: int) -> Any:
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
    everything = indices_of(order, first, number)
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
    passes = {tuple(indices_of(order, first, number)) for first in range(3) for number in range(3)}
    assert len(passes) == 9
    assert tuple(indices_of(order_of(200, seed=5, **options))) not in passes


# ---------------------------------------------------------------------- weights


def drawn(weights: Any, passes: int, **options: Any) -> Any:
    """The draws of some passes, one after the other."""
    order = order_of(len(weights), weights=np.array(weights, np.float64), **options)
    return np.concatenate([indices_of(order, 0, number) for number in range(passes)])


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
