"""The batches that are on their way at once, and the most that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.cost.measuring.least_squares import non_negative
from torchbudget.data.loading.batch_bytes import PAGE_BYTES, BatchBytes, pinned_block, whole_pages
from torchbudget.plan.batch_shapes import BatchShapes

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class TriedBatch:
    """A batch that the trial's worker made.

    Attributes:
        bytes: of the batch.
        building: what the worker took beside the batch while it read its samples and made it.
        seconds: from the request to the batch.
        samples: in it; 0 where that is unknown.
    """

    bytes: BatchBytes
    building: int
    seconds: float
    samples: int


class Planned:
    """Batches of a plan on their way from workers to the loop: bytes that follow from their shapes.

    Each storage is a non-negative combination of 1, n, n·Lᵢ, n·LᵢLⱼ and ΣLᵢ that was fitted to the
    tried batches and covers all of them.

    Args:
        shapes: of the plan's own sequence of batches.
        tried_shapes: of those that were tried, one for each of `tried`.
        tried: at least one.

    Attributes:
        tensors: storages of a batch, at the most.
        source: where the bytes come from, for people.
    """

    def __init__(
        self, shapes: BatchShapes, tried_shapes: BatchShapes, tried: Sequence[TriedBatch]
    ) -> None:
        self.source = f"{len(shapes):,} batches of {len(shapes.ends)} planned epochs"
        self.tensors = max(len(one.bytes.storages) for one in tried)
        self._ends = shapes.ends
        known, asked = _features(tried_shapes), _features(shapes)

        def predict(values: Sequence[float]) -> FloatArray:
            return _covering(known, np.array(values, np.float64), asked)

        columns = _columns(tried)
        self._storages = [predict(column) for column in columns]
        self._plain = predict([one.bytes.plain for one in tried])
        self._building = predict([one.building for one in tried])

    @cached_property
    def _shared(self) -> FloatArray:
        shared: FloatArray = np.sum([whole_pages(one) for one in self._storages], axis=0)
        return shared

    def peak(self, batches: int) -> int:
        """The most that so many consecutive batches take together."""
        return self._highest(self._shared + self._plain, batches)

    def peak_shared(self, batches: int) -> int:
        """The most of `/dev/shm` that they take."""
        return self._highest(self._shared, batches)

    def peak_pinned(self, batches: int) -> int:
        """The most of pinned memory that torch's allocator keeps for them.

        Blocks of one size are used again, others are kept beside.
        """
        blocks = np.array([pinned_block(one) for one in self._storages])
        return sum(
            int(size) * self._highest((blocks == size).sum(axis=0), batches)
            for size in np.unique(blocks[blocks > 0])
        )

    @property
    def building(self) -> int:
        """The most that one worker takes beside a batch while it makes it."""
        return int(self._building.max())

    def _highest(self, values: npt.NDArray[Any], count: int) -> int:
        """The highest sum of so many consecutive values.

        An epoch begins when all batches of the one before have come, of which the loop has the last
        one still.
        """
        starts = (0, *(end - 1 for end in self._ends[:-1]))
        return max(
            _highest_sum(values[start:end], count)
            for start, end in zip(starts, self._ends, strict=True)
        )


class Observed:
    """Batches of which nothing is known but those that were tried: the largest counts for all.

    Args:
        tried: at least one.

    Attributes:
        tensors: as of `Planned`.
        source: likewise.
    """

    def __init__(self, tried: Sequence[TriedBatch]) -> None:
        self.source = f"the largest of {len(tried)} batches that were read"
        self.tensors = max(len(one.bytes.storages) for one in tried)
        self._tried = tried

    def peak(self, batches: int) -> int:
        """See `Planned.peak`."""
        return batches * max(_shared(one) + one.bytes.plain for one in self._tried)

    def peak_shared(self, batches: int) -> int:
        """See `Planned.peak_shared`."""
        return batches * max(map(_shared, self._tried))

    def peak_pinned(self, batches: int) -> int:
        """See `Planned.peak_pinned`."""
        each = [int(pinned_block(np.array(one.bytes.storages)).sum()) for one in self._tried]
        return batches * max(each)

    @property
    def building(self) -> int:
        """See `Planned.building`."""
        return max(one.building for one in self._tried)


InFlight: TypeAlias = Planned | Observed


def _shared(tried: TriedBatch) -> int:
    return int(whole_pages(np.array(tried.bytes.storages, np.int64)).sum())


def _columns(tried: Sequence[TriedBatch]) -> list[list[float]]:
    """The bytes of each storage over the tried batches; of all together if their number varies."""
    rows = [one.bytes.storages for one in tried]
    if len(set(map(len, rows))) == 1:
        return [list(column) for column in zip(*rows, strict=True)]
    return [[sum(row) + PAGE_BYTES * len(row) for row in rows]]  # each has a last page


def _features(shapes: BatchShapes) -> FloatArray:
    """1, n, n·Lᵢ, n·LᵢLⱼ and ΣLᵢ of each batch, shape `(m, 1 + 1 + 2d + d(d+1)/2)`."""
    n, padded = shapes.samples.astype(np.float64), shapes.padded.astype(np.float64)
    axes = padded.shape[1]
    pairs = [n * padded[:, i] * padded[:, j] for i in range(axes) for j in range(i, axes)]
    return np.stack(
        [np.ones_like(n), n, *(n * padded.T), *pairs, *shapes.sums.T.astype(np.float64)], axis=1
    )


def _covering(known: FloatArray, values: FloatArray, asked: FloatArray) -> FloatArray:
    """Values at the asked features by a fit that is nowhere below the known ones."""
    if not values.any():
        return np.zeros(len(asked))
    coefficients = non_negative(known, values)
    fitted = known @ coefficients
    scale = (values[fitted > 0] / fitted[fitted > 0]).max(initial=1.0)
    # Whole bytes; what is exact but for rounding must not become the next power of two.
    covering: FloatArray = np.ceil(asked @ coefficients * scale - 1e-3)
    return covering


def _highest_sum(values: npt.NDArray[Any], count: int) -> int:
    """The highest sum of so many consecutive values; of all if there are fewer."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    count = min(count, len(values))
    return int(np.ceil((before[count:] - before[: len(before) - count]).max())) if count else 0
