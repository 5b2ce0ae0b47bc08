"""A batch without padding: its samples one after the other, where each ends, and its collate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.batch import Batch, MappingView, SequenceView, make_batch
from torchbudget.data.collate.columns import Column, new_tensor
from torchbudget.data.collate.structure import fail_at_odd_one, show, take_apart
from torchbudget.errors import CollateError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayout:
    """The ends of n samples in a concatenated tensor.

    Attributes:
        lengths: each sample's length, `(n, 1)`; `(n, 0)` for a field of numbers, which is stacked.
        offsets: 0 and the end of each sample, int32, `(n + 1,)`, on the field's device. Fields of
            equal lengths have the same tensor. None for a field of numbers.
    """

    lengths: IntArray
    offsets: Tensor | None

    def bounds(self) -> list[int]:
        """0 and the end of each sample, on the host."""
        return [0, *self.lengths.prod(axis=1).cumsum().tolist()]

    def samples(self, field: Tensor) -> Sequence[Tensor]:
        """See `Layout.samples`."""
        if self.offsets is None:
            return field.unbind()
        return torch.split(field, self.lengths[:, 0].tolist())

    def part(self, start: int, stop: int) -> tuple[slice, PackedLayout]:
        """See `Layout.part`."""
        bounds, offsets = self.bounds(), self.offsets
        if offsets is not None:
            offsets = offsets[start : stop + 1] - bounds[start]
        layout = PackedLayout(lengths=self.lengths[start:stop], offsets=offsets)
        return slice(bounds[start], bounds[stop]), layout

    @property
    def nbytes(self) -> int:
        """Bytes of the offsets."""
        return 0 if self.offsets is None else self.offsets.nbytes

    def map(self, function: Callable[[Tensor], Tensor]) -> PackedLayout:
        """See `Layout.map`."""
        return self if self.offsets is None else replace(self, offsets=function(self.offsets))


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


class PackedMapping(PackedBatch, MappingView):
    """A packed batch of dict samples."""


class PackedSequence(PackedBatch, SequenceView):
    """A packed batch of tuple samples."""


PACKED_KINDS = (PackedBatch, PackedMapping, PackedSequence)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCollate:
    """Collates ragged samples without padding, one after the other, into a `PackedBatch`.

    Every field is concatenated along its first axis; its other axes must agree. Samples and
    fields are what `PadCollate` takes.

    Args:
        length_field: the field, by name or position (a tuple of those if samples are nested),
            whose lengths are the batch's `lengths`, `cu_seqlens` and `max_seqlen`; by default the
            first ragged one.

    Raises:
        CollateError: when called with samples that cannot form one batch.

    >>> batch = PackCollate()([torch.ones(2, 4), torch.zeros(3, 4)])
    >>> batch.data.shape, batch.cu_seqlens
    (torch.Size([5, 4]), tensor([0, 2, 5], dtype=torch.int32))
    """

    length_field: Any | None = None

    def __call__(self, samples: Sequence[Any]) -> PackedBatch:
        """Collate n ≥ 1 samples, in time linear in their elements."""
        write = partial(_pack, layouts={})
        with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
            return make_batch(PACKED_KINDS, *take_apart(samples), write, self.length_field)


def _pack(column: Column, layouts: dict[Any, PackedLayout]) -> tuple[Tensor, PackedLayout]:
    """One tensor of all samples, `(total, …)`, or `(n,)` of numbers, and the end of each.

    Args:
        column: one field of a batch.
        layouts: those of the batch's fields so far, to which this one's is added: fields of equal
            lengths share their layout.

    Raises:
        CollateError: samples differ in an axis after the first, or have more positions in all
            than int32 can count.
    """
    shapes = column.shapes
    if (shapes[:, 1:] != shapes[0, 1:]).any():
        fail_at_odd_one(
            column.path,
            shapes.tolist(),
            lambda shape: tuple(shape[1:]),
            "equal axes {} after the ragged first one".format,
        )
    key = (shapes[:, :1].tobytes(), column.device)
    layout = layouts.get(key) or PackedLayout(lengths=shapes[:, :1], offsets=None)
    bounds = layout.bounds()
    if shapes.shape[1] and layout.offsets is None:
        if bounds[-1] >= 2**31:
            raise CollateError(
                f"{show(column.path)}: {bounds[-1]} positions are more than the offsets, "
                "torch.int32, can count; make smaller batches"
            )
        offsets = new_tensor((len(bounds),), torch.int32).copy_(torch.tensor(bounds))
        layout = layouts[key] = replace(layout, offsets=offsets.to(column.device))
    out = new_tensor((bounds[-1], *shapes[0, 1:].tolist()), column.dtype, column.device)
    return column.join(out), layout
