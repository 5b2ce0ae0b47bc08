"""Packed batches as the models of transformers take them: one row, and where its segments end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.arrangement import Arrangement
from torchbudget.data.collate.columns import new_tensor
from torchbudget.data.collate.packed_batch import PackedBatch, PackedLayout, PackedMapping
from torchbudget.data.collate.row_layout import RowLayout
from torchbudget.data.collate.structure import FieldPath, fail, show
from torchbudget.data.collate.tokenizer_rules import ATTENTION_MASK, IGNORED_LABEL
from torchbudget.errors import CollateError

IDS: Final = "input_ids"
LABELS: Final = "labels"
_SIGNED: Final = (torch.int8, torch.int16, torch.int32, torch.int64)
_MADE: Final = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
                "seq_idx", "use_cache")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowArrangement(Arrangement):
    """The samples of a row, and the position of their first elements for the model."""

    position_ids_start: int


class TransformersBatch(PackedMapping):
    """n samples in one row, `(1, total, …)`: a mapping of what a model of transformers takes.

    Made by `PackCollate(layout="transformers")`, for `model(**batch)`. `cu_seqlens`, `max_seqlen`,
    `position_ids` and `block_mask` are those of the row's segments, padding included; they are
    known to a batch that was rebuilt from its fields, too. `lengths` and `num_tokens` count the
    samples' own positions.
    """

    @property
    def max_seqlen(self) -> int:
        """The length of the longest segment."""
        longest: int = self.data["max_length_q"]
        return longest

    @property
    def cu_seqlens(self) -> Tensor:
        """0 and the end of each segment: int32, `(segments + 1,)`."""
        offsets: Tensor = self.data["cu_seq_lens_q"]
        return offsets

    @property
    def position_ids(self) -> Tensor:
        """The position of each element in its own segment: int64, `(total,)`."""
        positions: Tensor = self.data["position_ids"][0]
        return positions

    def more_than_planned(
        self,
        planned: Sequence[int],
        size_multiple: int,
    ) -> tuple[list[int], list[int]] | None:
        """The room of all samples, and that of samples rounded up to `size_multiple`, if less.

        As in `PaddedBatch.more_than_planned`.
        """
        if self._arrangement is None:
            return None
        row = self._length_layout
        came, rounded = row.room(row.multiple), row.room(size_multiple)
        return ([came], [rounded]) if came > rounded else None

    def _bounds(self) -> list[int]:
        if self._arrangement is None:
            bounds: list[int] = self.cu_seqlens.tolist()
            return bounds
        return super()._bounds()

    def _structured(self, values: Iterable[Any]) -> dict[str, Any]:
        return {path[0]: value for path, value in zip(self._known.paths, values, strict=True)}

    def _of_fields(self, values: Iterable[Any], arrangement: Any) -> TransformersBatch:
        return _with_inputs(
            self._structured(values), arrangement.layouts[arrangement.length_field], arrangement
        )


def in_one_row(
    packed: PackedBatch,
    *,
    multiple: int,
    total: int | None,
    position_ids_start: int,
    causal_labels: bool,
) -> TransformersBatch:
    """A packed batch of dicts as the inputs of a model; `PackCollate` explains the options.

    Raises:
        CollateError: the samples are not of fields that a model takes, or are more than the total.
    """
    known = packed._known
    layouts: dict[FieldPath, Any] = dict(zip(known.paths, known.layouts, strict=True))
    names, fields = _checked(packed, layouts)
    row = RowLayout.of(layouts[(IDS,)].lengths, multiple, total)
    if causal_labels:
        names.setdefault(LABELS, names[IDS])
        fields[LABELS] = _causal(fields, names[LABELS])
    for name, layout in names.items():
        if layout is not None and layout.lengths.shape[1]:
            fields[name] = _in_row(fields[name], row, IGNORED_LABEL if name == LABELS else 0)
            names[name] = row
    arrangement = RowArrangement(
        num_samples=known.num_samples,
        paths=tuple((name,) for name in names),
        layouts=tuple(names.values()),
        length_field=list(names).index(IDS),
        position_ids_start=position_ids_start,
    )
    return _with_inputs({name: fields[name] for name in names}, row, arrangement)


def _checked(
    packed: PackedBatch, layouts: dict[FieldPath, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The layout of each field and its tensor, by name, without the attention mask."""
    ids = layouts.get((IDS,))
    if ids is None or not ids.lengths.shape[1] or packed[IDS].ndim != 1:
        raise CollateError(
            f'layout="transformers" takes dict samples with a field {IDS!r} of one token id per '
            f"position, got samples of {_shown(packed, layouts)}"
        )
    for path, layout in layouts.items():
        if len(path) > 1 or path[0] in _MADE:
            raise CollateError(
                f'layout="transformers" makes {", ".join(_MADE)} itself, and its models take no '
                f"nested fields: leave {show(path)} out of the samples"
            )
        if layout is not None and layout.lengths.shape[1]:
            _check_equal(path, layout.lengths, ids.lengths)
    fields = dict(packed)
    mask = fields.pop(ATTENTION_MASK, None)
    if mask is not None and not bool(torch.as_tensor(mask).all()):
        raise CollateError(
            f"field {ATTENTION_MASK!r} masks positions of the samples, and a packed batch has no "
            "such mask: tokenize without padding"
        )
    return {path[0]: layout for path, layout in layouts.items() if path[0] in fields}, fields


