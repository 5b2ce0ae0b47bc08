"""The packing of one field: the end of each sample in the batch's tensor, and the writing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.columns import Column, new_tensor
from torchbudget.data.collate.structure import fail_at_odd_one, show
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


def pack(column: Column, layouts: dict[Any, PackedLayout]) -> tuple[Tensor, PackedLayout]:
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
