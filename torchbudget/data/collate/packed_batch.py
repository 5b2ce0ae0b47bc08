"""A batch without padding: its samples one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchbudget.data.collate.batch import Batch, MappingView, SequenceView
from torchbudget.data.collate.packing import PackedLayout
from torchbudget.data.collate.structure import fields_of, put_together
from torchbudget.errors import CollateError

PackedT = TypeVar("PackedT", bound="PackedBatch")


class PackedBatch(Batch):
    """n samples one after the other: tensors `(total, …)`, where total is Σ lengths.

    Made by `PackCollate`. `cu_seqlens` and `max_seqlen` are what `flash_attn_varlen_func` and
    `torch.nn.attention.varlen.varlen_attn` take. Fields of numbers are stacked: `(n,)`.

    >>> batch = PackCollate()([{"ids": [7, 8, 9], "label": 0}, {"ids": [4], "label": 1}])
    >>> batch["ids"], batch["label"]
    (tensor([7, 8, 9, 4]), tensor([0, 1]))
    >>> batch.cu_seqlens, batch.max_seqlen
    (tensor([0, 3, 4], dtype=torch.int32), 3)
    >>> batch.position_ids
    tensor([0, 1, 2, 0])
    """

    @property
    def max_seqlen(self) -> int:
        """The length of the longest sample."""
        return int(self._host_lengths.max(initial=0))

    @property
    def cu_seqlens(self) -> Tensor:
        """0 and the end of each sample in the length field: int32, `(n + 1,)`.

        On the batch's device.

        Raises:
            CollateError: no field is ragged.
        """
        offsets: Tensor | None = self._length_layout.offsets
        if offsets is None:
            raise CollateError("no field of this batch is ragged: nothing was concatenated")
        return offsets

    @property
    def position_ids(self) -> Tensor:
        """The position of each element in its own sample: int64, `(total,)`.

        On the batch's device. Computed at each access, without waiting for the device.
        """
        ends = self.cu_seqlens.long()
        firsts = torch.repeat_interleave(ends[:-1], ends.diff(), output_size=self.num_tokens)
        return torch.arange(self.num_tokens, device=ends.device) - firsts

    def samples(self) -> list[Any]:
        """The n samples as they were before collating, their fields as views of the batch.

        Arrays, lists and numbers come back as tensors. The samples can be collated again, also by
        another collate: `PadCollate()(packed_batch.samples())`.
        """
        columns = [
            value  # of texts or numbers: one per sample
            if layout is None or layout.offsets is None
            else value.split(layout.lengths[:, 0].tolist())
            for value, layout in zip(fields_of(self.data), self._layouts, strict=True)
        ]
        return [put_together(self.data, iter(row)) for row in zip(*columns, strict=True)]

    def _tensors(self) -> Iterator[Tensor]:
        yield from super()._tensors()
        offsets = (layout.offsets for layout in set(self._layouts) if layout is not None)
        yield from (tensor for tensor in offsets if tensor is not None)

    def _map(self: PackedT, function: Callable[[Tensor], Tensor]) -> PackedT:
        def moved(layout: PackedLayout) -> PackedLayout:
            offsets = layout.offsets
            return replace(layout, offsets=None if offsets is None else function(offsets))

        return replace(super()._map(function), _layouts=_each_once(self._layouts, moved))

    def _part(self: PackedT, start: int, stop: int) -> PackedT:
        def cut(layout: PackedLayout) -> PackedLayout:
            offsets = layout.offsets
            if offsets is not None:
                offsets = offsets[start : stop + 1] - layout.bounds()[start]
            return PackedLayout(lengths=layout.lengths[start:stop], offsets=offsets)

        values = []
        for value, layout in zip(fields_of(self.data), self._layouts, strict=True):
            bounds = range(self.num_samples + 1) if layout is None else layout.bounds()
            values.append(value[bounds[start] : bounds[stop]])
        return replace(
            self,
            num_samples=stop - start,
            data=put_together(self.data, iter(values)),
            _layouts=_each_once(self._layouts, cut),
        )


def _each_once(
    layouts: tuple[PackedLayout | None, ...], function: Callable[[PackedLayout], PackedLayout]
) -> tuple[PackedLayout | None, ...]:
    """Apply a function to every layout; fields that shared a layout share its result."""
    done = {layout: function(layout) for layout in set(layouts) if layout is not None}
    return tuple(layout and done[layout] for layout in layouts)


class PackedMapping(PackedBatch, MappingView):
    """A packed batch of dict samples."""


class PackedSequence(PackedBatch, SequenceView):
    """A packed batch of tuple samples."""


PACKED_KINDS = (PackedBatch, PackedMapping, PackedSequence)
