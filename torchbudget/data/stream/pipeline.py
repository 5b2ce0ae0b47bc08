"""What is read becomes samples: transforms, one by one or in threads, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from torchbudget.data.stream.transforms import Expanded, SampleRandom, Transform, sample_random
from torchbudget.errors import SampleError

T = TypeVar("T")
R = TypeVar("R")


class Item(NamedTuple):
    """What was read.

    Attributes:
        position: in what this process reads.
        name: its shard and its place there, the same whoever reads it.
        value: itself.
    """

    position: int
    name: tuple[int, int]
    value: Any


class Failed:
    """What an item became whose transforms raised.

    Args:
        error: names the item; caused by what was raised.
    """

    __slots__ = ("error",)

    def __init__(self, error: SampleError) -> None:
        self.error = error


class Pipeline:
    """The transforms of a stream.

    Args:
        transforms: applied in order.
        threads: that apply them, each to another item; 0: the calling one.
        called: what an item is called in an error's text, by its name and value.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        threads: int,
        called: Callable[[tuple[int, int], Any], str],
    ) -> None:
        self.transforms = tuple(transforms)
        self._called = called
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self, items: Iterable[Item], *key: int
    ) -> Iterator[tuple[int, list[Any] | Failed]]:
        """The position and the samples of each item, in order.

        At most `2 · threads` items are under way at a time.

        Args:
            items: that were read.
            key: of all randomness, with the item's name.
        """

        def made(item: Item) -> tuple[int, list[Any] | Failed]:
            return item.position, self._made(item, key)

        if not self._threads:
            yield from map(made, items)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="torchbudget")
        yield from _in_order(self._pool, made, items, 2 * self._threads)

    def _made(self, item: Item, key: tuple[int, ...]) -> list[Any] | Failed:
        token = sample_random.set(SampleRandom(*key, *item.name))
        try:
            samples = [item.value]
            for transform in self.transforms:
                if isinstance(transform, Expanded):
                    samples = [made for sample in samples for made in transform(sample)]
                else:
                    samples = [transform(sample) for sample in samples]
        except Exception as error:  # noqa: BLE001  (whatever a user's transform raises, is told)
            name = self._called(item.name, item.value)
            told = SampleError(f"{name} cannot be made: {type(error).__name__}: {error}")
            told.__cause__ = error
            return Failed(told)
        finally:
            sample_random.reset(token)
        return samples

    def close(self) -> None:
        """End the threads; what they have begun is finished first."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], most: int
) -> Iterator[R]:
    under_way: deque[Future[R]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(function, item))
            if len(under_way) == most:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
