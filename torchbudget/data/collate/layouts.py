"""Tensors of one field of a batch, and the places of the samples in them.

A field is padded, joined or stacked: each way has a function that writes a column of samples into
one tensor, and a layout that finds the samples in the tensor again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from torchbudget.cost.protocol import IntArray
from torchbudget.data.collate.columns import (
    MISSING,
    BoolArray,
    Column,
    FieldPath,
    new_tensor,
    show,
)
from torchbudget.errors import CollateError
from torchbudget.machine.device import may_return_early

PaddingValue: TypeAlias = float | Callable[[Any], Any]

ATTENTION_MASK: Final = "attention_mask"
LABELS: Final = "labels"
IGNORED_LABEL: Final = -100  # torch.nn.functional.cross_entropy ignores it
SIGNED: Final = (torch.int8, torch.int16, torch.int32, torch.int64)
POSITION_AXES: Final = 3  # of models for text with images: time, height and width
# By convention; attention ignores positions that are masked with 0.
OWN_PADDING: Final[dict[Any, int]] = {LABELS: IGNORED_LABEL, ATTENTION_MASK: 0}
# Of 32 int64 samples of up to 4,096 elements, one write of all takes 133 µs and one for each 155;
# of up to 8,192, 234 and 192.
_FEW_ELEMENTS: Final = 4096


def own_padding(data: Any, path: FieldPath, padding: Mapping[Any, int] = OWN_PADDING) -> int | None:
    """The padding value of a field by its name, else by the name of an outer field, or `None`.

    Args:
        data: data of a batch, or its structure, in which fields of named tuples have names.
        path: path of the field.
        padding: values by name.

    >>> own_padding({"labels": {"tags": None}}, ("labels", "tags"))
    -100
    """
    found = None
    for key in path:
        name = data._fields[key] if hasattr(data, "_fields") else key
        found, data = padding.get(name, found), data[key]
    return found


def on_device(values: Any, device: torch.device) -> Tensor:
    """A tensor of a NumPy array, without waiting for the device."""
    return torch.from_numpy(values).to(device, non_blocking=may_return_early(device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """The places of n samples in a field of a batch.

    Of itself, a stacked field, with one row for each sample that has it; or a list, with one value
    for every sample.

    Attributes:
        shapes: the lengths of each sample on all axes in which samples may differ, `(n, d)`.
        length_axes: the ragged ones of these axes.
        shape: shape of the field's first axes, which are those of the samples; `()` of a list.
        present: False for samples without the field, `(n,)`; `None`: all have it.
    """

    shapes: IntArray
    length_axes: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    present: BoolArray | None = None

    @property
    def lengths(self) -> IntArray:
        """The lengths of each sample on its ragged axes, `(n, k)`."""
        return self.shapes[:, list(self.length_axes)]

    @property
    def places(self) -> list[Any]:
        """The index of each sample in the field."""
        return [self._rows(i) for i in range(len(self.shapes))]

    def part(self, start: int, stop: int) -> tuple[Any, Layout]:
        """The index of samples `start` to `stop` in the field, and their layout in the result."""
        first, last = self._rows(start), self._rows(stop)
        shape = (last - first,) if self.shape else ()
        return slice(first, last), replace(self, shapes=self.shapes[start:stop], shape=shape)

    def samples(self, field: Any) -> list[Any]:
        """The n samples, as views of the field; `MISSING` for samples without the field."""
        has = np.ones(len(self.shapes), np.bool_) if self.present is None else self.present
        pairs = zip(self.places, has.tolist(), strict=True)
        return [field[place] if is_present else MISSING for place, is_present in pairs]

    def fits(self, field: Any) -> bool:
        """Whether the samples can be in this field; it may have more axes, after theirs."""
        is_same = isinstance(field, Tensor) and field.shape[: len(self.shape)] == self.shape
        return is_same or not self.shape

    def _rows(self, stop: int) -> int:
        """The number of rows of the samples before `stop`."""
        if self.present is None or not self.shape:
            return stop
        return int(np.count_nonzero(self.present[:stop]))


def stack(column: Column) -> tuple[Tensor, Layout]:
    """Write all samples into one tensor, `(n, …)`, one row each.

    Raises:
        CollateError: their shapes differ.
    """
    shapes, present = column.shapes, column.field.present
    if (shapes != shapes[0]).any():
        column.field.fail_at_odd_one(
            [f"the fixed shape {(*shape,)} of a stacked field" for shape in shapes.tolist()]
        )
    out = new_tensor((len(shapes), *shapes[0].tolist()), column.dtype, column.device)
    if out.numel():
        column.join(out if out.ndim == 1 else out.flatten(0, 1))
    n = len(shapes) if present is None else len(present)
    return out, Layout(shapes=np.empty((n, 0), np.int64), shape=(len(shapes),))


class RowRule(NamedTuple):
    """How samples are joined.

    Attributes:
        multiple: each sample gets room that is a multiple of it.
        total_multiple: the length of the joined tensor is rounded up to a multiple of it.
        segments: of samples and of padding, in each batch; `None`: as many as there are.
        in_row: whether the tensor is one row, `(1, total, …)`, and not `(total, …)`.
        first_position: the position of each sample's first element, for the model of a row.
        of_axes: whether the tensor is of positions along axes, `(1 + axes, 1, total)`; see
            `join_positions`.
    """

    multiple: int = 1
    total_multiple: int = 1
    segments: int | None = None
    in_row: bool = False
    first_position: int = 0
    of_axes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JoinedLayout(Layout):
    """Samples one after the other, `(n, 1)` lengths.

    Attributes:
        rule: how they were joined.
    """

    rule: RowRule

    @classmethod
    def of(cls, lengths: IntArray, rule: RowRule) -> JoinedLayout:
        """The layout of samples of these lengths, `(n, 1)`.

        Raises:
            CollateError: the samples have more positions than int32 can count, or they and their
                padding are more segments than the rule has.
        """
        total = int(_rounded_up(_rounded_up(lengths, rule.multiple).sum(), rule.total_multiple))
        if total >= 2**31:
            raise CollateError(
                f"{total} positions are more than the offsets, of torch.int32, can count; make "
                "smaller batches"
            )
        if rule.segments is not None and len(lengths) + (total > lengths.sum()) > rule.segments:
            raise CollateError(
                f"{len(lengths)} samples in {lengths.sum()} of {total} positions exceed "
                f"segments={rule.segments}: state max_batch_size of the sampler or stream, and one "
                "more as segments= of PackCollate"
            )
        shape = (1, total) if rule.in_row else (total,)
        shape = (1 + POSITION_AXES, *shape) if rule.of_axes else shape
        return cls(shapes=lengths, length_axes=(0,), shape=shape, rule=rule)

    @property
    def starts(self) -> IntArray:
        """The position of each sample's first element, and the end of the last room, `(n + 1,)`."""
        rooms = _rounded_up(self.shapes[:, 0], self.rule.multiple)
        return np.cumsum([0, *rooms.tolist()])

    @property
    def bounds(self) -> IntArray:
        """0 and the end of each segment: a sample, or padding, `(segments + 1,)`.

        Padding is in segments of its own, none longer than the longest sample: so it costs no more
        than samples of its size do, and its positions are ones that the model has. Of a given
        number of segments those without a sample share the padding.
        """
        lengths = self.shapes[:, 0].tolist()
        if self.rule.segments is not None:
            ends = np.cumsum([0, *lengths])
            free = np.arange(self.rule.segments - len(lengths)) + 1
            rest = (self.shape[-1] - ends[-1]) * free // max(len(free), 1)
            return np.append(ends, ends[-1] + rest)
        found, longest = [0], max(*lengths, 1)
        edges = pairwise([*self.starts[:-1].tolist(), self.shape[-1]])
        for length, (start, stop) in zip(lengths, edges, strict=True):
            found.append(start + length)
            found += range(found[-1] + longest, stop, longest)
            found += [stop] if found[-1] < stop else []
        return np.array(found)

    @property
    def places(self) -> list[Any]:
        """See `Layout.places`."""
        starts = self.starts[:-1]
        positions = map(slice, starts.tolist(), (starts + self.shapes[:, 0]).tolist())
        before = (slice(1, None), 0) if self.rule.of_axes else (0,)
        return [(*before, own) if self.rule.in_row else own for own in positions]

    def part(self, start: int, stop: int) -> tuple[Any, JoinedLayout]:
        """See `Layout.part`; the index is without the padding up to a multiple of the total."""
        own = slice(*self.starts[[start, stop]].tolist())
        index = (slice(None),) * (len(self.shape) - 1) + (own,)
        return index, JoinedLayout.of(self.shapes[start:stop], self.rule)

    def filled(self, part: Tensor, value: int) -> Tensor:
        """The tensor of a part, padded to the layout's total."""
        axis = len(self.shape) - 1
        missing = self.shape[-1] - part.shape[axis]
        if not missing:
            return part
        return pad_tensor(part, (0, 0) * (part.ndim - axis - 1) + (0, missing), value=value)


