"""The collate that concatenates samples without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchbudget.checks import (
    HasSizeMultiple,
    check_flags,
    natural,
    optional,
    size_multiple_of,
)
from torchbudget.data.collate.batch import make_batch
from torchbudget.data.collate.columns import Column, new_tensor, read_column
from torchbudget.data.collate.options import CollateOptions, of_field, read_axes, read_dtype
from torchbudget.data.collate.packed_batch import PACKED_KINDS, PackedBatch, PackedLayout
from torchbudget.data.collate.structure import Field, fail_at_odd_one, show
from torchbudget.data.collate.transformers_layout import in_one_row
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
        layout: `"transformers"` makes a `TransformersBatch` of dict samples: `input_ids`, `labels`
            and other fields of one value per token in one row, `(1, total)`; `position_ids`,
            `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` and `seq_idx` of its
            segments; no attention mask, which must be all ones in the samples; and
            `use_cache=False`. The options below are for this layout alone.
        size_multiple: each sample gets room that is a multiple of it; it must be that of the
            sampler or stream, and may be read from it, as in `PadCollate`. What pads a sample is 0
            (-100 in `labels`) and is in segments of its own, which no sample sees; so
            `cu_seq_lens_q` has more entries than samples, and `lengths` counts without padding.
        total: the length of every row, for shapes that stay the same; padded in the same way. A
            batch with more positions raises an error. Parts of a split batch are shorter.
        position_ids_start: the position of each sample's first token: 0 for most models, and
            `padding_idx + 1` for those like RoBERTa.
        causal_labels: labels are those of the next token: the first of each sample is -100, which
            is what its predecessor in the row would predict, and samples without `labels` get
            their `input_ids`. False leaves labels as they are, for models that do not shift them.

    Raises:
        OptionError: an option is invalid.
        CollateError: when called with samples that cannot form one batch.

    >>> batch = PackCollate()([torch.ones(2, 4), torch.zeros(3, 4)])
    >>> batch.data.shape, batch.cu_seqlens
    (torch.Size([5, 4]), tensor([0, 2, 5], dtype=torch.int32))
    >>> collate = PackCollate(layout="transformers")
    >>> for name, value in collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]).items():
    ...     print(name, value.tolist() if isinstance(value, torch.Tensor) else value)
    input_ids [[5, 6, 7, 8, 9]]
    labels [[-100, 6, 7, -100, 9]]
    position_ids [[0, 1, 2, 0, 1]]
    cu_seq_lens_q [0, 3, 5]
    cu_seq_lens_k [0, 3, 5]
    max_length_q 3
    max_length_k 3
    seq_idx [[0, 0, 0, 1, 1]]
    use_cache False
    """

    layout: str | None = None
    size_multiple: int | HasSizeMultiple = 1
    total: int | None = None
    position_ids_start: int = 0
    causal_labels: bool = True

    _per_field: ClassVar[dict[str, Callable[[Any], Any]]] = {
        "length_axes": _read_axes,
        "dtype": read_dtype,
    }

    def __post_init__(self) -> None:
        """Check the options."""
        CollateOptions.__post_init__(self)
        if self.layout not in (None, "transformers"):
            raise OptionError(f'layout must be "transformers" or None, got {self.layout!r}')
        check_flags(causal_labels=self.causal_labels)
        # A copy of the number: a collate is sent to workers, and a sampler is large.
        object.__setattr__(self, "size_multiple", size_multiple_of(self.size_multiple))
        optional("total", self.total)
        natural("position_ids_start", self.position_ids_start)
        given = (self.size_multiple, self.total, self.position_ids_start, self.causal_labels)
        if self.layout is None and given != (1, None, 0, True):
            raise OptionError(
                "size_multiple, total, position_ids_start and causal_labels are options of "
                'layout="transformers"; plain packed batches have no padding'
            )

    def __call__(self, samples: Sequence[Any]) -> PackedBatch:
        """Collate n ≥ 1 samples, in time linear in their elements."""
        layouts: dict[Any, PackedLayout] = {}

        def write(entry: Field) -> tuple[Tensor, PackedLayout]:
            column = read_column(entry, of_field(self.dtype, entry.path, None))
            if column.shapes.shape[1] and of_field(self.length_axes, entry.path, (0,)):
                return _pack(column, layouts)
            return _stack(column)

        with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
            batch = make_batch(PACKED_KINDS, samples, self, write)
            return batch if self.layout is None else self._in_one_row(batch)

    def _in_one_row(self, batch: PackedBatch) -> PackedBatch:
        return in_one_row(
            batch,
            multiple=size_multiple_of(self.size_multiple),
            total=self.total,
            position_ids_start=self.position_ids_start,
            causal_labels=self.causal_labels,
        )


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
