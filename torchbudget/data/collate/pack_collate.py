"""The collate that packs samples: one after the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchbudget.data.collate.batch import make_batch
from torchbudget.data.collate.packed_batch import PACKED_KINDS, PackedBatch
from torchbudget.data.collate.packing import pack
from torchbudget.data.collate.structure import take_apart


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
        write = partial(pack, layouts={})
        with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
            return make_batch(PACKED_KINDS, *take_apart(samples), write, self.length_field)