def _rounded_up(lengths: Any, multiple: int) -> Any:
    return lengths if multiple == 1 else -(-lengths // multiple) * multiple


def join(
    column: Column, rule: RowRule, value: int, shared: dict[Any, Any]
) -> tuple[Tensor, JoinedLayout]:
    """Write all samples into one tensor, one after the other: `(total, …)` or `(1, total, …)`.

    Args:
        column: one field of a batch.
        rule: how to join it.
        value: value of positions that are padding.
        shared: the layouts of the batch's fields so far, to which the field's is added: fields of
            equal lengths share it.

    Raises:
        CollateError: samples differ in an axis after the first, or see `JoinedLayout.of`.
    """
    shapes = column.shapes
    if shapes.shape[1] > 1 and (shapes[:, 1:] != shapes[0, 1:]).any():
        column.field.fail_at_odd_one(
            [f"equal axes {(*axes,)} after the joined first one" for _, *axes in shapes.tolist()]
        )
    lengths = shapes[:, :1]
    key = (lengths.tobytes(), rule)
    if key not in shared:
        shared[key] = JoinedLayout.of(lengths, rule)
    layout = shared[key]
    out = new_tensor((*layout.shape, *shapes[0, 1:].tolist()), column.dtype, column.device)
    num_elements = int(lengths.sum())
    if layout.shape[-1] > num_elements:
        _check_fits(column, value)
        out.fill_(value)
    if rule.multiple == 1:
        column.join((out[0] if rule.in_row else out)[:num_elements])
    else:
        column.write(out, layout.places)
    return out, layout


def join_positions(column: Column, rule: RowRule) -> tuple[Tensor, JoinedLayout]:
    """Write positions along three axes, `(3, L)` of each sample, into rows, `(4, 1, total)`.

    The first of the four rows is for the positions in the text, which the caller makes.

    Raises:
        CollateError: a sample has positions of another shape, or that are no integers.
    """
    shapes = column.shapes
    ours = [len(shape) == 2 and shape[0] == POSITION_AXES for shape in shapes.tolist()]
    if column.dtype not in SIGNED or not all(ours):
        odd = ours.index(False) if False in ours else 0
        column.field.fail(
            odd,
            "integers of shape (3, L), as get_rope_index(…)[0][:, 0] of one sample. A row has "
            "position_ids of shape (4, 1, total): first the positions in each text, which "
            "PackCollate makes, then these three. With (3, 1, total) or (1, total), a model of "
            "three axes of positions lets the samples of a row attend to each other. For models of "
            "one axis leave the field out",
            f"{column.dtype} of shape {tuple(shapes[odd].tolist())}",
        )
    layout = JoinedLayout.of(shapes[:, 1:], rule._replace(of_axes=True))
    out = new_tensor(layout.shape, column.dtype, column.device).zero_()
    column.write(out, layout.places)
    return out, layout


class PaddingRule(NamedTuple):
    """How a field of d axes is padded.

    Attributes:
        left_share: the share of the padding, in [0, 1], before a sample.
        multiple: the padded shape is rounded up to a multiple of it on its length axes.
        length_axes: the axes of lengths and masks.
        length: least padded length on these axes.
    """

    left_share: float = 0.0
    multiple: int = 1
    length_axes: tuple[int, ...] = (0,)
    length: int = 0

    def rounded(self, shape: IntArray) -> IntArray:
        """A shape, rounded up in place."""
        if self.multiple > 1 or self.length:
            axes = list(self.length_axes)
            shape[axes] = np.maximum(_rounded_up(shape[axes], self.multiple), self.length)
        return shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaddedLayout(Layout):
    """The positions of n samples in a padded tensor of d axes after the batch's.

    Attributes:
        starts: the position of each sample's first element on each axis, `(n, d)`.
        rule: how they were padded.
    """

    starts: IntArray
    rule: PaddingRule

    @classmethod
    def of(cls, shapes: IntArray, rule: PaddingRule) -> PaddedLayout:
        """The layout of samples of these shapes, `(n, d)`."""
        padded = rule.rounded(shapes.max(axis=0))
        starts = np.zeros_like(shapes)
        if rule.left_share:
            starts = np.floor((padded - shapes) * rule.left_share).astype(np.int64)
        return cls(
            shapes=shapes,
            length_axes=rule.length_axes,
            shape=(len(shapes), *padded.tolist()),
            starts=starts,
            rule=rule,
        )

    def own(self) -> BoolArray | None:
        """False where axis 0 is padding: bool, `(n, L)`.

        `None` if other axes are padded, or samples are long: then to write each is faster.
        """
        is_short = 0 < math.prod(self.shape[1:]) <= _FEW_ELEMENTS
        if not is_short or (self.shapes[:, 1:] != self.shape[2:]).any():
            return None
        first, last = self.starts[:, :1], self.starts[:, :1] + self.shapes[:, :1]
        positions = np.arange(self.shape[1], dtype=np.int16)  # fewer bytes are faster
        own: BoolArray = positions < last.astype(np.int16)
        return own & (positions >= first.astype(np.int16)) if first.any() else own

    @property
    def places(self) -> list[tuple[int | slice, ...]]:
        """See `Layout.places`."""
        starts, stops = self.starts.tolist(), (self.starts + self.shapes).tolist()
        edges = enumerate(zip(starts, stops, strict=True))
        return [(i, *map(slice, first, last)) for i, (first, last) in edges]

    def part(self, start: int, stop: int) -> tuple[tuple[slice, ...], PaddedLayout]:
        """See `Layout.part`: the smallest window of the padded shape that contains the samples.

        A batch is split to save memory: hence trimmed to its own longest sample, whose size is
        rounded up to the multiples.
        """
        shapes, starts = self.shapes[start:stop], self.starts[start:stop]
        first = starts.min(axis=0)
        rule = self.rule._replace(length=0)
        size = rule.rounded((starts + shapes).max(axis=0) - first)
        first = np.minimum(first, self.shape[1:] - size)
        layout = replace(
            self,
            shapes=shapes,
            shape=(stop - start, *size.tolist()),
            starts=starts - first,
            rule=rule,
        )
        window = map(slice, first.tolist(), (first + size).tolist())
        return (slice(start, stop), *window), layout

    def mask(self, device: torch.device) -> Tensor:
        """False where an element is padding along a length axis: bool, `(n, L, …)`."""
        n, k = len(self.shapes), len(self.length_axes)
        mask = torch.ones((n,) + (1,) * k, dtype=torch.bool, device=device)
        for place, axis in enumerate(self.length_axes):
            # No function of NumPy's: in a trace these arrays are symbolic tensors.
            first = on_device(self.starts[:, axis, None] + 0, device)
            last = first + on_device(self.shapes[:, axis, None] + 0, device)
            positions = torch.arange(self.shape[1 + axis], device=device)
            own = (positions >= first) & (positions < last)
            mask = mask & own.view(n, *(1,) * place, -1, *(1,) * (k - place - 1))
        return mask


def pad(
    column: Column, rule: PaddingRule, value: PaddingValue, shared: dict[Any, Any]
) -> tuple[Tensor, PaddedLayout]:
    """Write all samples into one tensor, `(n, L, …)`.

    Args:
        column: one field of a batch, of d ≥ 1 axes.
        rule: how to pad it.
        value: the padding value, or a function from a sample's value to it.
        shared: see `join`: fields of equal shapes, such as a text's ids and its attention mask,
            share their layout.

    Raises:
        CollateError: the padding value does not fit the dtype, or its function failed.
    """
    shapes = column.shapes
    # Arrays of shape (2, 1) and (1, 2) may have the same bytes.
    key = (shapes.tobytes(), shapes.shape, rule)
    if key not in shared:
        layout = PaddedLayout.of(shapes, rule)
        shared[key] = layout, layout.own()
    layout, own = shared[key]
    out = new_tensor((*layout.shape,), column.dtype, column.device)
    if callable(value):
        _fill_each(out, column, value, layout)
    else:
        _check_fits(column, value)
        out.fill_(value)
    if own is not None and out.is_cpu:
        with suppress(TypeError):  # NumPy has no bfloat16
            out.numpy()[own] = column.join().numpy()
            return out, layout
    column.write(out, layout.places)
    return out, layout


def _fill_each(
    out: Tensor, column: Column, value: Callable[[Any], Any], layout: PaddedLayout
) -> None:
    is_padded = (layout.shapes < layout.shape[1:]).any(axis=1)
    for i in np.flatnonzero(is_padded).tolist():
        sample = column.field.values[i]
        sample = sample if column.field.kind == "array" else torch.as_tensor(sample)
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
    if value == 0 or dtype.is_complex:
        return
    try:
        kept = torch.full((), value, dtype=dtype).item()
    except (RuntimeError, OverflowError, ValueError):
        kept = None
    fits = kept == value or (dtype.is_floating_point and kept not in (None, math.inf, -math.inf))
    if not fits:
        raise CollateError(
            f"{show(column.field.path)}: the padding value {value!r} does not fit {dtype}; convert "
            "the field in the dataset, or give PadCollate padding_value={field: value}"
        )
