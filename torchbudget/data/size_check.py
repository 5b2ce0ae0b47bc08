"""Comparison of the batches that come with their plan: numbers, padding, and samples' lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
from torch import Tensor

from torchbudget.cost.measured import MeasuredCost
from torchbudget.cost.protocol import IntArray, Sizes
from torchbudget.data.collate.batch import Batch, PackedBatch, PaddedBatch
from torchbudget.errors import (
    CollateError,
    OtherNumbersWarning,
    OtherSizesWarning,
    PaddedSizeWarning,
    warn,
)
from torchbudget.plan.rules import BatchRules
from torchbudget.plan.solver import run_costs

# Sizes are the lengths of a field if this share of a batch's sizes equals them. An augmentation
# leaves most samples as long as they were. Of sizes in words, characters, bytes or noisy lengths,
# at most 7 % equal the lengths (tests/data/test_size_check.py).
_MOSTLY: Final = 0.5


class SizeCheck:
    """Compares batches with their plan and warns once of each kind of difference.

    Padding and lengths are looked at only if a batch came larger than it was planned.

    - `OtherNumbersWarning`: a batch has another number of samples than planned.
    - `PaddedSizeWarning`: a batch is padded to more than was planned and than its longest sample
      needs, since the collate rounds up to a multiple that the plan does not know.
    - `OtherSizesWarning`: samples are longer than their sizes, and with their lengths the cost of
      the batch exceeds the budget. The lengths are those of the field that most sizes equal; if
      they equal none, the batch's own. A measured cost may have sizes of any unit, such as pixels,
      so that it is compared only if most sizes equal the lengths.

    A batch of another library is compared by its `attention_mask`, and not at all without one. A
    padded batch that was planned without padding raises a `CollateError`.

    Args:
        rules: rules that the batches were planned by.
        sizes: sizes of the data set, `(N,)` or `(N, d)`; `None`: padded sizes alone are compared.
    """

    def __init__(self, rules: BatchRules, sizes: Sizes | None) -> None:
        self._rules, self._sizes = rules, sizes
        self._warned: set[type[Warning]] = set()

    def compare(self, batch: Any, padded_size: Sequence[int] | IntArray, indices: IntArray) -> None:
        """Compare a batch with its plan; O(1) for batches that came as planned.

        Args:
            batch: batch as the loader returned it.
            padded_size: planned, shape `(d,)`; of packed rows the sum.
            indices: samples of the batch, shape `(n,)`.
        """
        try:
            shown = _shown(batch)
        except CollateError:
            return  # it was rebuilt from its fields and does not know its samples
        if shown is None:
            return
        (number, came), is_packed = shown, self._rules.packing is not None
        if number != len(indices):
            if isinstance(batch, Batch):
                self._warn(
                    OtherNumbersWarning,
                    f"a batch has {number} samples, but {len(indices)} were planned: the data "
                    "set's __getitems__ or the collate_fn drops samples, or adds some that the "
                    "budget does not count. Drop or add samples before the sizes are read",
                )
        elif is_packed and not isinstance(batch, PackedBatch):
            check_elements(batch, None, self._rules.size_multiple)
        elif len(came) == len(padded_size) and is_packed == isinstance(batch, PackedBatch):
            planned = np.asarray(padded_size)
            if (np.array(came) > planned).any():
                lengths = _lengths(batch, number)
                self._compare_padding(came, planned, lengths)
                self._compare_sizes(batch, lengths, indices)

    def _warn(self, category: type[Warning], message: str) -> None:
        if category not in self._warned:
            self._warned.add(category)
            warn(message, category)

    def _compare_padding(self, came: list[int], planned: IntArray, lengths: IntArray) -> None:
        rounded, packing = self._rules.padded(lengths), self._rules.packing
        needed = rounded.max(axis=0)
        if packing is not None:
            needed = packing.padded_totals(rounded.sum(axis=0))
        if (np.array(came) > np.maximum(planned, needed)).any():
            sizes = [" × ".join(map(str, size)) for size in (came, planned)]
            self._warn(
                PaddedSizeWarning,
                f"a batch is padded to {sizes[0]}, but {sizes[1]} was planned: the budget does not "
                "count the difference. Give the sampler or stream the multiple that its collate "
                f"rounds up to, now size_multiple={self._rules.size_multiple}, or let the collate "
                "pad to the longest sample",
            )

    def _compare_sizes(self, batch: Any, lengths: IntArray, indices: IntArray) -> None:
        if self._sizes is None:
            return
        rules, sizes = self._rules, self._sizes[indices].reshape(len(indices), -1).astype(np.int64)
        fields = batch.sample_shapes() if isinstance(batch, Batch) else [lengths]
        equal = [(one == sizes).mean() if one.shape == sizes.shape else 0.0 for one in fields]
        if max(equal) >= _MOSTLY:
            lengths = fields[int(np.argmax(equal))]
        elif isinstance(rules.cost, MeasuredCost):
            return
        more = (lengths - sizes).max(axis=1)
        if more.max() > 0 and self._exceeds(lengths):
            i, limit = int(more.argmax()), rules.limits[0]
            length, size = (" × ".join(map(str, one[i].tolist())) for one in (lengths, sizes))
            self._warn(
                OtherSizesWarning,
                f"sample {indices[i]} of the data set has a length of {length}, but its size is "
                f"{size}: with the lengths of its samples, its batch costs more than the budget of "
                f"{limit.text(limit.amount)}. Read the sizes again, with the data set of the "
                "loader: sizes_of(dataset, …)",
            )

    def _exceeds(self, lengths: IntArray) -> bool:
        """True if a batch of samples of these lengths, `(n, d)`, costs more than the budget."""
        rules, own = self._rules, lengths if lengths.shape[1] > 1 else lengths[:, 0]
        try:
            cost = run_costs(own, np.array([0]), np.array([len(own)]), rules, rules.cost)
        except Exception:  # noqa: BLE001  (a user's cost may refuse sizes that it does not know)
            return True
        return bool(cost[0] > rules.budget_bytes)


def check_elements(batch: Any, most: int | None, multiple: int | None) -> None:
    """Check that a batch has no more elements than any that was planned.

    A batch of another library is looked at by its `attention_mask`, and not at all without one.

    Args:
        batch: batch as a collate made it.
        most: padded elements that any batch was planned with at the most; `None`: unknown.
        multiple: size multiple of packed batches; `None`: batches were planned with padding.

    Raises:
        CollateError: it has more; or padding where none was planned.
    """
    shown = _shown(batch)
    if shown is None:
        return
    (number, came), is_packed = shown, isinstance(batch, PackedBatch)
    elements = math.prod(came) * (1 if is_packed else number)
    if multiple is not None and not is_packed:
        planned = (-(-_lengths(batch, number) // multiple) * multiple).prod(1).sum()
        if elements > planned:
            raise CollateError(
                f"batches were planned without padding, by a PackedCost, but one has {number} "
                f"samples padded to {' × '.join(map(str, came))}: {elements:,} elements instead of "
                f"{planned:,}. Collate with PackCollate, or plan with a PaddedCost"
            )
    if most is not None and elements > most:
        raise CollateError(
            f"a batch has {elements:,} elements, but at most {most:,} were planned: the budget "
            "does not count the difference. Read sizes and measure the cost from the samples that "
            "the collate_fn gets"
        )


def _shown(batch: Any) -> tuple[int, list[int]] | None:
    """The number of samples, and the padded size or total; `None`: the batch does not show them.

    The size is empty if no field is ragged, as for texts.

    Raises:
        CollateError: the batch was rebuilt from its fields and does not know its samples.
    """
    if not isinstance(batch, Batch):
        mask = _mask_of(batch)
        return None if mask is None else (len(mask), [mask.shape[1]])
    number = batch.num_samples
    came: list[int] = []
    with suppress(CollateError):  # the field with the lengths is neither padded nor joined
        if isinstance(batch, PackedBatch):
            came = [batch.padded_total]
        elif isinstance(batch, PaddedBatch):
            came = [*batch.padded_size]
    return number, came


def _lengths(batch: Any, number: int) -> IntArray:
    """The lengths of a batch's samples, `(n, k)`."""
    lengths = batch.lengths if isinstance(batch, Batch) else (_mask_of(batch) != 0).sum(1)
    return np.asarray(lengths.numpy()).reshape(number, -1)


def _mask_of(batch: Any) -> Any:
    """The attention mask that transformers' collators make, `(n, L)`, 0 where padding is."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 and mask.is_cpu else None
