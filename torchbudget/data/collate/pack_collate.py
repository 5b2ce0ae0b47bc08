"""Collates: from a list of ragged samples to one batch without padding, packed or jagged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchbudget.data.collate.batch import BatchT, make_batch
from torchbudget.data.collate.columns import read_column
from torchbudget.data.collate.jagged import JAGGED_KINDS, JaggedBatch
from torchbudget.data.collate.packed_batch import PACKED_KINDS, PackedBatch
from torchbudget.data.collate.segments import Concatenator, Segments
from torchbudget.data.collate.structure import choose_length_field, put_together, take_apart


def _concatenate(
    samples: Sequence[Any],
    length_field: Any | None,
    offsets_dtype: torch.dtype,
    kinds: tuple[type[BatchT], type[BatchT], type[BatchT]],
) -> BatchT:
    structure, fields = take_apart(samples)
    concatenator = Concatenator(offsets_dtype)
    values: list[Any] = []
    layouts: list[Segments | None] = []
    with torch.no_grad():  # out= writes into a batch's memory, which has no history
        for field in fields:
            value, layout = (
                (list(field.values), None)
                if field.kind == "text"
                else concatenator.concatenate(read_column(field))
            )
            values.append(value)
            layouts.append(layout)
    index = choose_length_field(
        length_field,
        [field.path for field in fields],
        [layout is not None and layout.offsets is not None for layout in layouts],
        [layout is None for layout in layouts],
    )
    return make_batch(kinds, put_together(structure, iter(values)), len(samples), layouts, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCollate:
    """Collates ragged samples without padding, one after the other, into a `PackedBatch`.

    Every field is concatenated along its first axis; its other axes must agree. Samples and
    fields are what `PadCollate` takes.

    Args:
        length_field: the field, by name or position (a tuple of those where samples are nested),
            whose lengths are the batch's `lengths`, `cu_seqlens` and `max_seqlen`; by default the
            first ragged one.

    Raises:
        CollateError: when it is called with samples that cannot form one batch.

    >>> batch = PackCollate()([torch.ones(2, 4), torch.zeros(3, 4)])
    >>> batch.data.shape, batch.cu_seqlens
    (torch.Size([5, 4]), tensor([0, 2, 5], dtype=torch.int32))
    """

    length_field: Any | None = None

    def __call__(self, samples: Sequence[Any]) -> PackedBatch:
        """Collate n ≥ 1 samples, in time linear in their elements."""
        return _concatenate(samples, self.length_field, torch.int32, PACKED_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class JaggedCollate:
    """Collates ragged samples into a `JaggedBatch`, whose fields are jagged nested tensors.

    The first axis of every field is the ragged one; its other axes must agree. Samples and fields
    are what `PadCollate` takes.

    Args:
        length_field: the field, by name or position (a tuple of those where samples are nested),
            whose lengths are the batch's `lengths`, `offsets` and `max_seqlen`; by default the
            first ragged one.

    Raises:
        CollateError: when it is called with samples that cannot form one batch.

    >>> batch = JaggedCollate()([torch.ones(2, 4), torch.zeros(3, 4)])
    >>> batch.data.sum(dim=-1).unbind()
    (tensor([4., 4.]), tensor([0., 0., 0.]))
    """

    length_field: Any | None = None

    def __call__(self, samples: Sequence[Any]) -> JaggedBatch:
        """Collate n ≥ 1 samples, in time linear in their elements."""
        return _concatenate(samples, self.length_field, torch.int64, JAGGED_KINDS)
