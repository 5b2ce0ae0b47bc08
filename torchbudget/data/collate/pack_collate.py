"""The collate that concatenates samples without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from torchbudget.checks import (
    HasSizeMultiple,
    at_least_one,
    check_flags,
    natural,
    optional,
    size_multiple_of,
)
from torchbudget.data.collate.batch import PackedBatch, PackedMapping, PackedSequence
from torchbudget.data.collate.columns import Column
from torchbudget.data.collate.fields import FieldCollate
from torchbudget.data.collate.layouts import Layout, PaddingRule, RowRule, join, own_padding, pad
from torchbudget.data.collate.transformers_layout import in_one_row
from torchbudget.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCollate(FieldCollate):
    """Collates ragged samples without padding, one after the other, into a `PackedBatch`.

    Every field is joined along its first axis; its other axes must agree. Samples, fields and
    their rules are those of `PadCollate`, but fields with axes are joined by
    default.

    Args:
        fields: as in `PadCollate`: a mapping from field to "joined", "padded", "stacked", "listed"
            or "optional". Fields with a rule have their own lengths; all others must be equally
            long in each sample, and `lengths`, `cu_seqlens` and `max_seqlen` are theirs. A padded
            field is padded on the right with 0, labels with -100.
        dtype: as in `PadCollate`.
        layout: `"transformers"` makes a `TransformersBatch` of dict samples: `input_ids`, `labels`
            and other fields of one value per token in one row, `(1, total)`; `position_ids`,
            `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k` and `seq_idx` of its
            segments; no attention mask, which must be all ones in the samples; and
            `use_cache=False`. Fields with a rule are not in the row.
        size_multiple: each sample gets room that is a multiple of it; it must be that of the
            sampler or stream, and may be read from it, as in `PadCollate`. Padding is 0
            (-100 in `labels`) and is in segments of its own, which no sample sees; so
            `cu_seqlens` has more entries than samples, and `lengths` counts without padding.
        total_multiple: the total is rounded up to a multiple of it, in the same way. It must be
            that of the cost, `PackedCost(total_multiple=…)`: give an int, or the sampler, stream or
            cost, from which it is read once.
        total: the length of every batch, for shapes that stay the same; padded in the same way. A
            batch with more positions raises an error. Parts of a split batch are shorter.
        position_ids_start: the position of each sample's first token in `layout="transformers"`: 0
            for most models, and `padding_idx + 1` for those like RoBERTa.
        causal_labels: in `layout="transformers"` labels are those of the next token: the first of
            each sample is -100, since the last token of the sample before would predict it, and
            samples without `labels` get their `input_ids`. False leaves labels as they are, for
            models that do not shift them.

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
    total_multiple: Any = 1
    total: int | None = None
    position_ids_start: int = 0
    causal_labels: bool = True

    _row: RowRule = field(default=RowRule(), init=False, repr=False)

    _ragged: ClassVar[str] = "joined"

    def __post_init__(self) -> None:
        """Check the options."""
        FieldCollate.__post_init__(self)
        if self.layout not in (None, "transformers"):
            raise OptionError(f'layout must be "transformers" or None, got {self.layout!r}')
        check_flags(causal_labels=self.causal_labels)
        # Copies of the numbers: a collate is sent to workers, and a sampler is large.
        object.__setattr__(self, "size_multiple", size_multiple_of(self.size_multiple))
        total_multiple = getattr(self.total_multiple, "total_multiple", self.total_multiple)
        object.__setattr__(self, "total_multiple", at_least_one("total_multiple", total_multiple))
        row = RowRule(
            multiple=size_multiple_of(self.size_multiple),
            total=optional("total", self.total),
            total_multiple=self.total_multiple,
            in_row=self.layout is not None,
            first_position=natural("position_ids_start", self.position_ids_start),
        )
        object.__setattr__(self, "_row", row)
        if self.layout is None and (self.position_ids_start, self.causal_labels) != (0, True):
            raise OptionError(
                'position_ids_start and causal_labels are options of layout="transformers"'
            )

    def __call__(self, samples: Sequence[Any]) -> PackedBatch:
        """Collate n ≥ 1 samples, in time linear in their elements."""
        batch = self._collate(samples, (PackedBatch, PackedMapping, PackedSequence))
        return batch if self.layout is None else in_one_row(batch, causal_labels=self.causal_labels)

    def _write_ragged(
        self, column: Column, kind: str | None, *, is_own: bool, shared: dict[Any, Any]
    ) -> tuple[torch.Tensor, Layout]:
        """See `FieldCollate._write_ragged`."""
        value = own_padding(column.field.names) or 0
        if kind == "padded":
            ndim = column.shapes.shape[1]
            return pad(column, PaddingRule(value, 0.0, (1,) * ndim, (0,)), shared)
        return join(column, RowRule() if is_own else self._row, value, shared)
