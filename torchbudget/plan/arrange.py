"""Putting the samples of a window in the order in which they are cut."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchbudget.cost.models.protocol import IntArray

# Keys of a row from which a radix sort is the faster one: at 4,096 it takes 4 ns a key instead of
# 16, at 64 it takes 7 instead of 2 (AMD EPYC, NumPy 2.4).
_RADIX: Final = 512


def ascending(keys: npt.NDArray[np.integer[Any]]) -> IntArray:
    """A stable argsort of each row of non-negative keys, shape `(rows, S)`.

    Keys below 2¹⁶ are sorted by NumPy's radix sort, whose tables pay off where rows are not short.
    Otherwise key and position are sorted as one number, which NumPy's vectorised sort does several
    times as fast as an argsort, and in half the width where that holds both.
    """
    length = keys.shape[1]
    bits = max(length - 1, 1).bit_length()
    largest = int(keys.max(initial=0))
    if largest < 2**16 and length >= _RADIX:
        return np.argsort(keys.astype(np.uint16, copy=False), axis=1, kind="stable")
    if largest >= 2 ** (63 - bits):
        return np.argsort(keys, axis=1, kind="stable")
    width = np.uint32 if largest < 2 ** (32 - bits) else np.uint64
    joined = keys.astype(width)
    np.left_shift(joined, width(bits), out=joined)
    np.bitwise_or(joined, np.arange(length, dtype=width), out=joined)
    joined.sort(axis=1)
    np.bitwise_and(joined, width(2**bits - 1), out=joined)
    return joined.astype(np.int64)


def arrange(sizes: npt.NDArray[Any], strips: int) -> IntArray:
    """The order in which a window's samples are cut, so that neighbours are alike.

    One axis: by size, descending; samples of one size stay in their order.

    Several axes: by strips, as Leutenegger's sort-tile-recursive packing of R-trees does ("STR: a
    simple and efficient algorithm for R-tree packing", 1997). The samples are sorted by the first
    axis and cut into `strips` equal strips; each strip is arranged by the remaining axes, every
    second one backwards, so that neighbours across a strip's border are alike too.

    Args:
        sizes: shape `(windows, S)` or `(windows, S, d)`, non-negative.
        strips: for several axes, how many strips an axis is cut into.

    Returns:
        Positions within the window, shape `(windows, S)`. O(windows·S·d·log S).
    """
    if sizes.ndim == 2:
        return ascending(sizes.max(initial=0) - sizes)
    windows, length, axes = sizes.shape
    order = ascending(sizes[..., 0].max(initial=0) - sizes[..., 0])
    for axis in range(1, axes):
        lengths = sizes[..., axis]
        span = int(lengths.max(initial=0)) + 1
        # The rank within the window decides the strip: strips are equal in number of samples, and
        # a tile of an outer axis is split into strips of its own.
        each = math.ceil(length / strips**axis)
        # Half the width is half the memory that passes through the caches.
        width = np.min_scalar_type(-(-length // each) * span).type
        tile = np.empty((windows, length), width)
        np.put_along_axis(tile, order, (np.arange(length) // each)[None].astype(width), 1)
        keys = lengths.astype(width)
        np.subtract(width(span - 1), keys, out=keys, where=tile % 2 == 0)
        tile *= width(span)
        tile += keys
        order = ascending(tile)
    return order