def _shown(packed: PackedBatch, layouts: dict[FieldPath, Any]) -> str:
    """The fields, and the axes of ids that have more than one, as return_tensors='pt' gives."""
    names = ", ".join(map(show, layouts))
    ids = packed[IDS] if (IDS,) in layouts else None
    axes = getattr(ids, "ndim", 1)
    return names if axes == 1 else f"{names}, with {axes} axes of {IDS!r}"


def _check_equal(path: FieldPath, lengths: IntArray, expected: IntArray) -> None:
    differs = np.flatnonzero(lengths != expected)
    if len(differs):
        i = int(differs[0])
        fail(path, i, f"a length of {expected[i, 0]}, as {show((IDS,))} has", str(lengths[i, 0]))


def _causal(fields: dict[str, Tensor], layout: PackedLayout) -> Tensor:
    """The labels of next tokens; nothing before a sample predicts its first one."""
    labels = fields.get(LABELS)
    if labels is None:
        ids = fields[IDS]
        labels = new_tensor((*ids.shape,), ids.dtype, ids.device).copy_(ids)
    if layout.offsets is None or labels.dtype not in _SIGNED:
        raise CollateError(
            f"field {LABELS!r} must be of one signed integer per position, {IGNORED_LABEL} where "
            f"nothing is predicted, got {labels.dtype} of shape {list(labels.shape)}; "
            "causal_labels=False takes labels as they are"
        )
    bounds = layout.bounds()
    firsts = [start for start, stop in pairwise(bounds) if start < stop]
    labels[torch.tensor(firsts, dtype=torch.int64, device=labels.device)] = IGNORED_LABEL
    return labels


def _in_row(field: Tensor, row: RowLayout, value: int) -> Tensor:
    """The samples of a packed field, `(Σ lengths, …)`, at their places in a row `(1, total, …)`.

    Raises:
        CollateError: labels are padded whose dtype has no -100, which would be True or 156.
    """
    if len(field) == row.total:
        return field[None]
    if value == IGNORED_LABEL and field.dtype not in _SIGNED and not field.is_floating_point():
        raise CollateError(
            f"field {LABELS!r} must be of signed integers or floating-point numbers where it is "
            f"padded, with {IGNORED_LABEL}, got {field.dtype}: convert it in the dataset"
        )
    out = new_tensor((1, row.total, *field.shape[1:]), field.dtype, field.device).fill_(value)
    out[0, torch.from_numpy(row.own).to(field.device)] = field
    return out


def _with_inputs(
    fields: dict[str, Any], row: RowLayout, arrangement: RowArrangement
) -> TransformersBatch:
    """The fields of a row, and what a model needs to know of its segments."""
    bounds = np.asarray(row.bounds(), dtype=np.int64)
    lengths = np.diff(bounds)
    device = fields[IDS].device
    segments = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.arange(row.total) - bounds[segments] + arrangement.position_ids_start
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
