"""A batch of jagged nested tensors."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from torchbudget.data.collate.batch import MappingView, SequenceView
from torchbudget.data.collate.segments import SegmentedBatch, Segments
from torchbudget.data.collate.structure import leaves_of, put_together


class JaggedBatch(SegmentedBatch):
    """n samples as `torch.nested` tensors of layout `torch.jagged`: `(n, j, …)`.

    Made by `JaggedCollate`. It carries values and offsets, which are ordinary tensors that
    workers share and pinned memory takes; the nested tensors are views that are made when they
    are first read. Fields of equal lengths share their offsets, so that torch lets them be
    combined: `batch["ids"] * batch["mask"]`. Fields of numbers are stacked: `(n,)`.

    >>> batch = JaggedCollate()([{"ids": [7, 8, 9], "label": 0}, {"ids": [4], "label": 1}])
    >>> batch["ids"].is_nested, batch["label"]
    (True, tensor([0, 1]))
    >>> [sample.tolist() for sample in batch["ids"].unbind()]
    [[7, 8, 9], [4]]
    >>> batch.offsets
    tensor([0, 3, 4])
    """

    @cached_property
    def data(self) -> Any:
        """The plain structure, of nested tensors: a dict, a tuple or a nested tensor.

        Nested as the samples were. Texts are lists of `str`.
        """
        views = (
            value if layout is None or layout.offsets is None else _nested(value, layout)
            for (_, value), layout in zip(leaves_of(self._stored), self._layouts, strict=True)
        )
        return put_together(self._stored, views)

    @property
    def offsets(self) -> Tensor:
        """0 and the end of each sample, those of the length field: int64, `(n + 1,)`.

        On the batch's device.

        Raises:
            CollateError: no field is ragged.
        """
        return self._offsets

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "data"}


def _nested(values: Tensor, layout: Segments) -> Tensor:
    lengths = layout.lengths
    # Known on the host: stated, or torch would read them back from the device.
    return torch.nested.nested_tensor_from_jagged(
        values,
        layout.offsets,
        min_seqlen=int(lengths.min()),
        max_seqlen=int(lengths.max()),
    )


class JaggedMapping(JaggedBatch, MappingView):
    """A jagged batch of dict samples."""


class JaggedSequence(JaggedBatch, SequenceView):
    """A jagged batch of tuple samples."""


JAGGED_KINDS = (JaggedBatch, JaggedMapping, JaggedSequence)
