"""Whether sizes are those of the samples that come, or of other ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray, Sizes

_SAMPLES: Final = 1024  # judged after that many, or after an epoch that has fewer
_FEWEST_ALIKE: Final = 32  # of equal lengths and sizes, to say that they are of one unit
_FEWEST_UNRELATED: Final = 256  # to say that sizes tell nothing: chance gives ±0.06 then
_LEAST_RELATION: Final = 0.1  # chance gives ±0.03 after 1,024 samples
_LEAST_SPREAD: Final = 0.1  # of sizes, in units of their mean: any order of others is as good

_ADVICE: Final = (
    "Take the sizes of the data set as the loader reads it, as in sizes_of(dataset, …), after it "
    "was filtered, sorted or shuffled"
)


@runtime_checkable
class KnowsShapes(Protocol):
    """A batch that knows the shapes of its samples: `PaddedBatch`, `PackedBatch`."""

    def sample_shapes(self) -> list[IntArray]:
        """The samples' own shapes in each field, `(n, d)`, those of equal fields once."""


class OtherSamples:
    """Compares the lengths of samples that come with their sizes.

    Sizes may be of any unit: lengths, bytes, characters, pixels, sums over fields. So two findings
    alone count. Where most sizes equal a length, a batch with longer samples than planned has some
    that its sizes do not know. Where no length of any field has to do with the sizes, in the order
    of 1,024 samples, the sizes are those of other samples; unless none is longer than its size, as
    those of random crops are.

    Args:
        sizes: of all samples, `(N,)` or `(N, d)`.
        packed: batches are not padded, so that the sum of their samples' sizes was planned.
        least: samples to see before they are judged, where that is more than 1,024.
    """

    def __init__(self, sizes: Sizes, *, packed: bool, least: int = 0) -> None:
        self._sizes, self._packed, self._samples = sizes, packed, max(least, _SAMPLES)
        self._seen: list[_Came] = []
        self._count = 0
        self._ndims: list[int] = []  # of the fields of all that was seen
        self._alike: list[_Alike] | None = None  # as judged

    @property
    def has_judged(self) -> bool:
        """Whether nothing is wrong with a batch that has no more than was planned."""
        return self._alike is not None

    def compare(self, batch: Any, indices: IntArray, planned: Sequence[int]) -> str | None:
        """Look at a batch; what is wrong with the sizes, or `None`.

        O(samples of the batch).

        Args:
            batch: of any type.
            indices: of its samples, `(n,)`.
            planned: its padded size, `(d,)`; if packed the sum of the sizes.
        """
        if self._alike == []:
            return None
        shapes = _shapes_of(batch, len(indices))
        if not shapes or any(len(one) != len(indices) for one in shapes):
            return None
        came, ndims = _Came(shapes, indices, planned), [one.shape[1] for one in shapes]
        if self._alike is not None:
            return self._longer(came, self._alike) if ndims == self._ndims else None
        if ndims != self._ndims:
            self._seen, self._count, self._ndims = [], 0, ndims
        self._seen.append(came)
        self._count += len(indices)
        return self.judge() if self._count >= self._samples else None

    def judge(self) -> str | None:
        """What is wrong with the sizes by the samples so far, or `None`."""
        if self._alike is not None or self._count < _FEWEST_ALIKE:
            return None
        seen, self._seen = self._seen, []
        of_each = [(self._sizes_of(one), np.concatenate(one.shapes, axis=1)) for one in seen]
        # In each batch by itself: a collate may have its samples in another order.
        ordered = [(np.sort(sizes, axis=0), np.sort(lengths, axis=0)) for sizes, lengths in of_each]
        sizes, lengths = map(np.concatenate, zip(*ordered, strict=True))
        self._alike = _alike(sizes, lengths, self._ndims)
        if self._alike:
            return next(filter(None, (self._longer(one, self._alike) for one in seen)), None)
        sizes, lengths = map(np.concatenate, zip(*of_each, strict=True))
        groups = np.repeat(np.arange(len(self._ndims)), self._ndims)
        differs = (lengths[:, :, None] != sizes[:, None, :]).all(axis=(1, 2))
        if not any(_are_unrelated(sizes[rows], lengths[rows], groups) for rows in (..., differs)):
            return None
        return (
            f"the sizes have nothing to do with the samples that came: of {len(sizes)}, those of "
            "larger sizes are no longer than others in any field. They look like the sizes of "
            f"other samples, so that batches may be over the budget. {_ADVICE}"
        )

    def _longer(self, came: _Came, alike: Sequence[_Alike]) -> str | None:
        """What to say of a batch with more than was planned, where sizes are lengths."""
        for one in alike:
            lengths = came.shapes[one.field][:, one.axis_of_field]
            most, planned = lengths.sum() if self._packed else lengths.max(), came.planned[one.axis]
            if most <= planned:
                continue
            sizes = self._sizes_of(came)[:, one.axis]
            i = int((lengths - sizes).argmax())
            return (
                f"sample {came.indices[i]} of the data set came with a length of {lengths[i]}, and "
                f"its size is {sizes[i]}: its batch has more than the {planned} that were planned, "
                "and the budget does not count the rest. Some sizes are those of other samples, or "
                f"of an earlier state. {_ADVICE}"
            )
        return None

    def _sizes_of(self, came: _Came) -> IntArray:
        """The sizes that a batch was planned with, `(n, d)`."""
        own: IntArray = self._sizes[came.indices].astype(np.int64)
        return own.reshape(len(own), -1)


