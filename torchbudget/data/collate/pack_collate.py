"""The collate that joins samples, also into rows as the models of transformers take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from torchbudget.checks import (
    HasSizeMultiple,
    at_least_one,
    check_flags,
    natural,
    size_multiple_of,
)
from torchbudget.cost.protocol import IntArray
from torchbudget.data.collate.batch import (
    Arrangement,
    PackedBatch,
    PackedMapping,
    PackedSequence,
)
from torchbudget.data.collate.columns import MISSING, new_tensor, show
from torchbudget.data.collate.fields import FieldCollate, check_ids
from torchbudget.data.collate.layouts import (
    ATTENTION_MASK,
    IGNORED_LABEL,
    LABELS,
    JoinedLayout,
    RowRule,
    on_device,
)
from torchbudget.errors import CollateError, OptionError

IDS: Final = "input_ids"
_SIGNED: Final = (torch.int8, torch.int16, torch.int32, torch.int64)
_MADE: Final = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
                "seq_idx", "use_cache")  # fmt: skip


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
            cost, from which it is read once. With the budget's number of positions, all batches
            are equally long.
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
    position_ids_start: int = 0
    causal_labels: bool = True

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
        if self.layout is None:
            return batch
        return _in_one_row(batch, causal_labels=self.causal_labels)


class TransformersBatch(PackedMapping):
    """n samples in one row, `(1, total, …)`: a mapping of what a model of transformers takes.

    Made by `PackCollate(layout="transformers")`, for `model(**batch)`. `cu_seqlens`, `max_seqlen`,
    `position_ids` and `block_mask` are those of the row's segments, padding included; they are
    known to a batch that was rebuilt from its fields, too. `lengths` and `num_tokens` count the
    samples' own positions.
    """

    @property
    def cu_seqlens(self) -> Tensor:
        """0 and the end of each segment: int32, `(segments + 1,)`."""
        offsets: Tensor = self.data["cu_seq_lens_q"]
        return offsets

    @property
    def _device(self) -> torch.device:
        return self.cu_seqlens.device

    def _bounds(self) -> IntArray:
        return self.cu_seqlens.cpu().numpy() if self._arrangement is None else super()._bounds()

    def _structured(self, values: Iterable[Any]) -> dict[str, Any]:
        named = zip(self._known.layouts, values, strict=True)
        return {path[0]: value for path, value in named if value is not MISSING}

    def _of_fields(self, values: Sequence[Any], arrangement: Arrangement) -> TransformersBatch:
        return _with_inputs(self._structured(values), arrangement)


def _in_one_row(packed: PackedBatch, *, causal_labels: bool) -> TransformersBatch:
    """A packed batch of dicts as the inputs of a model.

    Args:
        packed: its fields without a rule are in one row.
        causal_labels: see `PackCollate`.

    Raises:
        CollateError: the samples are not of fields that a model takes.
    """
    known = packed._known
    _check(packed)
    layouts = {path: own for path, own in known.layouts.items() if path != (ATTENTION_MASK,)}
    fields = dict(packed)
    if causal_labels:
        layouts.setdefault((LABELS,), layouts[(IDS,)])
        fields[LABELS] = _causal(fields, layouts[(LABELS,)])
    arrangement = replace(known, layouts=layouts, measured=(IDS,))
    return _with_inputs({path[0]: fields[path[0]] for path in layouts}, arrangement)


def _check(packed: PackedBatch) -> None:
    """Raise a `CollateError` for fields that no model takes."""
    check_ids(packed, IDS, JoinedLayout, 'layout="transformers"')
    for path in packed._known.layouts:
        if len(path) > 1 or path[0] in _MADE:
            raise CollateError(
                f'layout="transformers" makes {", ".join(_MADE)} itself, and its models take no '
                f"nested fields: leave {show(path)} out of the samples"
            )
    mask = packed.data.get(ATTENTION_MASK)  # 0 where the row is padded
    if mask is not None and int(torch.count_nonzero(mask)) != packed.num_tokens:
        raise CollateError(
            f"field {ATTENTION_MASK!r} masks positions of the samples, and a packed batch has no "
            "such mask: tokenize without padding"
        )


def _causal(fields: dict[str, Tensor], layout: Any) -> Tensor:
    """The labels of next tokens; nothing before a sample predicts its first one."""
    labels = fields.get(LABELS)
    in_row = isinstance(layout, JoinedLayout) and layout.rule.in_row
    if not in_row or (labels is not None and labels.dtype not in _SIGNED):
        raise CollateError(
            f"field {LABELS!r} must be of one signed integer per position, {IGNORED_LABEL} where "
            "nothing is predicted; causal_labels=False takes labels as they are"
        )
    ignored = np.ones(layout.shape, np.bool_)  # padding, and the first position of each sample
    for row, place in layout.places:
        ignored[row, place.start + 1 : place.stop] = False
    if labels is None:
        ids = fields[IDS]
        labels = new_tensor((*ids.shape,), ids.dtype, ids.device).copy_(ids)
    return labels.masked_fill_(on_device(ignored, labels.device), IGNORED_LABEL)


def _with_inputs(fields: dict[str, Any], arrangement: Arrangement) -> TransformersBatch:
    """The fields of a row, and the ends of its segments as a model takes them."""
    layout: Any = arrangement.layouts[(IDS,)]
    bounds = layout.bounds
    lengths = np.diff(bounds)
    device = fields[IDS].device
    segments = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(layout.total) - bounds[segments] + layout.rule.first_position
    cu_seq_lens = _tensor(bounds, torch.int32, device)
    longest = int(lengths.max(initial=0))
    made = {
        "position_ids": _tensor(positions[None], torch.int64, device),
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": _tensor(segments[None], torch.int32, device),
        # With a cache, models do not look for segments in position_ids, and samples see each other.
        "use_cache": False,
    }
    return TransformersBatch(fields | made, arrangement)


def _tensor(values: IntArray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return new_tensor(values.shape, dtype).copy_(torch.from_numpy(values)).to(device)
