"""Tensors of one field of a batch, and the places of the samples in them.

A field is padded, joined or stacked: each way has a function that writes a column of samples into
one tensor, and a layout that finds the samples in the tensor again.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.columns import (
    MISSING,
    BoolArray,
    Column,
    FieldPath,
    new_tensor,
    show,
)
from torchbudget.errors import CollateError
from torchbudget.machine.cuda import may_return_early

Number: TypeAlias = complex  # by PEP 484: int, float and bool too
PaddingValue: TypeAlias = Number | Callable[[Any], Any]

ATTENTION_MASK: Final = "attention_mask"
LABELS: Final = "labels"
IGNORED_LABEL: Final = -100  # torch.nn.functional.cross_entropy ignores it
# By convention; attention ignores positions that are masked with 0.
OWN_PADDING: Final[dict[Any, int]] = {LABELS: IGNORED_LABEL, ATTENTION_MASK: 0}

# Up to this size it is faster to concatenate all samples and to scatter them at once than to write
# sample by sample; for larger ones the second copy costs more than the loop. Measured.
_SCATTER_SAMPLE_BYTES: Final = 16 * 1024
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def own_padding(names: FieldPath, padding: Mapping[Any, int] = OWN_PADDING) -> int | None:
    """The padding value of a field by its name, else by the name of an outer field.

    >>> own_padding(("labels", "tags")), own_padding(("tags",))
    (-100, None)
    """
    return next((padding[name] for name in reversed(names) if name in padding), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout(ABC):
    """The places of n samples in the tensor of a field.

    Attributes:
        shapes: the lengths of each sample on all axes in which samples may differ, `(n, d)`.
    """

    shapes: IntArray

    @property
    def lengths(self) -> IntArray:
        """The lengths of each sample on its ragged axes, `(n, k)`."""
        return self.shapes

    @property
    def ragged_axes(self) -> int:
        """The number of ragged axes, k."""
        return int(self.shapes.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the layout's own tensors."""
        return 0

    def map(self, function: Callable[[Tensor], Tensor]) -> Layout:
        """The same layout with a function applied to its own tensors."""
        return self

    @abstractmethod
    def samples(self, field: Tensor) -> Sequence[Any]:
        """The n samples, as views of the tensor."""

    @abstractmethod
    def part(self, start: int, stop: int) -> tuple[Any, Layout]:
        """The index of samples `start` to `stop` in the tensor, and their layout in the result."""

    @abstractmethod
    def fits(self, field: Tensor) -> bool:
        """Whether the samples can be in this tensor; it may have more axes, after theirs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StackedLayout(Layout):
    """One row of the tensor for each sample that has the field.

    Attributes:
        present: False for samples without the field, `(n,)`; `None`: all have it.
    """

    present: BoolArray | None = None

    def samples(self, field: Tensor) -> Sequence[Any]:
        """See `Layout.samples`; `MISSING` for samples without the field."""
        if self.present is None:
            return field.unbind()
        rows = iter(field.unbind())
        return [next(rows) if has else MISSING for has in self.present.tolist()]

    def part(self, start: int, stop: int) -> tuple[slice, StackedLayout]:
        """See `Layout.part`."""
        shapes = self.shapes[start:stop]
        if self.present is None:
            return slice(start, stop), StackedLayout(shapes=shapes)
        rows = slice(int(self.present[:start].sum()), int(self.present[:stop].sum()))
        return rows, StackedLayout(shapes=shapes, present=self.present[start:stop])

    def fits(self, field: Tensor) -> bool:
        """See `Layout.fits`."""
        rows = len(self.shapes) if self.present is None else int(self.present.sum())
        return field.shape[:1] == (rows,)


def stack(column: Column) -> tuple[Tensor, StackedLayout]:
    """Write all samples into one tensor, `(n, …)`, one row each.

    Raises:
        CollateError: their shapes differ.
    """
    shapes, present = column.shapes, column.field.present
    if (shapes != shapes[0]).any():
        column.field.fail_at_odd_one(
            list(map(tuple, shapes.tolist())), "the fixed shape {} of a stacked field".format
        )
    out = new_tensor((len(shapes), *shapes[0].tolist()), column.dtype, column.device)
    if out.numel():
        column.join(out if out.ndim == 1 else out.flatten(0, 1))
    n = len(shapes) if present is None else len(present)
    return out, StackedLayout(shapes=np.empty((n, 0), np.int64), present=present)


class RowRule(NamedTuple):
    """How samples are joined.

    Attributes:
        multiple: each sample gets room that is a multiple of it.
        total: the length of the joined tensor; `None`: as long as the samples need.
        total_multiple: the length of the joined tensor is rounded up to a multiple of it.
        in_row: whether the tensor is one row, `(1, total, …)`, and not `(total, …)`.
        first_position: the position of each sample's first element, for the model of a row.
    """

    multiple: int = 1
    total: int | None = None
    total_multiple: int = 1
    in_row: bool = False
    first_position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedLayout(Layout):
    """Samples one after the other, `(n, 1)` lengths.

    Attributes:
        rule: how they were joined.
        bounds: 0 and the end of each segment: a sample, or padding, `(segments + 1,)`. Padding is
            in segments of its own, none longer than the longest sample: so it costs no more than
            samples of its size do, and its positions are ones that the model has.
        total: the length of the tensor.
        padded_total: the length without the padding up to `RowRule.total`.
        num_elements: Σ lengths, less than the total where positions are padding.
        offsets: the bounds as int32, on the field's device; `None` of a row.
    """

    rule: RowRule
    bounds: IntArray
    total: int
    padded_total: int
    num_elements: int
    offsets: Tensor | None = None

    @classmethod
    def of(cls, lengths: IntArray, rule: RowRule, device: torch.device) -> JoinedLayout:
        """The layout of samples of these lengths, `(n, 1)`.

        Raises:
            CollateError: the samples have more positions than the rule's total, or than int32 can
                count.
        """
        bounds = np.zeros(len(lengths) + 1, np.int64)
        _rounded_up(lengths[:, 0], rule.multiple).cumsum(out=bounds[1:])
        padded_total = int(_rounded_up(bounds[-1], rule.total_multiple))
        if rule.total is not None and padded_total > rule.total:
            raise CollateError(
                f"the samples of a batch have {padded_total} positions, more than "
                f"total={rule.total}; plan with a budget that is at most total, such as "
                "PackedCost(unit_bytes=1) and a budget of total units, and with the same multiples"
            )
        bounds[-1] = total = rule.total or padded_total
        if total >= 2**31:
            raise CollateError(
                f"{total} positions are more than the offsets, torch.int32, can count; make "
                "smaller batches"
            )
        num_elements = int(lengths.sum())
        if total > num_elements:
            bounds = np.array(_with_padding(lengths[:, 0].tolist(), bounds.tolist()))
        offsets = None
        if not rule.in_row:
            offsets = new_tensor(bounds.shape, torch.int32).copy_(torch.from_numpy(bounds))
            offsets = offsets.to(device)
        return cls(
            shapes=lengths,
            rule=rule,
            bounds=bounds,
            total=total,
            padded_total=padded_total,
            num_elements=num_elements,
            offsets=offsets,
        )

    @property
    def starts(self) -> IntArray:
        """The position of each sample's first element, `(n,)`."""
        rooms: IntArray = _rounded_up(self.shapes[:, 0], self.rule.multiple)
        return rooms.cumsum() - rooms

    @property
    def own(self) -> IntArray:
        """The positions of all elements of the samples, `(Σ lengths,)`."""
        lengths = self.shapes[:, 0]
        shifts = self.starts - (lengths.cumsum() - lengths)
        return np.arange(int(lengths.sum())) + np.repeat(shifts, lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the offsets."""
        return 0 if self.offsets is None else self.offsets.nbytes

    def map(self, function: Callable[[Tensor], Tensor]) -> JoinedLayout:
        """See `Layout.map`."""
        mapped = None if self.offsets is None else function(self.offsets)
        return self if mapped is self.offsets else replace(self, offsets=mapped)

    def samples(self, field: Tensor) -> list[Tensor]:
        """See `Layout.samples`."""
        flat = field[0] if self.rule.in_row else field
        places = zip(self.starts.tolist(), self.shapes[:, 0].tolist(), strict=True)
        return [flat[start : start + length] for start, length in places]

    def part(self, start: int, stop: int) -> tuple[Any, JoinedLayout]:
        """See `Layout.part`; the index is without the padding up to a multiple of the total."""
        rule = self.rule._replace(total=None)
        device = torch.device("cpu") if self.offsets is None else self.offsets.device
        layout = JoinedLayout.of(self.shapes[start:stop], rule, device)
        first = int(self.starts[start])
        own = slice(first, first + int(_rounded_up(layout.shapes, rule.multiple).sum()))
        return (slice(None), own) if rule.in_row else own, layout

    def filled(self, part: Tensor, value: int) -> Tensor:
        """The tensor of a part, padded to the layout's total."""
        axis = int(self.rule.in_row)
        missing = self.total - part.shape[axis]
        if not missing:
            return part
        return pad_tensor(part, (0, 0) * (part.ndim - axis - 1) + (0, missing), value=value)

    def fits(self, field: Tensor) -> bool:
        """See `Layout.fits`."""
        shape = (1, self.total) if self.rule.in_row else (self.total,)
        return field.shape[: len(shape)] == shape


def _with_padding(lengths: list[int], bounds: list[int]) -> list[int]:
    """The bounds of samples and of padding, from those of the samples' rooms."""
    found = [0]
    longest = max(*lengths, 1)
    for length, (start, stop) in zip(lengths, pairwise(bounds), strict=True):
        found.append(start + length)
        found += range(found[-1] + longest, stop, longest)
        found += [stop] if found[-1] < stop else []
    return found


def _rounded_up(lengths: Any, multiple: int) -> Any:
    return lengths if multiple == 1 else -(-lengths // multiple) * multiple


def join(
    column: Column, rule: RowRule, value: int, layouts: dict[Any, JoinedLayout]
) -> tuple[Tensor, JoinedLayout]:
    """Write all samples into one tensor, one after the other: `(total, …)` or `(1, total, …)`.

    Args:
        column: one field of a batch.
        rule: how to join it.
        value: of positions that are padding.
        layouts: of the batch's fields so far, to which the field's is added: fields of equal
            lengths share their layout.

    Raises:
        CollateError: samples differ in an axis after the first, or see `JoinedLayout.of`.
    """
    shapes = column.shapes
    if shapes.shape[1] > 1 and (shapes[:, 1:] != shapes[0, 1:]).any():
        column.field.fail_at_odd_one(
            [tuple(shape[1:]) for shape in shapes.tolist()],
            "equal axes {} after the joined first one".format,
        )
    lengths = shapes[:, :1]
    key = (lengths.tobytes(), column.device, rule)
    layout = layouts.get(key)
    if layout is None:
        layout = layouts[key] = JoinedLayout.of(lengths, rule, column.device)
    out = new_tensor((layout.total, *shapes[0, 1:].tolist()), column.dtype, column.device)
    if layout.num_elements == layout.total:
        column.join(out)
    else:
        _check_fits(column, value)
        out.fill_(value)
        if rule.multiple == 1:
            column.join(out[: layout.num_elements])
        else:
            out[torch.from_numpy(layout.own).to(out.device)] = column.join()
    return out[None] if rule.in_row else out, layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedLayout(Layout):
    """The positions of n samples in a padded tensor of d axes after the batch's.

    Attributes:
        starts: the position of each sample's first element on each axis, `(n, d)`.
        padded_shape: the shape that all samples are padded to, `(d,)`.
        multiples: the padded shape is a multiple of it on each axis, `(d,)`.
        length_axes: the axes, of d, of lengths and masks.
    """

    starts: IntArray
    padded_shape: tuple[int, ...]
    multiples: tuple[int, ...]
    length_axes: tuple[int, ...]

    @property
    def lengths(self) -> IntArray:
        """See `Layout.lengths`."""
        return self.shapes[:, list(self.length_axes)]

    @property
    def ragged_axes(self) -> int:
        """See `Layout.ragged_axes`."""
        return len(self.length_axes)

    def place(self, i: int) -> tuple[int | slice, ...]:
        """The index of sample `i` in the field's tensor."""
        starts, shape = self.starts[i].tolist(), self.shapes[i].tolist()
        return i, *(slice(a, a + s) for a, s in zip(starts, shape, strict=True))

    def samples(self, field: Tensor) -> list[Tensor]:
        """See `Layout.samples`."""
        return [field[self.place(i)] for i in range(len(self.shapes))]

    def fits(self, field: Tensor) -> bool:
        """See `Layout.fits`."""
        return field.shape[: 1 + len(self.padded_shape)] == (len(self.shapes), *self.padded_shape)

    def part(self, start: int, stop: int) -> tuple[tuple[slice, ...], PaddedLayout]:
        """See `Layout.part`: the smallest window of the padded shape that contains the samples.

        A batch is split to save memory: hence trimmed to its own longest sample, whose size is
        rounded up to the multiples.
        """
        shapes, starts = self.shapes[start:stop], self.starts[start:stop]
        first = starts.min(axis=0)
        size = (starts + shapes).max(axis=0) - first
        size = -(-size // self.multiples) * self.multiples
        first = np.minimum(first, self.padded_shape - size)
        layout = replace(
            self,
            shapes=shapes,
            starts=starts - first,
            padded_shape=tuple(size.tolist()),
        )
        window = zip(first.tolist(), layout.padded_shape, strict=True)
        return (slice(start, stop), *(slice(a, a + s) for a, s in window)), layout

    def of_mask(self) -> PaddedLayout:
        """The layout of the mask, which has only the length axes."""
        axes = list(self.length_axes)
        return PaddedLayout(
            shapes=self.shapes[:, axes],
            starts=self.starts[:, axes],
            padded_shape=tuple(self.padded_shape[a] for a in axes),
            multiples=tuple(self.multiples[a] for a in axes),
            length_axes=tuple(range(len(axes))),
        )

    def mask(self, device: torch.device) -> Tensor:
        """False where an element is padding along a length axis: bool, `(n, L, …)`."""
        n, k = len(self.shapes), len(self.length_axes)
        mask = torch.ones((n,) + (1,) * k, dtype=torch.bool, device=device)
        for place, axis in enumerate(self.length_axes):
            edges = np.stack([self.starts[:, axis], self.starts[:, axis] + self.shapes[:, axis]])
            early = may_return_early(device)
            first, last = torch.from_numpy(edges[..., None]).to(device, non_blocking=early)
            positions = torch.arange(self.padded_shape[axis], device=device)
            own = (positions >= first) & (positions < last)
            mask = mask & own.view(n, *(1,) * place, -1, *(1,) * (k - place - 1))
        return mask


class PaddingRule(NamedTuple):
    """How a field of d axes is padded.

    Attributes:
        value: the padding value, or a function from a sample's value to it.
        left_share: the share of the padding, in [0, 1], before a sample.
        multiples: the padded shape is rounded up to a multiple of it on each axis, `(d,)`.
        length_axes: the axes of lengths and masks.
    """

    value: PaddingValue
    left_share: float
    multiples: tuple[int, ...]
    length_axes: tuple[int, ...]


class Placement:
    """The layout of samples of given shapes, `(n, d)`, and how to write them fast."""

    def __init__(self, shapes: IntArray, rule: PaddingRule) -> None:
        _, left_share, multiples, length_axes = rule
        # Plain ints: for the few samples of a batch they are faster than NumPy's reductions.
        axes = list(zip(*shapes.tolist(), strict=True))
        shortest = tuple(map(min, axes))
        padded = tuple(-(-max(a) // m) * m for a, m in zip(axes, multiples, strict=True))
        starts = np.zeros(shapes.shape, dtype=np.int64)
        if left_share:
            starts = np.floor((padded - shapes) * left_share).astype(np.int64)
        self._left_share = left_share
        self.layout = PaddedLayout(
            shapes=shapes,
            starts=starts,
            padded_shape=padded,
            multiples=multiples,
            length_axes=length_axes,
        )
        self.has_padding = shortest != padded
        self.pads_first_axis_only = shortest[1:] == padded[1:]
        self.num_elements = sum(axes[0]) * math.prod(padded[1:])  # if only the first axis is padded

    @cached_property
    def own(self) -> BoolArray:
        """False where axis 0 is padding: bool, `(n, L)`."""
        layout = self.layout
        # A comparison of fewer bytes is faster. No axis is longer than 2³¹.
        dtype = np.dtype(np.int16 if layout.padded_shape[0] < 2**15 else np.int32)
        positions = np.arange(layout.padded_shape[0], dtype=dtype)
        lengths = layout.shapes[:, :1].astype(dtype)
        if not self._left_share:
            return positions < lengths
        starts = layout.starts[:, :1].astype(dtype)
        return (positions >= starts) & (positions < starts + lengths)


def pad(
    column: Column, rule: PaddingRule, placements: dict[Any, Placement]
) -> tuple[Tensor, PaddedLayout]:
    """Write all samples into one tensor, `(n, *padded_shape)`.

    Args:
        column: one field of a batch, of d ≥ 1 axes.
        rule: how to pad it.
        placements: of the batch's fields so far, to which the field's is added: fields of equal
            shapes, such as a text's ids and its attention mask, share their placement.

    Raises:
        CollateError: the padding value does not fit the dtype, or its function failed.
    """
    value = rule.value
    if not callable(value):
        _check_fits(column, value)
    # Arrays of shape (2, 1) and (1, 2) may have the same bytes; the rule's d multiples differ.
    key = (column.shapes.tobytes(), *rule[1:])
    placement = placements.get(key)
    if placement is None:
        placement = placements[key] = Placement(column.shapes, rule)
    layout = placement.layout
    n = len(layout.shapes)
    out = new_tensor((n, *layout.padded_shape), column.dtype, column.device)
    if not out.numel():
        return out, layout
    if not placement.has_padding:
        column.join(out.flatten(0, 1))
        return out, layout
    if callable(value):
        _fill_each(out, column, value, placement)
    else:
        out.fill_(value)
    short = placement.num_elements * out.itemsize <= n * _SCATTER_SAMPLE_BYTES
    if placement.pads_first_axis_only and short and out.is_cpu:
        _as_numpy(out)[placement.own] = _as_numpy(column.join().detach())
        return out, layout
    values = column.each()
    target: Any = out.numpy() if isinstance(values[0], np.ndarray) else out
    for i, sample in enumerate(values):
        target[layout.place(i)] = sample
    return out, layout


def _as_numpy(tensor: Tensor) -> Any:
    """A NumPy view of a CPU tensor; of its bits, if NumPy has no such dtype."""
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16, float8, complex32
        return tensor.view(_BITS[tensor.dtype.itemsize]).numpy()


def _fill_each(
    out: Tensor, column: Column, value: Callable[[Any], Any], placement: Placement
) -> None:
    samples = column.each()
    layout = placement.layout
    is_padded = (layout.shapes < layout.padded_shape).any(axis=1)
    for i in np.flatnonzero(is_padded).tolist():
        sample = samples[i]
        try:
            own = value(sample)
            own = own.item() if isinstance(own, (Tensor, np.ndarray, np.generic)) else own
        except Exception as error:
            raise CollateError(
                f"sample {i} of the batch, {show(column.field.path)}: its padding_value function "
                f"failed on a value of shape {tuple(sample.shape)}: {error}"
            ) from error
        _check_fits(column, own)
        out[i].fill_(own)


def _check_fits(column: Column, value: Any) -> None:
    """Raise a `CollateError` for a value that torch would wrap or round to another one."""
    dtype = column.dtype
    if dtype.is_complex or value == 0:  # 0 fits every dtype
        return
    fits = not isinstance(value, complex)
    if dtype is torch.bool:
        fits = value == 1
    elif fits and dtype.is_floating_point:
        fits = not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    elif fits:
        limits = torch.iinfo(dtype)
        fits = value == value // 1 and limits.min <= value <= limits.max
    if not fits:
        raise CollateError(
            f"{show(column.field.path)}: the padding value {value!r} does not fit {dtype}; convert "
            "the field in the dataset, or give PadCollate padding_value={field: value}"
        )
