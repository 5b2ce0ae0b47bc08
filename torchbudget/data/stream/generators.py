"""The global random generators while a stream reads: the source and the samples have their own.

Ranks and workers that plan from one source must see the same samples. So a source that shuffles
itself with a global generator, and transforms that draw from one, draw numbers that are a function
of the seed, the epoch and the place alone; and the process that reads keeps its own numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from torchbudget.plan.permutation import Stream, shuffled_keys

_CHUNK: Final = 1024
_SAMPLES: Final = np.random.MT19937(0)  # NumPy's generator for samples, seeded for each of them


class Place(NamedTuple):
    """The places of the global generators.

    NumPy's is exchanged, in 0.2 µs, which loses the second normal number that `numpy.random.randn`
    keeps: its state has that one.
    """

    python: Any
    numpy: Any
    torch: Tensor
    numpy_state: Any = None

    @classmethod
    def put_aside(cls) -> Place:
        """Leave them to samples, in 0.07 ms, most of it for NumPy's state."""
        place = cls(
            random.getstate(),
            mtrand.get_bit_generator(),
            torch.default_generator.get_state(),
            np.random.get_state(legacy=False),
        )
        mtrand.set_bit_generator(_SAMPLES)
        return place

    @classmethod
    def of_source(cls, *key: int) -> Place:
        """Return the place at which a source begins to draw: a function of `key`."""
        [word] = shuffled_keys(*key, Stream.SHARDS, numbers=np.array([0])).tolist()
        return cls(
            random.Random(word).getstate(),
            np.random.MT19937(word),
            torch.Generator().manual_seed(word).get_state(),
        )

    def restore(self) -> None:
        """Go on from here."""
        random.setstate(self.python)
        mtrand.set_bit_generator(self.numpy)
        torch.default_generator.set_state(self.torch)
        if self.numpy_state is not None and self.numpy_state["has_gauss"]:
            np.random.set_state(self.numpy_state)


def seed_generators(word: int) -> None:
    """Seed Python's, NumPy's and torch's global generators with a number below 2⁶⁴.

    Each in its own way: 10 µs. `torch.manual_seed`, which seeds all devices, takes 100.
    """
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)


@contextmanager
def numbers_put_aside() -> Iterator[None]:
    """Keep the process's own numbers while a stream reads and transforms inside."""
    place = Place.put_aside()
    try:
        yield
    finally:
        place.restore()


def sample_seed(shard: int, place: int, *key: int) -> int:
    """Return a random word for an item: a function of its place, the seed, the epoch and the pass.

    Args:
        shard: of the item.
        place: there.
        key: the seed, the epoch and the pass.
    """
    chunk, number = divmod(place, _CHUNK)
    return _words(chunk, *key, shard)[number]


@lru_cache(maxsize=8)
def _words(chunk: int, *key: int) -> list[int]:
    numbers = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
    words: list[int] = shuffled_keys(*key, Stream.SAMPLES, numbers=numbers).tolist()
    return words
