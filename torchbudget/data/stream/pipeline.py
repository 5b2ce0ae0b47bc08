"""Items become samples: transforms are applied one by one or in threads, in order."""

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
    """An item that was read.

    Attributes:
        position: in what this process reads.
        name: its shard and its place there, the same in every process.
        value: the item itself.
    """

    position: int
    name: tuple[int, int]
    value: Any


class Failed:
    """An item whose transforms raised.

    Args:
        error: names the item; its cause is the exception of the transform.
    """

    __slots__ = ("error",)

    def __init__(self, error: SampleError) -> None:
        self.error = error


class Pipeline:
    """The transforms of a stream.

    Args:
        transforms: applied in order.
        threads: that apply them, each to another item; 0: the calling thread does.
        describe: names an item in an error message, by its name and value.
    """

    def __init__(
        self,
        transforms: Sequence[Transform],
        threads: int,
        describe: Callable[[tuple[int, int], Any], str],
    ) -> None:
        self._transforms = tuple(transforms)
        self._describe = describe
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __call__(
        self, items: Iterable[Item], *key: int
    ) -> Iterator[tuple[int, list[Any] | Failed]]:
        """The position and the samples of each item, in order.

        At most `2 · threads` items are in progress at a time.

        Args:
            items: to transform.
            key: of all randomness, with the item's name.
        """

        def transformed(item: Item) -> tuple[int, list[Any] | Failed]:
            return item.position, self._transform(item, key)

        if not self._threads:
            yield from map(transformed, items)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="torchbudget")
        yield from _in_order(self._pool, transformed, items, 2 * self._threads)

    def _transform(self, item: Item, key: tuple[int, ...]) -> list[Any] | Failed:
        token = sample_random.set(SampleRandom(*key, *item.name))
        try:
            samples = [item.value]
            for transform in self._transforms:
                if isinstance(transform, Expanded):
                    samples = [one for sample in samples for one in transform(sample)]
                else:
                    samples = [transform(sample) for sample in samples]
        except Exception as error:  # noqa: BLE001  (a user's transform may raise anything)
            name = self._describe(item.name, item.value)
            failure = SampleError(f"{name} cannot be made: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return Failed(failure)
        finally:
            sample_random.reset(token)
        return samples

    def close(self) -> None:
        """End the threads, after the items that they have started."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


def _in_order(
    pool: ThreadPoolExecutor, function: Callable[[T], R], items: Iterable[T], most: int
) -> Iterator[R]:
    in_progress: deque[Future[R]] = deque()
    try:
        for item in items:
            in_progress.append(pool.submit(function, item))
            if len(in_progress) == most:
                yield in_progress.popleft().result()
        while in_progress:
            yield in_progress.popleft().result()
    finally:
        for future in in_progress:
            future.cancel()
