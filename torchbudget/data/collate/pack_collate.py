"""The collate that packs samples: one after the other, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchbudget.data.collate.batch import make_batch
from torchbudget.data.collate.columns import Column, new_tensor
from torchbudget.data.collate.packed_batch import PACKED_KINDS, PackedBatch, PackedLayout
from torchbudget.data.collate.structure import fail_at_odd_one, show, take_apart
from torchbudget.errors import CollateError


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
