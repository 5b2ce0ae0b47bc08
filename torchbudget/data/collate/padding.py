"""The padding of one field: which value where, and the writing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.columns import Column, new_tensor
from torchbudget.data.collate.padded_batch import PaddedLayout
from torchbudget.data.collate.structure import show
from torchbudget.errors import CollateError

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
    elif fits and not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        fits = value == value // 1 and limits.min <= value <= limits.max
    if not fits:
        raise CollateError(
            f"{show(column.path)}: the padding value {value!r} does not fit {dtype}; give this "
            "field one that does with padding_value={field: value}, or convert it in the dataset"
        )
