"""A batch without padding: its samples one after the other, and where each ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchbudget.checks import check_flags
from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.batch import Batch
from torchbudget.data.collate.block_mask import block_mask_of
from torchbudget.data.collate.views import MappingView, SequenceView
from torchbudget.errors import CollateError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


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

    @property
    def shapes(self) -> IntArray:
        """See `Layout.shapes`."""
        return self.lengths

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

    def fits(self, field: Tensor) -> bool:
        """See `Layout.fits`."""
        return field.shape[:1] == (self.bounds()[-1],)

    @property
    def most(self) -> int:
        """See `Layout.most`."""
        return int(self.lengths.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the offsets."""
        return 0 if self.offsets is None else self.offsets.nbytes

    def map(self, function: Callable[[Tensor], Tensor]) -> PackedLayout:
        """See `Layout.map`."""
        mapped = None if self.offsets is None else function(self.offsets)
        return self if mapped is self.offsets else replace(self, offsets=mapped)


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

    def more_than_planned(
        self,
        planned: Sequence[int],
        size_multiple: int,
    ) -> tuple[list[int], list[int]] | None:
        """None, as in `PaddedBatch.more_than_planned`: it has no padding."""
        return None

    def axes_elsewhere(self, planned: Sequence[int]) -> list[int]:
        """None, as in `PaddedBatch.axes_elsewhere`: its samples differ in the first axis alone."""
        return []

    def block_mask(self, *, causal: bool = True) -> BlockMask:
        """The mask for `flex_attention` in which no position sees those of another sample.

        On the batch's device. Made at each call, from what the batch knows of its lengths on the
        host: without evaluating the mask at pairs of positions, as `create_block_mask` does, and
        without waiting for the device. Make it once a batch, not once a layer.

        Args:
            causal: whether positions see only themselves and earlier ones of their sample.

        Raises:
            CollateError: no field is ragged, or all samples are empty.

        >>> batch = PackCollate()([[1] * 200, [2] * 100])
        >>> mask = batch.block_mask()
        >>> mask.shape, mask.to_dense()[0, 0].tolist()
        ((1, 1, 300, 300), [[1, 0, 0], [1, 1, 0], [0, 1, 1]])
        """
        check_flags(causal=causal)
        device = self.cu_seqlens.device
        return block_mask_of(self._bounds(), device, causal=causal)

    def _bounds(self) -> list[int]:  # the elements of cu_seqlens, on the host
        bounds: list[int] = self._length_layout.bounds()
        return bounds


class PackedMapping(PackedBatch, MappingView):
    """A packed batch of dict samples."""


class PackedSequence(PackedBatch, SequenceView):
    """A packed batch of tuple samples."""


PACKED_KINDS = (PackedBatch, PackedMapping, PackedSequence)
