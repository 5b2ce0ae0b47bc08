"""Batches of real samples, of any shape that is asked for; and the field that makes them ragged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import chain, cycle, islice
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchbudget.cost.batch_recipe import leaves_of
from torchbudget.cost.expressions import UntraceableError
from torchbudget.cost.protocol import Sizes
from torchbudget.data.collate.collates import IDS, PackCollate, PadCollate
from torchbudget.data.collate.columns import FieldPath, key_of, show, take_apart
from torchbudget.data.collate.layouts import ATTENTION_MASK, PaddedLayout
from torchbudget.data.sizes import (
    SizeDataset,
    SizeKey,
    ragged_axes,
    shape_of,
    sizes_of,
    sizes_one_by_one,
    spread,
)
from torchbudget.errors import CollateError, CostError, OptionError, SizesError
from torchbudget.plan.rules import BatchRules
from torchbudget.protocols import MapStyle

_DISTINCT: Final = 16  # samples of a batch of one size, which takes them again: limits reading


@dataclass(frozen=True, slots=True)
class AxesKey:
    """The lengths of a field along some of its axes, as a key of sizes; 1 for no axis.

    Attributes:
        path: of the field.
        axes: that are ragged.
        fixed: the other axes, each with its length.
    """

    path: FieldPath
    axes: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]

    def __call__(self, sample: Any) -> int | tuple[int, ...]:
        """Return the size of a sample."""
        for name in self.path:
            sample = sample[name]
        shape = _shape(sample)
        lengths = tuple(shape[axis] for axis in self.axes)
        if any(shape[axis] != length for axis, length in self.fixed):
            raise ValueError(
                f"its shape, {(*shape,)}, has another length along an axis in which other samples "
                "are alike; pass size=, a function that returns all ragged axes"
            )
        return lengths if len(lengths) > 1 else lengths[0] if lengths else 1

    def __repr__(self) -> str:
        axes = f", axes {', '.join(map(str, self.axes))}" if self.axes not in ((0,), ()) else ""
        return show(self.path) + axes


class _Field(NamedTuple):
    """A field of some samples.

    Attributes:
        path: of the field.
        axes: its number of axes.
        ragged: the axis along which samples have each different lengths, of shape `(n,)`.
        fixed: each axis along which all are equally long, with that length.
        is_text: it is no tensor in a batch.
    """

    path: FieldPath
    axes: int
    ragged: dict[tuple[int, ...], int]
    fixed: list[tuple[int, int]]
    is_text: bool

    @property
    def key(self) -> AxesKey:
        axes = tuple(self.ragged.values()) or (0,)[: self.axes]
        return AxesKey(self.path, axes, tuple(one for one in self.fixed if one[0] not in axes))


@dataclass(frozen=True, slots=True, kw_only=True)
class RealBatches:
    """Makes batches of unchanged samples: on each axis one of the wanted size, the rest no larger.

    Attributes:
        dataset: N samples.
        key: of their sizes.
        sizes: shape `(N,)` or `(N, d)`.
        collate: makes a batch of samples.
        multiple: padded sizes are multiples of it.
    """

    dataset: MapStyle
    key: SizeKey
    sizes: Sizes
    collate: Callable[[list[Any]], Any]
    multiple: int
    _read: dict[int, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        dataset: MapStyle,
        key: SizeKey,
        collate: Callable[[list[Any]], Any] | None,
        tokenizer: Any,
        *,
        modules: Sequence[nn.Module],
        multiple: int,
        num_workers: int,
    ) -> RealBatches:
        """Find the key that is not given, read all sizes, and make the collate that is not given.

        It adds a mask to `input_ids` without one, if one of the modules takes it.

        Raises:
            SizesError: it is a stream; not exactly one field is ragged; or a sample has no size.
            OptionError: both a collate and a tokenizer are given.
        """
        if collate is not None and tokenizer is not None:
            raise OptionError(
                "tokenizer= makes the collate: leave collate_fn out; or leave tokenizer out, and "
                "pass collate_fn=PadCollate.for_tokenizer(tokenizer, …)"
            )
        if tokenizer is not None and key is None:
            key = getattr(tokenizer, "model_input_names", ("input_ids",))[0]
        if key is None or collate is None:
            fields = _fields(dataset)
            key = _found(fields) if key is None else key
            tokenizer = _of_model(modules, fields) if tokenizer is None else tokenizer
            collate = _padding(key, fields, tokenizer, multiple) if collate is None else collate
        if isinstance(key, AxesKey) and key.axes == (0,) and len(key.path) < 2 and not key.fixed:
            key = key.path[0] if key.path else None  # lengths of columns are read fast
        sizes = sizes_of(dataset, key, num_workers=num_workers)
        sizes = sizes[:, 0] if sizes.shape[1:] == (1,) else sizes
        return cls(dataset=dataset, key=key, sizes=sizes, collate=collate, multiple=multiple)

    def __call__(self, n: int, size: Any) -> Any:
        """Make a batch of n samples padded to a size, as `measure_cost` asks `make_batch`.

        Raises:
            UntraceableError: no samples make that shape.
            SizesError: one has another size than before.
        """
        rounded, wanted = self.rounded(), np.atleast_1d(size)
        chosen = np.flatnonzero((rounded == wanted).all(axis=1))[: min(n, _DISTINCT)].tolist()
        below = np.flatnonzero((rounded <= wanted).all(axis=1))
        rest = chosen
        if not chosen and len(below):  # on each axis the longest there, and the largest of all
            chosen = [*{*below[rounded[below].argmax(axis=0)].tolist()}]
            rest = [int(below[rounded[below].prod(axis=1).argmax()])]
        if not 0 < len(chosen) <= n or (rounded[chosen].max(axis=0) != wanted).any():
            raise UntraceableError(f"no {n} samples make a batch padded to {wanted.tolist()}")
        return self._of([*islice(chain(chosen, cycle(rest)), n)])

    def _of(self, indices: list[int]) -> Any:
        collate = self.collate
        if isinstance(collate, PackCollate):  # a cost rounds totals by itself
            collate = replace(collate, total_multiple=1)
        # Copies: a collate may take fields out of its samples.
        return collate([copy.deepcopy(self._sample(index)) for index in indices])

    def concatenates(self) -> bool:
        """True if each tensor in a batch has as many elements as those of its samples alone.

        It is seen from the shortest and the longest sample on each axis. Tensors that do not grow
        with the size do not count. Several batches must agree, since a collate may crop at random.

        Raises:
            CostError: an int in the batch grows, but not as a sum: a step may pad to it. (If a step
                pads to the value of a tensor, it cannot be traced, and its cost is no sum.)
        """
        rows, found = self.rounded(), []
        shortest = np.where(rows > 0, rows, rows.max()).argmin(axis=0)
        pairs = [*zip(shortest.tolist(), rows.argmax(axis=0).tolist(), strict=True)]
        with suppress(Exception):  # a collate may refuse samples of different groups
            for kind in ([0], [1], [0, 1], [0, 0, 1], [0, 1, 1]):
                batches = [self._of([pair[k] for k in kind]) for pair in pairs]
                leaves = [leaf for batch in batches for leaf in leaves_of(batch)]
                found.append([*map(_amount, leaves)])
        if len(found) < 5 or len({*map(len, found)}) > 1:  # a list, whose tensors a step may pad
            return False
        one, other, *mixed = np.array(found, np.int64)
        is_int, grows = np.array([isinstance(leaf, int) for leaf in leaves]), one != other
        sums = np.array([one + other, 2 * one + other, one + 2 * other])
        is_sum = (np.array(mixed) == sums).all(axis=0)
        if not (grows & ~is_int).any() or not (is_sum | is_int)[grows].all():
            return False
        if not is_sum[grows].all():
            raise CostError(
                "an int in the batch grows with its largest sample, and the step may pad to it; "
                "packed=True states that it does not"
            )
        return True

    def padding(self) -> list[str]:
        """A line of what pads each field of integers, if a `PadCollate` pads any.

        It is seen in a batch of four samples, with the smallest and the largest one.
        """
        if not isinstance(self.collate, PadCollate):
            return []
        sizes, found = self.sizes.reshape(len(self.sizes), -1).sum(axis=1), []
        few = [0, len(sizes) - 1, int(sizes.argmin()), int(sizes.argmax())]
        batch = self.collate([one for _, one in SizeDataset(self.dataset, None).samples(few)])
        fields = zip(batch._known.layouts.items(), batch._known.fields(batch.data), strict=True)
        for (path, layout), value in fields:
            if isinstance(layout, PaddedLayout) and not value.is_floating_point():
                padded = value[~layout.mask(value.device)].flatten()[:1].tolist()
                found += [f"{key_of(path)!r} with {one}" for one in padded]
        mask = self.collate.mask
        to_pass = f"; the step must pass {mask!r} to the model" if mask else ""
        return [f"pads   {', '.join(found)}{to_pass}"] if found else []

    def rounded(self) -> Sizes:
        """The padded size of each sample alone: shape `(N, d)`."""
        return -(-self.sizes.reshape(len(self.sizes), -1) // self.multiple) * self.multiple

    def _sample(self, index: int) -> Any:
        if index not in self._read:
            [(_, sample)] = SizeDataset(self.dataset, self.key).samples([index])
            now, before = sizes_one_by_one([(index, sample)], self.key)[0], self.sizes[index]
            if np.any(now != before):
                raise SizesError(
                    f"sample {index} had the size {before.tolist()} when sizes were read, but has "
                    f"{now.tolist()} now: a size must follow from the index alone. Crop and "
                    "augment in the step, or pass size=, a function that returns the largest size "
                    "that a sample may have"
                )
            self._read[index] = sample
        return self._read[index]

    def most_elements(self, rules: BatchRules) -> int | None:
        """The most padded elements that any micro-batch may be planned with; `None`: unknown.

        It is known of sizes of one axis that are lengths, not of another unit by a user's function.
        """
        if (callable(self.key) and not isinstance(self.key, AxesKey)) or self.sizes.ndim > 1:
            return None
        lengths = np.unique(self.rounded()[:, 0]).astype(np.int64)
        n = np.minimum(rules.capacity(lengths, rules.budget_bytes), len(self.sizes))
        # Packed samples of several sizes may fill the room that one more of a size does not have.
        return int(((n + (rules.packing is not None)) * lengths).max())


def _amount(leaf: Any) -> int:
    return leaf if isinstance(leaf, int) else math.prod(getattr(leaf, "shape", ()))


def _shape(value: Any) -> tuple[int, ...]:
    return (len(value),) if isinstance(value, (str, bytes)) else shape_of(value)


def _fields(dataset: MapStyle) -> list[_Field]:
    """The fields of a few samples.

    Raises:
        SizesError: there are none, or they are of a class that is not looked into.
    """
    few = [sample for _, sample in SizeDataset(dataset, None).samples(spread(len(dataset)))]
    if not few:
        raise SizesError("there are no samples: the data set has the length 0")
    try:
        _, found = take_apart(few, {})
    except CollateError as error:
        raise SizesError(
            "the size of these samples cannot be found: pass size=, a function that returns the "
            f"size of a sample, and a collate_fn that makes a batch of them ({error})"
        ) from error
    fields = []
    for one in found:
        shapes = [*map(_shape, one.values)]
        columns, ragged = [*zip(*shapes, strict=False)], ragged_axes(shapes)
        fixed = [(k, lengths[0]) for k, lengths in enumerate(columns) if lengths not in ragged]
        fields.append(_Field(one.path, len(columns), ragged, fixed, one.kind == "text"))
    return fields


def _found(fields: Sequence[_Field]) -> AxesKey:
    """The key of the one field that has all the lengths in which samples differ.

    Raises:
        SizesError: there are several.
    """
    ragged = [one for one in fields if one.ragged]
    ragged = [one for one in ragged if not one.is_text] or ragged
    if not ragged:  # all samples are of one size
        return next((one for one in fields if one.axes), fields[0]).key
    every = {lengths for one in ragged for lengths in one.ragged}
    for one in ragged:
        if {*one.ragged} == every:
            return one.key
    candidates = "; ".join(
        f"{one.key!r}: {' by '.join(f'{min(each)} to {max(each)}' for each in one.ragged)}"
        for one in ragged
    )
    names = [key_of(one.path) for one in ragged if len(one.path) == 1] or [0, 1]
    raise SizesError(
        f"several fields are ragged, each in its own way ({candidates}): pass the one that the "
        f"cost depends on, as in size={names[0]!r}; several, as in size={(*names[:2],)!r}; or a "
        "function that returns the size of a sample"
    )


def _of_model(modules: Sequence[nn.Module], fields: Sequence[_Field]) -> Any:
    """How a tokenizer would pad ids for a model that takes a mask; `None`: samples have a mask."""
    named = {one.path: one.ragged and one.axes for one in fields}
    if named.get((IDS,)) != 1 or (ATTENTION_MASK,) in named:
        return None
    for model in modules:
        while isinstance(model, DistributedDataParallel) or "_orig_mod" in model._modules:
            model = next(model.children())
        if ATTENTION_MASK in signature(model.forward).parameters:
            token = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
            return SimpleNamespace(pad_token_id=token, padding_side="right")
    return None


def _padding(
    key: SizeKey, fields: Sequence[_Field], tokenizer: Any, multiple: int
) -> Callable[[list[Any]], Any]:
    """A collate that pads each field; those that are ragged like the size give the lengths."""
    named = key[0] if isinstance(key, tuple) else key
    path = key.path if isinstance(key, AxesKey) else (named,)
    main = next((one for one in fields if one.path == path), None)
    main = main or next((one for one in fields if one.ragged and not one.is_text), fields[0])
    alike = [one for one in fields if one.ragged and {*one.ragged} <= {*main.ragged}] or [main]
    options: dict[str, Any] = {
        "fields": {key_of(one.path): "padded" if one.ragged else "stacked" for one in fields
                   if one.axes and one.path and not one.is_text and one not in alike},
        "size_multiple": multiple,
    }  # fmt: skip
    axes = {one.path: tuple(one.ragged.values()) for one in alike if one.ragged}
    if any(one != (0,) for one in axes.values()):
        named_axes = {key_of(path): one for path, one in axes.items() if path}
        options["length_axes"] = named_axes or axes[()]
    if tokenizer is not None:
        return PadCollate.for_tokenizer(tokenizer, **options)
    return PadCollate(**options)
