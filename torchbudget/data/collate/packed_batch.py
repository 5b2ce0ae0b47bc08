"""A batch without padding: its samples one after the other, where each ends, and its collate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.batch import Batch, MappingView, SequenceView, make_batch
from torchbudget.data.collate.columns import Column, new_tensor, read_column
from torchbudget.data.collate.options import CollateOptions, of_field, read_axes, read_dtype
from torchbudget.data.collate.structure import Field, fail_at_odd_one, show
from torchbudget.errors import CollateError, OptionError


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