class _Came(NamedTuple):
    """A batch that came.

    Attributes:
        shapes: of its samples in each field, `(n, d)`.
        indices: in the data set, `(n,)`.
        planned: see `OtherSamples.compare`.
    """

    shapes: list[IntArray]
    indices: IntArray
    planned: Sequence[int]


class _Alike(NamedTuple):
    """An axis of the sizes that most lengths equal along one axis of one field."""

    axis: int
    field: int
    axis_of_field: int


def _alike(sizes: IntArray, lengths: IntArray, ndims: Sequence[int]) -> list[_Alike]:
    """For each axis of sizes that differ, the lengths that most of them equal, if any do.

    Args:
        sizes: `(n, d)`.
        lengths: along every axis of every field, `(n, a)`.
        ndims: how many axes each field has.
    """
    columns = [(field, axis) for field, ndim in enumerate(ndims) for axis in range(ndim)]
    found = []
    for axis in np.flatnonzero(sizes.min(axis=0) < sizes.max(axis=0)).tolist():
        share = (lengths == sizes[:, axis, None]).mean(axis=0)
        if share.size and share.max() >= 0.5:
            found.append(_Alike(axis, *columns[int(share.argmax())]))
    return found


def _are_unrelated(sizes: IntArray, lengths: IntArray, groups: IntArray) -> bool:
    """Whether no length, product or sum of lengths rises or falls with any of the sizes.

    Args:
        sizes: `(n, d)`.
        lengths: along every axis of every field, `(n, a)`.
        groups: the field of each axis, `(a,)`.
    """
    if len(sizes) < _FEWEST_UNRELATED:
        return False
    sizes = sizes[:, sizes.std(axis=0) >= _LEAST_SPREAD * sizes.mean(axis=0)]
    varies = lengths.min(axis=0) < lengths.max(axis=0)
    lengths, groups = lengths[:, varies], groups[varies]
    if not sizes.size or not lengths.size:
        return False
    # In float64, in which products are no more than inexact. Pixels are products of two axes.
    products = np.stack(
        [lengths[:, groups == g].prod(axis=1, dtype=np.float64) for g in np.unique(groups)], axis=1
    )
    if (np.maximum(lengths.max(axis=1), products.max(axis=1)) <= sizes.max(axis=1)).all():
        return False
    amounts = np.column_stack([lengths, products, products.sum(axis=1)])
    ranks = np.column_stack([_ranks(column) for column in (*sizes.T, *amounts.T)])
    relations = np.asarray(np.corrcoef(ranks, rowvar=False))
    relations = relations[: sizes.shape[1], sizes.shape[1] :]
    return bool((np.abs(relations) < _LEAST_RELATION).all())


def _ranks(values: npt.NDArray[Any]) -> IntArray:
    return np.unique(values, return_inverse=True)[1]


def _shapes_of(batch: Any, num_samples: int) -> list[IntArray]:
    """The shapes of a batch's samples, or of a foreign one the lengths in its attention mask.

    A foreign batch with another field that may be ragged has none: sizes may be that one's.
    """
    if _knows_shapes(type(batch)):  # type: ignore[arg-type]  # types are hashable
        shapes: list[IntArray] = batch.sample_shapes()
        return shapes
    mask = attention_mask_of(batch)
    if mask is None or len(mask) != num_samples:
        return []
    fields = [one.shape for one in batch.values() if isinstance(one, Tensor)]
    if any(shape != mask.shape[: len(shape)] for shape in fields):
        return []
    return [(mask != 0).sum(1)[:, None].numpy()]


def attention_mask_of(batch: Any) -> Tensor | None:
    """The mask of a batch as transformers' collators make it, `(n, L)`, 0 where padding is."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 and mask.is_cpu else None


@lru_cache(maxsize=64)  # the check of a protocol takes as long as all the rest
def _knows_shapes(kind: type[Any]) -> bool:
    return issubclass(kind, KnowsShapes)
