"""A batch without padding: its samples one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbudget.data.collate.batch import MappingView, SequenceView
from torchbudget.data.collate.segments import SegmentedBatch


class PackedBatch(SegmentedBatch):
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
    def cu_seqlens(self) -> Tensor:
        """0 and the end of each sample, those of the length field: int32, `(n + 1,)`.

        On the batch's device.

        Raises:
            CollateError: no field is ragged.
        """
        return self._offsets

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
