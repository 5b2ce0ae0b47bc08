"""Items become samples: transforms are applied one by one or in threads, in order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

from torchbudget.data.stream.generators import refuse_draws, seed_generators
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.transforms import Expanded, SampleRandom, sample_random
from torchbudget.errors import SampleError


class Item(NamedTuple):
    """An item that was read.

    Attributes:
        name: its shard and its place there, the same in every process.
        seed: of what its transforms draw.
        value: the item itself.
    """

    name: tuple[int, int]
    seed: int
    value: Any


class Pipeline:
    """The transforms of a stream.

    Without threads they may draw from Python's, NumPy's and torch's global generators, which are
    seeded for each item. Threads would share those: a transform that drew from one is refused.

    Args:
        settings: of the stream.
        at_once: items that threads are given together; `None`: all.
    """

    def __init__(self, settings: Settings, *, at_once: int | None) -> None:
        self._settings = settings
        self._at_once = at_once
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, items: Iterator[Item]) -> Iterator[list[Any] | SampleError]:
        """The samples of each item, or the error of its transforms, in order.

        With threads, items are read, then transformed: a source is never read while a transform
        runs, and what draws from a global generator meanwhile is a transform.

        Raises:
            OptionError: with threads, a transform drew from a global generator.
        """
        threads = self._settings.threads
        if not threads:
            for item in items:
                if self._settings.transforms:
                    seed_generators(item.seed)
                yield self._transform(item)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="torchbudget")
        while some := list(islice(items, self._at_once)):
            with refuse_draws():
                made = list(self._pool.map(self._transform, some))
            yield from made

    def _transform(self, item: Item) -> list[Any] | SampleError:
        token = sample_random.set(SampleRandom(item.seed))
        try:
            samples = [item.value]
            for transform in self._settings.transforms:
                if isinstance(transform, Expanded):
                    samples = [one for sample in samples for one in transform(sample)]
                else:
                    samples = [transform(sample) for sample in samples]
        except Exception as error:  # noqa: BLE001  (a user's transform may raise anything)
            name = self._settings.source.describe(item.name, item.value)
            failure = SampleError(f"{name} cannot be made: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        finally:
            sample_random.reset(token)
        return samples

    def close(self) -> None:
        """End the threads, after the items that they have started."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
