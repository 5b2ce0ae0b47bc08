"""Samples that lie one after the other: what packed and jagged batches have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.batch import Batch
from torchbudget.data.collate.columns import Column, new_tensor
from torchbudget.data.collate.structure import fail_at_odd_one, leaves_of, put_together, show
from torchbudget.errors import CollateError

SegmentedT = TypeVar("SegmentedT", bound="SegmentedBatch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Where n samples end in a concatenated tensor.

    Attributes:
        lengths: each sample's length, `(n, 1)`; `(n, 0)` for a field of numbers, which is stacked.
        offsets: 0 and the end of each sample, `(n + 1,)`, where the tensor is. Fields of equal
            lengths hold the same tensor. None for a field of numbers.
    """

    lengths: IntArray
    offsets: Tensor | None

    def bounds(self) -> list[int]:
        """0 and the end of each sample, on the host."""
        per_sample = self.lengths.prod(axis=1)
        return [0, *per_sample.cumsum().tolist()]


class SegmentedBatch(Batch):
    """n samples whose fields are concatenated along their first axis."""

    @property
    def max_seqlen(self) -> int:
        """The length of the longest sample."""
        return int(self._host_lengths.max(initial=0))

    @property
    def _offsets(self) -> Tensor:
        offsets: Tensor | None = self._length_layout.offsets
        if offsets is None:
            raise CollateError("no field of this batch is ragged: nothing was concatenated")
        return offsets

    def samples(self) -> list[Any]:
        """The n samples as they were before collating, their fields as views of the batch.

        Tensors stand for arrays, lists and numbers. What comes can be collated again, also by
        another collate: `PadCollate()(packed_batch.samples())`.
        """
        columns = [
            value
            if layout is None
            else value.unbind()
            if layout.offsets is None
            else value.split(layout.lengths[:, 0].tolist())
            for (_, value), layout in zip(leaves_of(self._stored), self._layouts, strict=True)
        ]
        return [put_together(self._stored, iter(row)) for row in zip(*columns, strict=True)]

    def _tensors(self) -> Iterator[Tensor]:
        yield from super()._tensors()
        shared = (layout.offsets for layout in self._layouts if layout is not None)
        yield from {id(t): t for t in shared if t is not None}.values()

    def _map(self: SegmentedT, function: Callable[[Tensor], Tensor]) -> SegmentedT:
        def moved(layout: Segments) -> Segments:
            offsets = layout.offsets
            return replace(layout, offsets=None if offsets is None else function(offsets))

        return replace(super()._map(function), _layouts=_each_once(self._layouts, moved))

    def _part(self: SegmentedT, start: int, stop: int) -> SegmentedT:
        def cut(layout: Segments) -> Segments:
            offsets = layout.offsets
            if offsets is not None:
                offsets = offsets[start : stop + 1] - layout.bounds()[start]
            return Segments(lengths=layout.lengths[start:stop], offsets=offsets)

        values = []
        for (_, value), layout in zip(leaves_of(self._stored), self._layouts, strict=True):
            bounds = range(self.num_samples + 1) if layout is None else layout.bounds()
            values.append(value[bounds[start] : bounds[stop]])
        return replace(
            self,
            num_samples=stop - start,
            _stored=put_together(self._stored, iter(values)),
            _layouts=_each_once(self._layouts, cut),
        )


def _each_once(
    layouts: tuple[Segments | None, ...], function: Callable[[Segments], Segments]
) -> tuple[Segments | None, ...]:
    """The function of every layout; fields that shared a layout share the new one."""
    done: dict[int, Segments] = {}
    for layout in layouts:
        if layout is not None and id(layout) not in done:
            done[id(layout)] = function(layout)
    return tuple(None if layout is None else done[id(layout)] for layout in layouts)


class Concatenator:
    """Concatenates the fields of one batch; those of equal lengths share their offsets.

    Args:
        dtype: of the offsets.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[tuple[bytes, torch.device], Segments] = {}

    def concatenate(self, column: Column) -> tuple[Tensor, Segments]:
        """One tensor `(total, …)` of all samples, `(n,)` of numbers, and where each ends.

        Raises:
            CollateError: the samples differ in another axis than the first, or are together past
                what the offsets can count.
        """
        shapes = column.shapes
        n = len(shapes)
        if shapes.shape[1] == 0:
            out = new_tensor((n,), column.dtype, column.device)
            return column.join(out), Segments(lengths=shapes, offsets=None)
        if (shapes[:, 1:] != shapes[0, 1:]).any():
            fail_at_odd_one(
                column.path,
                shapes.tolist(),
                lambda shape: tuple(shape[1:]),
                "equal axes {} after the ragged first one".format,
            )
        segments = self._segments(column)
        total = int(shapes[:, 0].sum())
        out = new_tensor((total, *shapes[0, 1:].tolist()), column.dtype, column.device)
        return column.join(out), segments

    def _segments(self, column: Column) -> Segments:
        lengths = np.ascontiguousarray(column.shapes[:, :1])
        key = (lengths.tobytes(), column.device)
        if key not in self._known:
            ends = lengths[:, 0].cumsum()
            if ends[-1] > torch.iinfo(self._dtype).max:
                raise CollateError(
                    f"{show(column.path)}: {ends[-1]} positions are past what offsets of "
                    f"{self._dtype} count; make smaller batches"
                )
            offsets = new_tensor((len(ends) + 1,), self._dtype)
            offsets[0] = 0
            offsets[1:] = torch.from_numpy(ends)
            offsets = offsets.to(column.device)
            self._known[key] = Segments(lengths=lengths, offsets=offsets)
        return self._known[key]
