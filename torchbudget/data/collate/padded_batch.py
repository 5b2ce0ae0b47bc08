"""A batch of samples that are padded to one shape, and where each of them is in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.batch import Batch, MappingView, SequenceView
from torchbudget.data.collate.structure import fields_of


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

    @property
    def nbytes(self) -> int:
        """None: it has no tensors."""
        return 0

    def map(self, function: Callable[[Tensor], Tensor]) -> PaddedLayout:  # noqa: ARG002
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
            first, last = torch.from_numpy(edges[..., None]).to(device, non_blocking=True)
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

    @property
    def mask(self) -> Tensor:
        """False where the length field is padding.

        Bool, `(n, L)`, or `(n, L₁, …, Lₖ)` for k ragged axes, on the length field's device.
        Computed at each access, so that a batch does not keep it in memory.
        """
        layout: PaddedLayout = self._length_layout
        return layout.mask(fields_of(self.data)[self._length_field].device)


class PaddedMapping(PaddedBatch, MappingView):
    """A padded batch of dict samples."""


class PaddedSequence(PaddedBatch, SequenceView):
    """A padded batch of tuple samples."""


PADDED_KINDS = (PaddedBatch, PaddedMapping, PaddedSequence)
