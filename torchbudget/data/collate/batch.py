"""The base of all batches of ragged samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_leaves_with_path, tree_map_only

from torchbudget.checks import is_int
from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.length_field import choose_length_field
from torchbudget.data.collate.options import CollateOptions
from torchbudget.data.collate.structure import (
    Field,
    FieldPath,
    fields_of,
    find_path,
    put_together,
    take_apart,
)
from torchbudget.errors import CollateError, OptionError
from torchbudget.machine.cuda import may_return_early
from torchbudget.protocols import SplittableBatch

T = TypeVar("T")
BatchT = TypeVar("BatchT", bound="Batch")


class Layout(Protocol):
    """Where the n samples are in a field's tensor."""

    @property
    def lengths(self) -> IntArray:
        """Each sample's lengths on the ragged axes, `(n, k)`."""

    def samples(self, field: Tensor) -> Sequence[Tensor]:
        """The n samples, as views of the tensor."""

    def part(self, start: int, stop: int) -> tuple[Any, Layout]:
        """What cuts samples `start` to `stop` out of the tensor, and their layout in the result."""

    @property
    def nbytes(self) -> int:
        """Bytes of its own tensors, which go wherever the field goes."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Layout:
        """The same with a function applied to its own tensors."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Batch:
    """Tensors of n ragged samples, and the position of each sample in them.

    The base of `PaddedBatch` and `PackedBatch`, made by a collate. A batch of dict samples is a
    `Mapping` from field to tensor, so that `model(**batch)` works. A batch of tuple samples is a
    `Sequence`, so that `x, y = batch` works. A batch of bare samples has its tensor in `data`.
    Batches are immutable; `dict(batch)` is not. A batch equals only itself.

    Attributes:
        num_samples: n.
        data: the plain structure: a dict, a tuple (a named tuple where the samples were) or a
            tensor, nested as the samples were. Texts are lists of `str`.
    """

    num_samples: int
    data: Any
    _paths: tuple[FieldPath, ...]  # per field, in the order of `fields_of`
    _layouts: tuple[Layout | None, ...]  # per field; None for texts
    _length_field: int  # index in _layouts of the field whose lengths are the batch's

    if TYPE_CHECKING:
        # Whether a batch is a mapping or a sequence depends on its samples, which no type knows:
        # a checker allows both.
        def __getitem__(self, key: Any) -> Any: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __len__(self) -> int: ...

        def keys(self) -> Any:
            """The fields, of a batch of dict samples."""

        def items(self) -> Any:
            """The fields and their tensors, of a batch of dict samples."""

    # Mapping compares by content, but `tensor == tensor` has no truth value.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def lengths(self) -> Tensor:
        """Each sample's length in the length field, without padding.

        Int64, shape `(n,)`, or `(n, k)` for k ragged axes; `(n, 0)` if no field is ragged. Always
        on the CPU: reading it does not wait for the device, and
        `torch.nn.utils.rnn.pack_padded_sequence` takes it.
        """
        lengths = self._host_lengths
        return torch.from_numpy((lengths[:, 0] if lengths.shape[1] == 1 else lengths).copy())

    @property
    def num_tokens(self) -> int:
        """Positions without padding: Σ lengths, or for k ragged axes Σ of their products.

        It is the weight of the batch in a mean over positions.
        """
        return int(self._host_lengths.prod(axis=1).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' elements, padding included, and of the texts."""
        sizes = [
            leaf.nbytes if isinstance(leaf, Tensor) else sys.getsizeof(leaf)
            for leaf in tree_leaves(self.data)
        ]
        layouts = _of_each(lambda layout: layout.nbytes, self._layouts)
        return sum(sizes) + sum(layouts.values())

    @property
    def _host_lengths(self) -> IntArray:  # (n, k) for k ragged axes
        lengths: IntArray = self._length_layout.lengths
        return lengths

    @property
    def _length_layout(self) -> Any:
        layout = self._layouts[self._length_field]
        if layout is None:
            raise CollateError("this batch has only texts, which have no lengths")
        return layout

    def _map(self: BatchT, function: Callable[[Tensor], Tensor]) -> BatchT:
        layouts = _of_each(lambda layout: layout.map(function), self._layouts)
        return replace(
            self,
            data=tree_map_only(Tensor, function, self.data),
            _layouts=tuple(layouts.get(id(layout)) for layout in self._layouts),
        )

    def to(
        self: BatchT,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> BatchT:
        """The batch on another device, or with its floating-point fields in another dtype.

        As in `torch.nn.Module.to`, all other fields keep their dtype, and so does `cu_seqlens`: in
        float16 the token 40001 would be 40000. `lengths` stays on the CPU.

        Args:
            device: as in `torch.Tensor.to`; a dtype too.
            dtype: of the fields of floating-point numbers.
            non_blocking: return before the copy from pinned memory is done; ignored where the
                copy could then be read too early, as on the way to the CPU.

        Raises:
            OptionError: the dtype is not of floating-point numbers.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(
                f"a batch is cast in its floating-point fields only, got {dtype}: cast a field of "
                "another kind by itself, as in batch['ids'].to(dtype)"
            )

        early = non_blocking and may_return_early(device)

        def move(tensor: Tensor) -> Tensor:
            own = dtype if tensor.is_floating_point() else None
            return tensor.to(device, own, non_blocking=early)

        return self._map(move)

    def pin_memory(self: BatchT) -> BatchT:
        """The batch in page-locked memory; called by `DataLoader(pin_memory=True)`."""
        return self._map(lambda t: t.pin_memory())

    def measured_by(self: BatchT, field: Any) -> BatchT:
        """The same batch with the lengths of another field.

        `mask`, `num_tokens` and the like follow: of a batch of sources and targets, `batch.mask` is
        the mask of the sources and `batch.measured_by("target").mask` that of the targets.

        Args:
            field: a name or a position; a tuple of those where samples are nested.

        Raises:
            CollateError: there is no such field, or it is not ragged.
        """
        index = find_path(field, self._paths, "measured_by")
        layout = self._layouts[index]
        if layout is None or layout.lengths.shape[1] == 0:
            raise CollateError(f"field {field!r} has no ragged axis")
        return replace(self, _length_field=index)

    def split(self: BatchT, n: int) -> list[BatchT]:
        """The batch as n batches of nearly equal numbers of samples, in order.

        Raises:
            OptionError: n is not an int from 1 to `num_samples`.
        """
        if not is_int(n) or not 1 <= n <= self.num_samples:
            raise OptionError(
                f"a batch of {self.num_samples} samples splits into 1 to {self.num_samples} "
                f"batches, got n={n!r}"
            )
        bounds = [self.num_samples * i // n for i in range(n + 1)]
        return [self._part(a, b) for a, b in pairwise(bounds)]

    def samples(self) -> list[Any]:
        """The n samples as they were before collating, their fields as views of the batch.

        Arrays, lists and numbers come back as tensors. The samples can be collated again, also by
        another collate: `PackCollate()(padded_batch.samples())`.
        """
        columns = [
            value if layout is None else layout.samples(value)
            for value, layout in zip(fields_of(self.data), self._layouts, strict=True)
        ]
        return [put_together(self.data, iter(row)) for row in zip(*columns, strict=True)]

    def _part(self: BatchT, start: int, stop: int) -> BatchT:
        """The batch of samples `start` to `stop`."""
        parts = _of_each(lambda layout: layout.part(start, stop), self._layouts)
        texts = slice(start, stop), None
        cuts = [parts.get(id(layout), texts) for layout in self._layouts]
        # What is trimmed is copied, since some models need contiguous input; the rest are views.
        values = [
            value[cut] if layout is None else value[cut].contiguous()
            for value, (cut, layout) in zip(fields_of(self.data), cuts, strict=True)
        ]
        return replace(
            self,
            num_samples=stop - start,
            data=put_together(self.data, iter(values)),
            _layouts=tuple(layout for _, layout in cuts),
        )

    def __repr__(self) -> str:
        shown = (
            f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}"
            if isinstance(v, Tensor)
            else f"text[{len(v)}]"
            for v in fields_of(self.data)
        )
        fields = str(put_together(self.data, shown)).replace("'", "")
        return f"{type(self).__name__}(num_samples={self.num_samples}, {fields})"


class MappingView(Batch, Mapping[Any, Any]):
    """A batch of dict samples: a mapping from field to tensor."""

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def update(self, fields: Mapping[Any, Any]) -> None:
        """Accept the batch's own fields, which change nothing, or pinned copies of them.

        A `DataLoader` with `batch_size=None` copies each mapping and updates the copy with its own
        fields; torch 2.6 pins a mapping that way. Without this method both would return a plain
        dict instead.

        Raises:
            TypeError: the fields are neither.
        """
        _accept(self, {**self.data, **fields})


class SequenceView(Batch, Sequence[Any]):
    """A batch of tuple samples: a sequence of tensors."""

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        fields = list(self.data)
        fields[index] = value
        named = hasattr(self.data, "_fields")  # as in MappingView.update
        _accept(self, type(self.data)(*fields) if named else tuple(fields))

    def __len__(self) -> int:
        return len(self.data)


# `torch.utils.data.default_convert` keeps the type of mutable containers only.
MutableMapping.register(MappingView)
MutableSequence.register(SequenceView)


def _of_each(function: Callable[[Layout], T], layouts: Sequence[Layout | None]) -> dict[int, T]:
    """What a function gives for each layout, by `id`: fields that share one share its result."""
    each = {id(layout): layout for layout in layouts if layout is not None}
    return {key: function(layout) for key, layout in each.items()}


def _accept(batch: Batch, given: Any) -> None:
    """Take over pinned copies of a batch's fields; the fields themselves change nothing.

    Raises:
        TypeError: something else was given, since a batch cannot be changed.
    """
    ours, theirs = (tree_leaves_with_path(tree) for tree in (batch.data, given))
    pairs = zip(ours, theirs, strict=False)
    same = [path == other and _is_same(mine, leaf) for (path, mine), (other, leaf) in pairs]
    if len(ours) != len(theirs) or not all(same):
        raise TypeError("a batch cannot be changed; dict(batch) or list(batch) can")
    if any(mine is not leaf for (_, mine), (_, leaf) in zip(ours, theirs, strict=True)):
        object.__setattr__(batch, "data", given)
        vars(batch).update(vars(batch.pin_memory()))  # its layouts' tensors, too


def _is_same(mine: Any, given: Any) -> bool:
    """Whether it is the same object, or a pinned copy of a tensor."""
    if mine is given:
        return True
    tensors = isinstance(mine, Tensor) and isinstance(given, Tensor)
    return tensors and given.is_pinned() and (given.shape, given.dtype) == (mine.shape, mine.dtype)


if TYPE_CHECKING:
    # Training splits batches by this protocol, without importing them: mypy checks that it fits.
    _SPLITTABLE: Callable[[Batch], SplittableBatch] = lambda batch: batch  # noqa: E731


def make_batch(
    kinds: tuple[type[BatchT], type[BatchT], type[BatchT]],
    samples: Sequence[Any],
    options: CollateOptions,
    write: Callable[[Field], tuple[Tensor, Layout]],
) -> BatchT:
    """A batch of the class that fits its samples.

    Args:
        kinds: the classes for samples that are neither dicts nor tuples, for dicts, for tuples.
        samples: at least one.
        options: of the collate.
        write: returns a field's tensor, and the layout of the samples in it.

    Raises:
        CollateError: as in `take_apart`, `choose_length_field` and `write`; or an option names a
            field that the samples do not have.
    """
    structure, fields = take_apart(samples)
    paths = tuple(field.path for field in fields)
    options.check_names(paths)
    written: list[tuple[Any, Layout | None]] = [
        (list(field.values), None) if field.kind == "text" else write(field) for field in fields
    ]
    values, layouts = zip(*written, strict=True)
    lengths = [None if layout is None else layout.lengths for layout in layouts]
    data = put_together(structure, iter(values))
    plain, mapping, sequence = kinds
    kind = mapping if isinstance(data, dict) else sequence if isinstance(data, tuple) else plain
    return kind(
        num_samples=len(samples),
        data=data,
        _paths=paths,
        _layouts=layouts,
        _length_field=choose_length_field(
            options.length_field, options._sized_field, paths, lengths
        ),
    )
