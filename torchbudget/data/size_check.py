"""Comparison of the batches that come with their plan: numbers, padding, and samples' lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from torchbudget.cost.measured import MeasuredCost
from torchbudget.cost.protocol import IntArray, Sizes
from torchbudget.errors import (
    CollateError,
    OtherNumbersWarning,
    OtherSizesWarning,
    PaddedSizeWarning,
)
from torchbudget.plan.rules import BatchRules
from torchbudget.warn import warn

_SAMPLES: Final = 1024  # samples after which sizes are judged
_FEWEST: Final = 128  # samples of an epoch that ended earlier and is judged all the same
# Rank correlation of n unrelated values is below 3/√n but in one case of 370. With lengths, that of
# characters, words, noisy lengths or pixels is above 0.6: tests/data/test_size_check.py.
_CHANCE: Final = 3.0
_AGAIN: Final = "Read the sizes again, with the data set of the loader: sizes_of(dataset, …)"


class SizeCheck:
    """Compares batches with their plan and warns once of each kind of difference.

    - `OtherNumbersWarning`: a batch has another number of samples than planned.
    - `PaddedSizeWarning`: a batch is padded to more than was planned and than its longest sample
      needs, since the collate rounds up to a multiple that the plan does not know.
    - `OtherSizesWarning`: most sizes equal a length, and a sample is longer than planned, in any
      batch. Or the sizes neither rise nor fall with any length, in the order of 1,024 samples.
      Sizes may be of any unit, such as bytes or pixels, and those that no length exceeds (random
      crops) are right.

    A batch of another library is compared by its `attention_mask`, and not at all without one. A
    padded batch that was planned without padding raises a `CollateError`, and so do 128 samples
    that are all longer than their sizes in every ragged field: their batches have more elements
    than planned. (A measured cost has measured sizes of any unit.)

    Args:
        rules: rules that the batches were planned by.
        sizes: sizes of the data set, `(N,)` or `(N, d)`; `None`: padded sizes alone are compared.
    """

    def __init__(self, rules: BatchRules, sizes: Sizes | None) -> None:
        self._rules, self._packed, self._sizes = rules, rules.packing is not None, sizes
        self._of_any_unit = isinstance(rules.cost, MeasuredCost)
        self._seen: list[_Seen] = []  # batches until the judgement
        self._count = 0  # samples in them
        self._fields: list[int] = []  # number of axes of each field of their samples
        self._equal: list[tuple[int, int]] = []  # axis of sizes, column of lengths that equal them
        self._is_judged = sizes is None
        self._warned: set[type[Warning]] = set()

    def compare(self, batch: Any, padded_size: Sequence[int] | IntArray, indices: IntArray) -> None:
        """Compare a batch with its plan; O(1) for nearly all batches that came as planned.

        Args:
            batch: batch as the loader returned it.
            padded_size: planned, shape `(d,)`; of packed rows the sum.
            indices: samples of the batch, shape `(n,)`.
        """
        own = hasattr(type(batch), "sample_shapes")
        mask = None if own else _mask_of(batch)
        if mask is None and not own:
            return
        try:
            number, came = _shape(batch) if mask is None else (len(mask), [mask.shape[1]])
        except CollateError:
            return  # it was rebuilt from its fields and does not know its samples
        planned = [int(size) for size in padded_size]
        if number != len(indices):
            if own:
                self._warn(
                    OtherNumbersWarning,
                    f"a batch has {number} samples, but {len(indices)} were planned: the data "
                    "set's __getitems__ or the collate_fn drops samples, or adds some that the "
                    "budget does not count. Drop or add samples before the sizes are read",
                )
            return
        if came == planned and self._is_judged:
            return
        if came and (own and hasattr(batch, "padded_total")) == self._packed:
            lengths = (batch.lengths if mask is None else (mask != 0).sum(1)).numpy()
            self._compare_padding(came, planned, lengths.reshape(number, -1))
        elif self._packed:
            check_elements(batch, None, self._rules.size_multiple)
        if self._sizes is not None:
            shapes = batch.sample_shapes() if mask is None else _shapes_by(mask, batch)
            shapes = [one for one in shapes if len(one) == number]
            fields = [one.shape[1] for one in shapes]
            self._fields = self._fields or fields
            if shapes and fields == self._fields:  # others cannot be compared
                sizes = self._sizes[indices].astype(np.int64).reshape(number, -1)
                self._seen.append(_Seen(sizes, np.concatenate(shapes, axis=1), planned, indices))
                self._count += number
                if self._count >= _FEWEST and not (self._is_judged or self._of_any_unit):
                    self._check_longer()
                if self._is_judged or self._count >= _SAMPLES:
                    self._judge()
                else:  # 1,024 samples may come long after the first batch over the budget
                    self._find_longer(self._seen[-1], _equal_lengths(self._seen))

    def end(self) -> None:
        """Judge the sizes by an epoch that ended before 1,024 samples came."""
        if self._count >= _FEWEST:
            self._judge()

    def _warn(self, category: type[Warning], message: str) -> None:
        if category not in self._warned:
            self._warned.add(category)
            warn(message, category)

    def _compare_padding(self, came: list[int], planned: list[int], lengths: IntArray) -> None:
        rounded, packing = self._rules.padded(lengths), self._rules.packing
        total = rounded.sum(axis=0)
        needed = rounded.max(axis=0) if packing is None else packing.padded_totals(total)
        if len(planned) == len(came) and (np.array(came) > np.maximum(planned, needed)).any():
            sizes = [" × ".join(map(str, size)) for size in (came, planned)]
            self._warn(
                PaddedSizeWarning,
                f"a batch is padded to {sizes[0]}, but {sizes[1]} was planned: the budget does not "
                "count the difference. Give the sampler or stream the multiple that its collate "
                f"rounds up to, now size_multiple={self._rules.size_multiple}, or let the collate "
                "pad to the longest sample",
            )

    def _check_longer(self) -> None:
        sizes = np.concatenate([one.sizes for one in self._seen])
        lengths = np.concatenate([one.lengths for one in self._seen])
        lengths = lengths[:, lengths.min(axis=0) < lengths.max(axis=0)]
        if lengths.size and (lengths.min(axis=1) > sizes.max(axis=1)).all():
            raise CollateError(
                f"all {len(sizes)} samples read so far are longer than their sizes, such as "
                f"{lengths[-1].tolist()} for {sizes[-1].tolist()}: the budget does not count the "
                f"difference. {_AGAIN}; or, if sizes have another unit, measure the cost of that "
                "unit by measure_cost"
            )

    def _judge(self) -> None:
        seen, self._seen, self._count = self._seen, [], 0
        if not self._is_judged:
            self._is_judged = True
            self._equal = _equal_lengths(seen)
        if self._equal:
            for one in seen:
                self._find_longer(one, self._equal)
            return
        self._sizes = None  # they are of another unit, or of other samples
        sizes = np.concatenate([one.sizes for one in seen])
        lengths = np.concatenate([one.lengths for one in seen])
        fields = np.repeat(np.arange(len(self._fields)), self._fields)
        if _are_unrelated(sizes, lengths, fields):
            self._warn(
                OtherSizesWarning,
                f"the sizes do not match the samples: of {len(sizes)} samples read, those with "
                "larger sizes are not longer in any field. Batches may exceed the budget. "
                f"{_AGAIN}",
            )

    def _find_longer(self, found: _Seen, equal: list[tuple[int, int]]) -> None:
        for axis, column in equal:
            lengths, planned = found.lengths[:, column], found.planned[axis]
            if (lengths.sum() if self._packed else lengths.max()) > planned:
                i = int((lengths - found.sizes[:, axis]).argmax())
                self._warn(
                    OtherSizesWarning,
                    f"sample {found.indices[i]} of the data set has a length of {lengths[i]}, but "
                    f"its size is {found.sizes[i, axis]}: its batch has more than the {planned} "
                    f"that the budget counts. {_AGAIN}",
                )


class _Seen(NamedTuple):
    """A batch: sizes `(n, d)`, lengths along all axes of all fields `(n, a)`, plan, indices."""

    sizes: IntArray
    lengths: IntArray
    planned: list[int]
    indices: IntArray


def _equal_lengths(seen: list[_Seen]) -> list[tuple[int, int]]:
    """The axes of sizes that equal a length in most samples, with the column of the lengths."""
    equal: list[tuple[int, int]] = []
    # As they come, and sorted in each batch by itself: a collate may reorder its samples.
    for arranged in (np.asarray, partial(np.sort, axis=0)):
        sizes = np.concatenate([arranged(one.sizes) for one in seen])
        lengths = np.concatenate([arranged(one.lengths) for one in seen])
        for axis in range(0 if equal else sizes.shape[1]):
            share = (lengths == sizes[:, axis, None]).mean(axis=0)
            if share.max(initial=0) >= 0.5:
                equal.append((axis, int(share.argmax())))
    return equal


def _are_unrelated(sizes: IntArray, lengths: IntArray, fields: IntArray) -> bool:
    """True if no length, product or sum of lengths rises or falls with the sizes beyond chance."""
    sizes = sizes[:, sizes.std(axis=0) >= 0.1 * sizes.mean(axis=0)]  # else any order is as good
    varies = lengths.min(axis=0) < lengths.max(axis=0)
    lengths, fields = lengths[:, varies], fields[varies]
    if not sizes.size or not lengths.size:
        return False
    # In float64, whose products do not wrap: pixels are products of two axes.
    products = [lengths[:, fields == one].prod(1, dtype=np.float64) for one in np.unique(fields)]
    amounts = np.column_stack([lengths, *products])
    if (amounts.max(axis=1) <= sizes.max(axis=1)).all():  # random crops
        return False
    columns = [*sizes.T, *amounts.T, np.sum(products, axis=0)]
    ranks = [np.unique(column, return_inverse=True)[1] for column in columns]
    relations = np.asarray(np.corrcoef(ranks))[: sizes.shape[1], sizes.shape[1] :]
    return bool((np.abs(relations) < _CHANCE / len(sizes) ** 0.5).all())


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
    own = hasattr(type(batch), "sample_shapes")
    mask = None if own else _mask_of(batch)
    if mask is None and not own:
        return
    number, came = _shape(batch) if mask is None else (len(mask), [mask.shape[1]])
    joined = own and hasattr(batch, "padded_total")
    elements = math.prod(came) * (1 if joined else number)
    if multiple is not None and not joined:
        lengths = batch.lengths if mask is None else (mask != 0).sum(1)
        planned = (-(-lengths.reshape(number, -1) // multiple) * multiple).prod(1).sum()
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


def _shape(batch: Any) -> tuple[int, list[int]]:
    """The number of samples and the padded size or total, which is empty for texts."""
    number = batch.num_samples
    try:
        came = [batch.padded_total] if hasattr(batch, "padded_total") else [*batch.padded_size]
    except CollateError:
        came = []
    return number, came


def _mask_of(batch: Any) -> Tensor | None:
    """The attention mask that transformers' collators make, `(n, L)`, 0 where padding is."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 and mask.is_cpu else None


def _shapes_by(mask: Tensor, batch: Mapping[str, Any]) -> list[IntArray]:
    """The lengths that a mask shows; none if sizes may be those of a field with other shapes."""
    shapes = [one.shape for one in batch.values() if isinstance(one, Tensor)]
    if any(shape != mask.shape[: len(shape)] for shape in shapes):
        return []
    return [(mask != 0).sum(1)[:, None].numpy()]
