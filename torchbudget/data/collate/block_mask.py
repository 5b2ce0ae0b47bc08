"""The mask of packed samples for FlexAttention, from where the samples end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.errors import CollateError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BLOCK: Final = 128  # positions in a block, as create_block_mask has it


def block_mask_of(bounds: IntArray, device: torch.device, *, causal: bool) -> BlockMask:
    """The mask in which positions see those of their own segment alone.

    `create_block_mask` evaluates the mask at every pair of positions. The blocks that a row of
    blocks sees are one run, whose ends follow from the segments at the row's own ends: O(blocks²)
    to write them all, since the format is dense in blocks.

    Args:
        bounds: 0 and the end of each segment, in order.
        device: of the mask.
        causal: whether positions see only themselves and earlier ones.

    Raises:
        CollateError: there are no positions.
    """
    # Imported here: with it come the compiler and its caches.
    from torch.nn.attention.flex_attention import BlockMask

    total = int(bounds[-1])
    if not total:
        raise CollateError("a batch without positions has no block mask: all its samples are empty")
    seen, full = _blocks(bounds, causal=causal)
    parts = {"": seen & ~full, "full_": full}
    blocks: dict[str, Any] = {
        f"{kind}{axis}_{name}": part
        for kind, matrix in parts.items()
        for axis, rows in (("kv", matrix), ("q", matrix.T))
        for name, part in _ordered(rows, device).items()
    }
    # Not BlockMask.from_kv_blocks, which takes most of the time to transpose what is known here.
    return BlockMask(
        seq_lengths=(total, total),
        BLOCK_SIZE=(_BLOCK, _BLOCK),
        mask_mod=_mask_mod(bounds, device, causal=causal),
        **blocks,
    )


def _blocks(bounds: IntArray, *, causal: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Which blocks are seen at all, and which at every pair of positions: bool, rows × columns."""
    starts, ends, total = bounds[:-1], bounds[1:], bounds[-1]
    columns = np.arange(-(-total // _BLOCK))
    first = columns * _BLOCK  # positions of each row
    past = np.minimum(first + _BLOCK, total)
    # The segment of a position is the first that ends after it.
    one, other = (np.searchsorted(ends, at, side="right") for at in (first, past - 1))
    lowest = starts[one] // _BLOCK
    highest = columns if causal else (ends[other] - 1) // _BLOCK
    # Of a full block all positions exist and are of one segment, in the row and in the column.
    from_full = -(-starts[one] // _BLOCK)
    to_full = columns if causal else ends[one] // _BLOCK
    to_full = np.where((one == other) & (past == first + _BLOCK), to_full, 0)
    seen = (columns >= lowest[:, None]) & (columns <= highest[:, None])
    return seen, (columns >= from_full[:, None]) & (columns < to_full[:, None])


def _ordered(blocks: npt.NDArray[Any], device: torch.device) -> dict[str, Tensor]:
    """The number of blocks in each row, `(1, 1, rows)`, and their columns first: int32."""
    unseen = np.logical_not(blocks, order="C")  # the kernels take contiguous rows
    counts = blocks.sum(axis=1, dtype=np.int32)
    columns = np.argsort(unseen, axis=1, kind="stable").astype(np.int32)
    return {
        name: torch.from_numpy(part)[None, None].to(device)
        for name, part in (("num_blocks", counts), ("indices", columns))
    }


def _mask_mod(
    bounds: IntArray, device: torch.device, *, causal: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask of one pair of positions, which is evaluated where a block is not full."""
    lengths = np.diff(bounds)
    segments = torch.from_numpy(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
    segment = segments.to(device)

    def same_segment(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return segment[query] == segment[key]

    def earlier_in_segment(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return same_segment(batch, head, query, key) & (query >= key)

    return earlier_in_segment if causal else same_segment
