"""The packing of one field: the end of each sample in the batch's tensor, and the writing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
        per_sample = self.lengths.prod(axis=1)
        return [0, *per_sample.cumsum().tolist()]


class Packer:
    """Concatenates the fields of one batch; those of equal lengths share their layout."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[bytes, torch.device], PackedLayout] = {}

    def pack(self, column: Column) -> tuple[Tensor, PackedLayout]:
        """One tensor of all samples, `(total, …)`, or `(n,)` of numbers, and the end of each.

        Raises:
            CollateError: samples differ in an axis after the first, or have more positions in all
                than int32 can count.
        """
        shapes = column.shapes
        n = len(shapes)
        if shapes.shape[1] == 0:
            out = new_tensor((n,), column.dtype, column.device)
            return column.join(out), PackedLayout(lengths=shapes, offsets=None)
        if (shapes[:, 1:] != shapes[0, 1:]).any():
            fail_at_odd_one(
                column.path,
                shapes.tolist(),
                lambda shape: tuple(shape[1:]),
                "equal axes {} after the ragged first one".format,
            )
        layout = self._layout(column)
        total = int(shapes[:, 0].sum())
        out = new_tensor((total, *shapes[0, 1:].tolist()), column.dtype, column.device)
        return column.join(out), layout

    def _layout(self, column: Column) -> PackedLayout:
        lengths = np.ascontiguousarray(column.shapes[:, :1])
        key = (lengths.tobytes(), column.device)
        if key not in self._layouts:
            ends = lengths[:, 0].cumsum()
            if ends[-1] >= 2**31:
                raise CollateError(
                    f"{show(column.path)}: {ends[-1]} positions are more than the offsets, "
                    "torch.int32, can count; make smaller batches"
                )
            offsets = new_tensor((len(ends) + 1,), torch.int32)
            offsets[0] = 0
            offsets[1:] = torch.from_numpy(ends)
            offsets = offsets.to(column.device)
            self._layouts[key] = PackedLayout(lengths=lengths, offsets=offsets)
        return self._layouts[key]
