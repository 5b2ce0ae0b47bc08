"""The collate that concatenates samples without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchbudget.data.collate.batch import make_batch
from torchbudget.data.collate.columns import Column, new_tensor, read_column
from torchbudget.data.collate.options import CollateOptions, of_field, read_axes, read_dtype
from torchbudget.data.collate.packed_batch import PACKED_KINDS, PackedBatch, PackedLayout
from torchbudget.data.collate.structure import Field, fail_at_odd_one, show
from torchbudget.errors import CollateError, OptionError


def _read_axes(axes: Any) -> tuple[int, ...]:
    named = read_axes(axes)
    if named not in ((0,), ()):
        raise OptionError(
            "samples are packed along their first axis: length_axes must be 0, or () for a field "
            f"of one fixed shape, got {axes!r}"
        )
    return named


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCollate(CollateOptions):
    """Collates ragged samples without padding, one after the other, into a `PackedBatch`.

    Every field is concatenated along its first axis; its other axes must agree. Samples and
    fields are what `PadCollate` takes.

    Args:
        length_axes: 0, or `()` for a field of one fixed shape, such as the embedding of a whole
            sample: it is stacked, as numbers are.
        length_field: the field, by name or position (a tuple of those if samples are nested),
            whose lengths are the batch's `lengths`, `cu_seqlens` and `max_seqlen`. Default: as in
            `PadCollate`.
        dtype: as in `PadCollate`.

    Raises:
        OptionError: an option is invalid.
        CollateError: when called with samples that cannot form one batch.

    >>> batch = PackCollate()([torch.ones(2, 4), torch.zeros(3, 4)])
    >>> batch.data.shape, batch.cu_seqlens
    (torch.Size([5, 4]), tensor([0, 2, 5], dtype=torch.int32))
    """

    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "length_axes": _read_axes,
        "dtype": read_dtype,
    }

    def __call__(self, samples: Sequence[Any]) -> PackedBatch:
        """Collate n ≥ 1 samples, in time linear in their elements."""
        layouts: dict[Any, PackedLayout] = {}

        def write(entry: Field) -> tuple[Tensor, PackedLayout]:
            column = read_column(entry, of_field(self.dtype, entry.path, None))
            if column.shapes.shape[1] and of_field(self.length_axes, entry.path, (0,)):
                return _pack(column, layouts)
            return _stack(column)

        with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
            return make_batch(PACKED_KINDS, samples, self, write)


def _stack(column: Column) -> tuple[Tensor, PackedLayout]:
    """One tensor of all samples, `(n, …)`, which have no length.

    Raises:
        CollateError: their shapes differ.
    """
    shapes = column.shapes
    if (shapes != shapes[0]).any():
        fail_at_odd_one(
            column.path,
            shapes.tolist(),
            tuple,
            "the fixed shape {}, since length_axes says that it has no length,".format,
        )
    out = new_tensor((len(shapes), *shapes[0].tolist()), column.dtype, column.device)
    if out.numel():
        column.join(out if out.ndim == 1 else out.flatten(0, 1))
    return out, PackedLayout(lengths=shapes[:, :0], offsets=None)


def _pack(column: Column, layouts: dict[Any, PackedLayout]) -> tuple[Tensor, PackedLayout]:
    """One tensor of all samples, `(total, …)`, and the end of each.

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
    layout = layouts.get(key)
    if layout is None:
        bounds = [0, *shapes[:, 0].cumsum().tolist()]
        if bounds[-1] >= 2**31:
            raise CollateError(
                f"{show(column.path)}: {bounds[-1]} positions are more than the offsets, "
                "torch.int32, can count; make smaller batches"
            )
        offsets = new_tensor((len(bounds),), torch.int32).copy_(torch.tensor(bounds))
        layout = PackedLayout(lengths=shapes[:, :1], offsets=offsets.to(column.device))
        layouts[key] = layout
    total = int(shapes[:, 0].sum())
    out = new_tensor((total, *shapes[0, 1:].tolist()), column.dtype, column.device)
    return column.join(out), layout
