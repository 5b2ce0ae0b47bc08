"""A seeded pseudorandom permutation that is evaluated at any position.

A Feistel network over pairs (x, y) of range(a) × range(b) with a·b just above n: each round adds a
table's entry for one half to the other half, modulo its range, which is a bijection for any table.
The tables are drawn at random, so the network is that of Luby and Rackoff ("How to construct
pseudorandom permutations from pseudorandom functions", 1988) on a mixed radix, as in Black and
Rogaway ("Ciphers with arbitrary finite domains", 2002); five rounds are those of Patarin's bound
("Security of random Feistel schemes with 5 or more rounds", 2004).
Elements past n walk on along their cycle until they fall below it; n/(a·b) ≈ 1 makes that rare.
Few elements, which a network mixes slowly, are sorted by random words instead.
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.protocol import IntArray

WordArray: TypeAlias = npt.NDArray[np.uint64]


class Purpose(IntEnum):
    """Purposes of random words: a part of the key of each, so that no two draw the same words."""

    PASS = 0  # the permutation of a pass over the data set
    DRAW = 1  # independent draws
    ROUNDS = 3  # the order of a window's micro-batches
    TURNS = 4  # the first place of each rank
    SHARDS = 5  # the order of a stream's shards
    SAMPLES = 6  # draws of a stream's transforms
    INDEX = 7  # the order of a map-style data set that is read as a stream
    GROUPS = 8  # the group of the next window
    SOURCES = 9  # the permutation of a source's pass


_ROUNDS: Final = 5
# Below this number elements are sorted, which takes less time than to make the tables. With five
# rounds, a chi-square test over all n! orders tells small n from a fair shuffle.
_SMALL_BITS: Final = 13
# Positions that go through the network together: their halves stay in the second-level cache.
_CHUNK: Final = 2**15


def random_words(seed: int, *key: int, start: int = 0, count: int) -> WordArray:
    """Words `start … start + count` of the random stream that `key` names, uniform in 64 bits.

    The raw words of Philox are the same in every version of NumPy, unlike those of its
    distributions, and the stream can be entered anywhere: O(count) at any `start`.
    """
    stream = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key))
    per_step = 4  # one step of Philox4x64 gives four words
    stream.advance(start // per_step)
    skipped = start % per_step
    words: WordArray = stream.random_raw(count + skipped)
    return words[skipped:]


def scale(words: WordArray, n: int) -> IntArray:
    """Map 64-bit words to range(n) for n ≤ 2³² by multiplying their upper half."""
    return ((words >> np.uint64(32)) * np.uint64(n) >> np.uint64(32)).astype(np.int64)


def shuffled_keys(seed: int, *key: int, numbers: IntArray) -> WordArray:
    """A random word for each of `numbers`, of any shape: sort by them to shuffle.

    The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014) over the numbers as its counter.
    """
    words = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words += _first_word(seed, *key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= words >> np.uint64(shift)
        words *= np.uint64(factor)
    return words ^ (words >> np.uint64(31))


@lru_cache(maxsize=64)  # windows of one pass have one key, and a stream asks window by window
def _first_word(seed: int, *key: int) -> np.uint64:
    word: np.uint64 = random_words(seed, *key, count=1)[0]
    return word


class Permutation:
    """A bijection of range(n) that `key` chooses.

    Memory O(√n) from 8,192 elements on; evaluation O(1) per position, anywhere.

    Args:
        n: the number of positions, 1 ≤ n < 2⁶².
        seed: of all randomness, a non-negative int.
        key: non-negative ints that name the permutation among those of the seed.

    >>> sorted(Permutation(10, 0, 3)(np.arange(10)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    __slots__ = ("_b", "_columns", "_n", "_order", "_rows", "_tables")

    def __init__(self, n: int, seed: int, *key: int) -> None:
        self._n = n
        self._order: IntArray | None = None
        if n < 1 << _SMALL_BITS:
            # The lowest bits are those of the number, so that no two words are equal.
            words = random_words(seed, *key, count=n) << np.uint64(_SMALL_BITS)
            words += np.arange(n, dtype=np.uint64)
            words.sort()
            self._order = (words & np.uint64((1 << _SMALL_BITS) - 1)).astype(np.int64)
            return
        # An even number of rows keeps odd permutations within reach when a·b = n.
        a = 2 * math.isqrt(max(n - 1, 0) // 4) + 2
        self._b = b = -(-n // a)
        words = random_words(seed, *key, count=(a + b) * ((_ROUNDS + 1) // 2))
        self._tables: list[IntArray] = []
        for round_ in range(_ROUNDS):
            length, modulus = (a, b) if round_ % 2 else (b, a)
            # A half is reduced once, at the end. Until then round r reads a half after (r + 1) // 2
            # additions, so the table continues periodically.
            periods = 1 + (round_ + 1) // 2
            self._tables.append(np.tile(scale(words[:length], modulus), periods))
            words = words[length:]
        # Tables that combine the reduced halves, since a lookup is faster than a remainder.
        self._rows = np.tile(np.arange(a) * b, 1 + (_ROUNDS + 1) // 2)
        self._columns = np.tile(np.arange(b), 1 + _ROUNDS // 2)

    def __call__(self, positions: IntArray) -> IntArray:
        """The elements at `positions`, an int64 array of shape `(k,)` within range(n)."""
        if self._order is not None:
            return self._order[positions]
        # NumPy divides by one number fast, but is slow at a remainder or at both at once.
        x = positions // self._b
        y = positions - x * self._b
        x += self._tables[0][y]
        return self._walk(self._network(x, y))

    def stretch(self, start: int, stop: int) -> IntArray:
        """The elements at positions `start … stop`: what a call gives, in two thirds of the time.

        Neighbours stand in rows of the grid, where the first round is a sum without a division.
        """
        if self._order is not None:
            return self._order[start:stop]
        parts = [np.empty(0, np.int64)]
        rows_of_chunk = max(_CHUNK // self._b, 1)
        while start < stop:
            row, first = divmod(start, self._b)
            end = min((row + rows_of_chunk) * self._b, stop)
            rows = -(-end // self._b) - row
            # Several rows are whole, and cut afterwards: half a row is not worth a network.
            columns = slice(first, end - row * self._b) if rows == 1 else slice(0, self._b)
            here = slice(first - columns.start, first - columns.start + end - start)
            x = np.arange(row, row + rows)[:, None] + self._tables[0][columns]
            y = np.tile(self._columns[columns], rows)
            parts.append(self._network(x.reshape(-1)[here], y[here]))
            start = end
        return self._walk(np.concatenate(parts))

    def _walk(self, elements: IntArray) -> IntArray:
        """Follow the cycles of elements past n until they are below n, in place."""
        outside = np.flatnonzero(elements >= self._n)
        if outside.size:
            elements[outside] = self(elements[outside])
        return elements

    def _network(self, x: IntArray, y: IntArray) -> IntArray:
        """The rounds after the first one. Both halves are overwritten."""
        added = np.empty_like(x)
        for round_, table in enumerate(self._tables[1:], start=1):
            half, other = (y, x) if round_ % 2 else (x, y)
            table.take(other, out=added, mode="clip")  # in range already: no second check
            half += added
        self._columns.take(y, out=added, mode="clip")
        self._rows.take(x, out=y, mode="clip")
        y += added
        return y
