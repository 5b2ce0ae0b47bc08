"""A batch of samples that are padded to one shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from torchbudget.data.collate.batch import Batch, MappingView, SequenceView
from torchbudget.data.collate.padding import PaddedLayout
from torchbudget.data.collate.structure import fields_of, put_together

PaddedT = TypeVar("PaddedT", bound="PaddedBatch")


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

    def samples(self) -> list[Any]:
        """The n samples without their padding, their fields as views of the batch.

        Arrays, lists and numbers come back as tensors. The samples can be collated again, also by
        another collate: `PackCollate()(padded_batch.samples())`.
        """
        fields = fields_of(self.data)
        return [
            put_together(
                self.data,
                (
                    value[i] if layout is None else value[(i, *layout.slices(i))]
                    for value, layout in zip(fields, self._layouts, strict=True)
                ),
            )
            for i in range(self.num_samples)
        ]

    def _part(self: PaddedT, start: int, stop: int) -> PaddedT:
        # Trimmed to its own longest sample, rounded up to the same size_multiple, since a batch is
        # split to save memory. A field without anything to trim stays a view; a trimmed one is
        # copied, since some models need contiguous input.
        values: list[Any] = []
        layouts: list[PaddedLayout | None] = []
        for value, layout in zip(fields_of(self.data), self._layouts, strict=True):
            if layout is None:
                values.append(value[start:stop])
                layouts.append(None)
                continue
            window, trimmed = layout.trim(start, stop)
            values.append(value[(slice(start, stop), *window)].contiguous())
            layouts.append(trimmed)
        return replace(
            self,
            data=put_together(self.data, iter(values)),
            num_samples=stop - start,
            _layouts=tuple(layouts),
        )


class PaddedMapping(PaddedBatch, MappingView):
    """A padded batch of dict samples."""


class PaddedSequence(PaddedBatch, SequenceView):
    """A padded batch of tuple samples."""


PADDED_KINDS = (PaddedBatch, PaddedMapping, PaddedSequence)
