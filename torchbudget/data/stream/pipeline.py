"""Items become samples: transforms are applied one by one or in threads, in order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

from torchbudget.data.stream.generators import refuse_draws, seed_generators
from torchbudget.data.stream.settings import Settings
from torchbudget.data.stream.transforms import Expanded, SampleRandom, sample_random
from torchbudget.errors import SampleError

# Its shard and its place there, the same in every process; the seed of what its transforms draw;
# and the item itself.
Item: TypeAlias = tuple[tuple[int, int], int, Any]


def transformed(
    items: Iterator[Item], settings: Settings, threads: Executor, *, at_once: int
) -> Iterator[list[Any] | SampleError]:
    """The samples of each item, or the error of its transforms, in order.

    Without threads transforms may draw from Python's, NumPy's and torch's global generators, which
    are seeded for each item. Threads would share those: a transform that drew from one is refused.

    With threads, items are read, then transformed: a source is never read while a transform runs,
    and what draws from a global generator meanwhile is a transform.

    Args:
        items: that were read.
        settings: of the stream.
        threads: that apply the transforms, each to another item, if the settings say so.
        at_once: items that threads are given together.

    Raises:
        OptionError: with threads, a transform drew from a global generator.
    """
    if not settings.threads:
        for item in items:
            if settings.transforms:
                seed_generators(item[1])
            made = [_transformed(settings, item)]
            del item
            yield made.pop()
        return
    while some := list(islice(items, at_once)):
        with refuse_draws():
            made = list(threads.map(partial(_transformed, settings), some))
        yield from made


def _transformed(settings: Settings, item: Item) -> list[Any] | SampleError:
    name, seed, value = item
    token = sample_random.set(SampleRandom(seed))
    samples = [value]
    try:
        for transform in settings.transforms:
            if isinstance(transform, Expanded):
                samples = [one for sample in samples for one in transform(sample)]
            else:
                samples = [transform(sample) for sample in samples]
    except Exception as error:  # noqa: BLE001  (a user's transform may raise anything)
        described = settings.source.describe(name, value)
        failure = SampleError(f"{described} cannot be made: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    finally:
        sample_random.reset(token)
    return samples
