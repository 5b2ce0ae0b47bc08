"""The permutation is one, can be entered anywhere, and no test tells it from a fair shuffle."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.oracles import chi_square, deviate
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
