"""A batch of samples padded to one shape, where each is in it, and the padding of a field."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import gt, le
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.batch import Batch
from torchbudget.data.collate.columns import Column, new_tensor
from torchbudget.data.collate.structure import show
from torchbudget.data.collate.views import MappingView, SequenceView
from torchbudget.errors import CollateError
from torchbudget.machine.cuda import may_return_early


class PaddedLayout(NamedTuple):
    """The positions of n samples in a padded tensor of d axes after the batch's.

    Attributes:
        shapes: each sample's own shape, `(n, d)`.
        starts: the position of its first element on each axis, `(n, d)`.
        padded_shape: the shape that all samples are padded to, `(d,)`.
        multiples: the padded shape is a multiple of it on each axis, `(d,)`.
        length_axes: the axes, of d, of lengths and masks.
    """

    shapes: IntArray
    starts: IntArray
    padded_shape: tuple[int, ...]
    multiples: tuple[int, ...]
    length_axes: tuple[int, ...]

    @property
    def lengths(self) -> IntArray:
        """The lengths on the length axes, `(n, k)`."""
        return self.shapes[:, list(self.length_axes)]

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

    @property
    def most(self) -> int:
        """See `Layout.most`."""
        return max(self.padded_shape, default=0)

    @property
    def nbytes(self) -> int:
        """None: it has no tensors."""
        return 0

    def map(self, function: Callable[[Tensor], Tensor]) -> PaddedLayout:
        """See `nbytes`."""
        return self

    def part(self, start: int, stop: int) -> tuple[tuple[slice, ...], PaddedLayout]:
        """See `Layout.part`: the smallest window of the padded shape that contains the samples.

        A batch is split to save memory: hence trimmed to its own longest sample, whose size is
        rounded up to the multiples.
        """
        shapes, starts = self.shapes[start:stop], self.starts[start:stop]
        # The position of a sample without elements does not matter: it does not widen the window.
        full = (shapes > 0).all(axis=1, keepdims=True)
        old = np.asarray(self.padded_shape, dtype=np.int64)
        first = np.where(full, starts, old).min(axis=0)
        last = np.where(full, starts + shapes, 0).max(axis=0)
        first = np.minimum(first, last)
        # But it may be the longest sample on another axis than its empty one.
        size = np.maximum(last - first, shapes.max(axis=0))
        size = -(-size // self.multiples) * self.multiples
        first = np.minimum(first, old - size)
        layout = PaddedLayout(
            shapes=shapes,
            starts=np.clip(starts - first, 0, size - shapes),
            padded_shape=tuple(size.tolist()),
            multiples=self.multiples,
            length_axes=self.length_axes,
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


class PaddedBatch(Batch):
    """n samples, each field padded to one shape: tensors `(n, L, …)`.

    Made by `PadCollate`.

    >>> batch = PadCollate()([{"ids": [1, 2, 3], "label": 0}, {"ids": [4], "label": 1}])
    >>> batch["ids"]
    tensor([[1, 2, 3],
            [4, 0, 0]])
    >>> batch.lengths, batch.num_tokens, batch.padded_size
    (tensor([3, 1]), 4, (3,))
    >>> batch.split(2)[1]["ids"]
    tensor([[4]])
    """

    @property
    def padded_size(self) -> tuple[int, ...]:
        """The padded lengths of the length field's ragged axes."""
        layout: PaddedLayout = self._length_layout
        return tuple(layout.padded_shape[axis] for axis in layout.length_axes)

    def more_than_planned(
        self, planned: Sequence[int], size_multiple: int
    ) -> tuple[list[int], list[int]] | None:
        """The padded size, and the one that was planned, if that is less; else `None`.

        The lengths may be those of another field than the sizes: what the longest samples are if
        rounded up to `size_multiple` is never too much. Nor is anything of a batch that was rebuilt
        from its fields, which no longer knows its samples.

        Args:
            planned: for each axis; empty: as long as the longest samples.
            size_multiple: that was planned with.
        """
        known = self._arrangement
        layout = None if known is None else known.layouts[known.length_field]
        if layout is None:  # rebuilt, or texts alone
            return None
        came = list(self.padded_size)
        if planned and (len(came) != len(planned) or all(map(le, came, planned))):
            return None
        longest = layout.lengths.max(axis=0, initial=0).tolist()
        rounded = [-(-length // size_multiple) * size_multiple for length in longest]
        allowed = list(map(max, rounded, planned)) if planned else rounded
        return (came, list(planned) or rounded) if any(map(gt, came, allowed)) else None

    def axes_elsewhere(self, planned: Sequence[int]) -> list[int]:
        """The axes that are as long as planned, where none of those of its lengths is; else none.

        Args:
            planned: as in `more_than_planned`.
        """
        known = self._arrangement
        layout: Any = None if known is None else known.layouts[known.length_field]
        if layout is None or not planned or not set(planned).isdisjoint(self.padded_size):
            return []
        axes: list[int] = []
        for length in planned:
            alike = (a for a, one in enumerate(layout.padded_shape) if one == length)
            axes += [axis for axis in alike if axis not in axes][:1]
        return axes if len(axes) == len(planned) else []

    @property
    def mask(self) -> Tensor:
        """False where the length field is padding.

        Bool, `(n, L)`, or `(n, L₁, …, Lₖ)` for k ragged axes, on the length field's device.
        Computed at each access, so that a batch does not keep it in memory.
        """
        layout: PaddedLayout = self._length_layout
        return layout.mask(self._fields[self._known.length_field].device)


class PaddedMapping(PaddedBatch, MappingView):
    """A padded batch of dict samples."""


class PaddedSequence(PaddedBatch, SequenceView):
    """A padded batch of tuple samples."""


PADDED_KINDS = (PaddedBatch, PaddedMapping, PaddedSequence)


Number: TypeAlias = complex  # by PEP 484: int, float and bool too
PaddingValue: TypeAlias = Number | Callable[[Any], Any]

# Up to this size it is faster to concatenate all samples and to scatter them at once than to write
# sample by sample; for larger ones the second copy costs more than the loop. Measured.
_SCATTER_SAMPLE_BYTES = 16 * 1024
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


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
        longest, shortest = list(map(max, axes)), tuple(map(min, axes))
        padded = tuple(-(-a // m) * m for a, m in zip(longest, multiples, strict=True))
        starts = np.zeros(shapes.shape, dtype=np.int64)
        if left_share:
            starts = np.floor((padded - shapes) * left_share).astype(np.int64)
        self._left_share = left_share
        self.layout = PaddedLayout(shapes, starts, padded, multiples, length_axes)
        self.has_padding = shortest != padded
        self.pads_first_axis_only = shortest[1:] == padded[1:]
        # Elements without padding, if only the first axis is padded.
        self.num_elements = sum(axes[0]) * math.prod(padded[1:]) if axes else len(shapes)

    @cached_property
    def own(self) -> npt.NDArray[np.bool_]:
        """False where axis 0 is padding: bool, `(n, L)`."""
        layout = self.layout
        # A comparison of fewer bytes is faster. No axis is longer than 2³¹.
        short = layout.padded_shape[0] < 2**15
        dtype: np.dtype[np.signedinteger[Any]] = np.dtype(np.int16 if short else np.int32)
        positions = np.arange(layout.padded_shape[0], dtype=dtype)
        lengths = layout.shapes[:, :1].astype(dtype)
        if not self._left_share:
            return positions < lengths
        starts = layout.starts[:, :1].astype(dtype)
        return (positions >= starts) & (positions < starts + lengths)


def pad(
    column: Column, rule: PaddingRule, placements: dict[Any, Placement]
) -> tuple[Tensor, PaddedLayout]:
    """One tensor `(n, *padded_shape)` of all samples, and the position of each in it.

    Args:
        column: one field of a batch.
        rule: how to pad it.
        placements: those of the batch's fields so far, to which this one's is added: fields of
            equal shapes, such as a text's ids and its attention mask, share their placement.

    Raises:
        CollateError: the padding value does not fit the dtype, or its function failed.
    """
    value = rule.value
    if not callable(value) and value != 0:  # 0 fits every dtype
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
        with torch.no_grad():  # torch.cat(out=…) refuses samples that require grad
            column.join(out if out.ndim == 1 else out.flatten(0, 1))
        return out, layout
    if callable(value):
        _fill_each(out, column, value, placement)
    else:
        out.fill_(value)
    short = placement.num_elements * out.itemsize <= n * _SCATTER_SAMPLE_BYTES
    if placement.pads_first_axis_only and short and out.is_cpu:
        _as_numpy(out)[placement.own] = _as_numpy(column.join().detach())
    else:
        _write_each(out, column, layout)
    return out, layout


@torch.no_grad()
def _write_each(out: Tensor, column: Column, layout: PaddedLayout) -> None:
    values = column.each()
    target: Any = out.numpy() if isinstance(values[0], np.ndarray) else out
    for i, sample in enumerate(values):
        target[layout.place(i)] = sample


def _as_numpy(tensor: Tensor) -> npt.NDArray[Any]:
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
                f"sample {i} of the batch, {show(column.path)}: its padding_value function "
                f"failed on a value of shape {tuple(sample.shape)}: {error}"
            ) from error
        _check_fits(column, own)
        out[i].fill_(own)


def _check_fits(column: Column, value: Any) -> None:
    """Raise a `CollateError` for a value that torch would wrap or round to another one."""
    dtype = column.dtype
    if column.shapes.shape[1] == 0 or dtype.is_complex:
        return
    fits = not isinstance(value, complex)
    if dtype is torch.bool:
        fits = value in (0, 1)
    elif fits and dtype.is_floating_point:
        fits = not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    elif fits:
        limits = torch.iinfo(dtype)
        fits = value == value // 1 and limits.min <= value <= limits.max
    if not fits:
        raise CollateError(
            f"{show(column.path)}: the padding value {value!r} does not fit {dtype}; give this "
            "field one that does with padding_value={field: value}, or convert it in the dataset"
        )
