"""The global random generators while a stream reads: the source and the samples have their own.

Ranks and workers that plan from one source must see the same samples. So a source that shuffles
itself with a global generator, and transforms that draw from one, draw numbers that are a function
of the seed, the epoch and the place alone; and the process that reads keeps its own numbers.
"""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Final

import numpy as np
import torch

from torchbudget.plan.permutation import Purpose, shuffled_keys
from torchbudget.random_state import RandomState

_CHUNK: Final = 1024


def source_state(*key: int) -> RandomState:
    """Return the place at which a source begins to draw: a function of `key`."""
    [word] = shuffled_keys(*key, Purpose.SHARDS, numbers=np.array([0])).tolist()
    return RandomState.seeded(word)


def seed_generators(word: int) -> None:
    """Seed Python's, NumPy's and torch's global generators with a number below 2⁶⁴.

    Each in its own way: 10 µs. `torch.manual_seed`, which seeds all devices, takes 100.
    """
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
    torch.default_generator.manual_seed(word)


def sample_seed(shard: int, place: int, *key: int) -> int:
    """Return a random word for an item: a function of its place, the seed, the epoch and the pass.

    Args:
        shard: number of the item's shard.
        place: there.
        key: the seed, the epoch and the pass.
    """
    chunk, number = divmod(place, _CHUNK)
    return _words(chunk, *key, shard)[number]


@lru_cache(maxsize=8)
def _words(chunk: int, *key: int) -> list[int]:
    numbers = np.arange(chunk * _CHUNK, (chunk + 1) * _CHUNK)
    words: list[int] = shuffled_keys(*key, Purpose.SAMPLES, numbers=numbers).tolist()
    return words
