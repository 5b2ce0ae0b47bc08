"""The global random generators while a stream reads: the source and the samples have their own.

Ranks and workers that plan from one source must see the same samples. So a source that shuffles
itself with a global generator, and transforms that draw from one, draw numbers that are a function
of the seed, the epoch and the place alone; and the process that reads keeps its own numbers.
"""

from __future__ import annotations

import pickle
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

from torchbudget.errors import OptionError
from torchbudget.plan.permutation import Stream, shuffled_keys

_CHUNK: Final = 1024


class _Place(NamedTuple):
    """Where the global generators stand.

    NumPy's is exchanged, in 0.2 µs, which loses the second normal number that `numpy.random.randn`
    keeps: its state has that one.
    """

    python: Any
    numpy: Any
    torch: Tensor
    numpy_state: Any = None

    @classmethod
    def now(cls) -> _Place:
        """In 0.07 ms, most of it for NumPy's state."""
        return cls(
            random.getstate(),
            mtrand.get_bit_generator(),
            torch.default_generator.get_state(),
            np.random.get_state(legacy=False),
        )

    @classmethod
    def seeded(cls, word: int) -> _Place:
        return cls(
            random.Random(word).getstate(),
            np.random.MT19937(word),
            torch.Generator().manual_seed(word).get_state(),
        )

    def restore(self) -> None:
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


class ReadingGenerators:
    """What the global generators are inside, while one process reads and transforms.

    Streams that threads of one process read at a time have them together: the process gets its
    numbers back, but theirs depend on timing.

    Attributes:
        of_source_now: where those of the source stand.
    """

    _lock = threading.Lock()
    _inside = 0
    _process: _Place
    _samples = np.random.MT19937(0)  # seeded for each of them
    of_source_now: _Place  # from `open_source` on

    def __enter__(self) -> None:
        """Put the numbers of the process aside."""
        kind = ReadingGenerators
        with kind._lock:
            if not kind._inside:
                kind._process = _Place.now()
            kind._inside += 1
            mtrand.set_bit_generator(self._samples)

    def __exit__(self, *_: object) -> None:
        """Go on with them."""
        kind = ReadingGenerators
        with kind._lock:
            kind._inside -= 1
            if not kind._inside:
                kind._process.restore()

    def open_source(self, *key: int) -> None:
        """A source is opened: what it will draw is a function of `key`."""
        [word] = shuffled_keys(*key, Stream.SHARDS, numbers=np.array([0])).tolist()
        self.of_source_now = _Place.seeded(word)

    @contextmanager
    def of_source(self) -> Iterator[None]:
        """Inside, they are those of the source: 0.1 ms."""
        self.of_source_now.restore()
        try:
            yield
        finally:
            self.of_source_now = _Place.now()
            mtrand.set_bit_generator(self._samples)


def sample_seed(shard: int, place: int, *key: int) -> int:
    """A random word for an item: a function of the seed, the epoch and the pass, and of its place.

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


@contextmanager
def refuse_draws() -> Iterator[None]:
    """Raise where the global generators were drawn from inside.

    Raises:
        OptionError: they were.
    """
    before = _Place.now()
    yield
    after = _Place.now()
    drawn = {
        "random": before.python != after.python,
        "numpy.random": pickle.dumps(before.numpy_state) != pickle.dumps(after.numpy_state),
        "torch": not torch.equal(before.torch, after.torch),
    }
    if any(drawn.values()):
        names = ", ".join(name for name, found in drawn.items() if found)
        raise OptionError(
            f"a transform drew from the global generator of {names}. With threads it would depend "
            "on their timing which sample gets which number: draw from "
            "torchbudget.transforms.rng(), or use threads=0 and more workers"
        )
