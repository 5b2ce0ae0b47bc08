"""What every batch of ragged samples knows and can do."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.structure import find_path, leaves_of, put_together
from torchbudget.errors import CollateError, OptionError
from torchbudget.protocols import SplittableBatch

BatchT = TypeVar("BatchT", bound="Batch")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Batch(ABC):
    """Tensors of n ragged samples, and where each sample lies in them.

    What is common to `PaddedBatch`, `PackedBatch` and `JaggedBatch`. A collate makes it. A batch
    of dict samples is a `Mapping` from field to tensor, so that `model(**batch)` works; one of
    tuple samples is a `Sequence`, so that `x, y = batch` works; one of bare samples has its tensor
    in `data`. It cannot be changed; `dict(batch)` can. Two batches are equal where they are the
    same object.

    Attributes:
        num_samples: n.
    """

    num_samples: int
    _stored: Any
    _layouts: tuple[Any, ...]  # per field, how the samples lie in its tensor; None for texts
    _length_field: int  # whose lengths are the batch's: a place in _layouts

    if TYPE_CHECKING:
        # A batch reads as its samples do, which no type can tell: a checker allows all of it.
        def __getitem__(self, key: Any) -> Any: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __len__(self) -> int: ...

        def keys(self) -> KeysView[Any]:
            """The fields, of a batch of dict samples."""
            ...

        def items(self) -> ItemsView[Any, Any]:
            """The fields and their tensors, of a batch of dict samples."""
            ...

    # Mapping compares by content, which tensors have no truth value for.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def data(self) -> Any:
        """The plain structure: a dict, a tuple (a named tuple where the samples were) or a tensor.

        Nested as the samples were. Texts are lists of `str`.
        """
        return self._stored

    @property
    def lengths(self) -> Tensor:
        """Each sample's length in the length field, without padding.

        Int64 and on the CPU wherever the batch is, so that reading it waits for no device and
        `torch.nn.utils.rnn.pack_padded_sequence` takes it: `(n,)`, or `(n, k)` for k ragged axes.
        Where no field is ragged: `(n, 0)`.
        """
        lengths = self._host_lengths
        return torch.from_numpy((lengths[:, 0] if lengths.shape[1] == 1 else lengths).copy())

    @property
    def num_tokens(self) -> int:
        """Positions that are no padding: Σ lengths, over k ragged axes Σ of their products.

        The weight of the batch in a mean over positions.
        """
        return int(self._host_lengths.prod(axis=1).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' elements, padding included, and of the texts."""
        tensors = sum(t.nbytes for t in self._tensors())
        texts = (v for _, v in leaves_of(self._stored) if not isinstance(v, Tensor))
        return tensors + sum(sys.getsizeof(text) for column in texts for text in column)

    @property
    def _host_lengths(self) -> IntArray:
        lengths: IntArray = self._length_layout.lengths  # (n, k) for k ragged axes
        return lengths

    @property
    def _length_layout(self) -> Any:
        layout = self._layouts[self._length_field]
        if layout is None:
            raise CollateError("this batch holds texts alone, which have no lengths")
        return layout

    def _tensors(self) -> Iterator[Tensor]:
        return (value for _, value in leaves_of(self._stored) if isinstance(value, Tensor))

    def _map(self: BatchT, function: Callable[[Tensor], Tensor]) -> BatchT:
        mapped = (
            function(value) if isinstance(value, Tensor) else value
            for _, value in leaves_of(self._stored)
        )
        return replace(self, _stored=put_together(self._stored, mapped))

    def to(
        self: BatchT, device: torch.device | str | int | None = None, *, non_blocking: bool = False
    ) -> BatchT:
        """The batch on another device; `lengths` stays on the CPU.

        Args:
            device: as in `torch.Tensor.to`.
            non_blocking: return before the copy from pinned memory is done.
        """
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self: BatchT) -> BatchT:
        """The batch in page-locked memory; `DataLoader(pin_memory=True)` calls this."""
        return self._map(lambda t: t.pin_memory())

    def measured_by(self: BatchT, field: Any) -> BatchT:
        """The same batch, with the lengths, and all that follows from them, of another field.

        Of a batch of sources and targets, `batch.mask` and `batch.measured_by("target").mask`.

        Args:
            field: a name or a position; a tuple of those where samples are nested.

        Raises:
            CollateError: there is no such field, or it is not ragged.
        """
        paths = [path for path, _ in leaves_of(self._stored)]
        index = find_path(field, paths, "measured_by")
        layout = self._layouts[index]
        if layout is None or layout.lengths.shape[1] == 0:
            raise CollateError(f"field {field!r} has no ragged axis")
        return replace(self, _length_field=index)

    def split(self: BatchT, n: int) -> list[BatchT]:
        """The batch as n batches of nearly equal numbers of samples, in order.

        Raises:
            OptionError: n is no int from 1 to `num_samples`.
        """
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= self.num_samples:
            raise OptionError(
                f"a batch of {self.num_samples} samples splits into 1 to {self.num_samples} "
                f"batches, got n={n!r}"
            )
        bounds = [self.num_samples * i // n for i in range(n + 1)]
        return [self._part(a, b) for a, b in pairwise(bounds)]

    @abstractmethod
    def samples(self) -> list[Any]:
        """The n samples as they were before collating, their fields as views of the batch.

        Tensors stand for arrays, lists and numbers. What comes can be collated again, also by
        another collate: `PackCollate()(padded_batch.samples())`.
        """

    @abstractmethod
    def _part(self: BatchT, start: int, stop: int) -> BatchT:
        """The batch of samples `start` to `stop`."""

    def __repr__(self) -> str:
        shown = (
            f"{str(v.dtype).removeprefix('torch.')}{list(v.shape)}"
            if isinstance(v, Tensor)
            else f"text[{len(v)}]"
            for _, v in leaves_of(self._stored)
        )
        fields = str(put_together(self._stored, shown)).replace("'", "")
        return f"{type(self).__name__}(num_samples={self.num_samples}, {fields})"


class MappingView(Batch, Mapping[Any, Any]):
    """A batch of dict samples, read as the mapping that its data is."""

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def update(self, fields: Mapping[Any, Any]) -> None:
        """Nothing changes: the fields must be those that are there already.

        A `DataLoader` with `batch_size=None` copies a mapping, and updates the copy with each field
        once more; of one that cannot be updated it makes a plain dict.

        Raises:
            TypeError: they are others.
        """
        for key, value in fields.items():
            _check_same(self.data.get(key), value)


class SequenceView(Batch, Sequence[Any]):
    """A batch of tuple samples, read as the tuple that its data is."""

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        _check_same(self.data[index], value)  # as in MappingView.update

    def __len__(self) -> int:
        return len(self.data)


# So that `torch.utils.data.default_convert` lets them be what they are.
MutableMapping.register(MappingView)  # type: ignore[type-abstract]  # its kinds are not
MutableSequence.register(SequenceView)  # type: ignore[type-abstract]  # its kinds are not


def _check_same(mine: Any, given: Any) -> None:
    """Raise a `TypeError` unless it is the same, perhaps in another container."""
    if isinstance(mine, Tensor) and isinstance(given, Tensor) and mine.is_nested == given.is_nested:
        # Of a nested tensor every look is another view.
        mine, given = (one.values() if one.is_nested else one for one in (mine, given))
        if mine.is_set_to(given):
            return
    if mine is given:
        return
    if isinstance(mine, dict) and isinstance(given, dict) and mine.keys() == given.keys():
        for key, value in mine.items():
            _check_same(value, given[key])
    elif isinstance(mine, (tuple, list)) and isinstance(given, (tuple, list)):
        if len(mine) != len(given):
            raise TypeError("a batch cannot be changed; dict(batch) or list(batch) can")
        for one, other in zip(mine, given, strict=True):
            _check_same(one, other)
    elif not isinstance(mine, str) or mine != given:
        raise TypeError("a batch cannot be changed; dict(batch) or list(batch) can")


if TYPE_CHECKING:
    # Training splits batches by this protocol, without importing them: mypy checks that it fits.
    _SPLITTABLE: Callable[[Batch], SplittableBatch] = lambda batch: batch  # noqa: E731


def make_batch(
    kinds: tuple[type[BatchT], type[BatchT], type[BatchT]],
    data: Any,
    num_samples: int,
    layouts: Sequence[Any],
    length_field: int,
) -> BatchT:
    """The batch of the kind that reads as its data does.

    Args:
        kinds: for data that is neither a dict nor a tuple, for a dict, for a tuple.
        data: tensors and texts, structured as the samples were.
        num_samples: n.
        layouts: one per field, in the order of `take_apart`; None for texts.
        length_field: the place, in that order, of the field whose lengths are the batch's.
    """
    plain, mapping, sequence = kinds
    kind = mapping if isinstance(data, dict) else sequence if isinstance(data, tuple) else plain
    return kind(
        num_samples=num_samples,
        _stored=data,
        _layouts=tuple(layouts),
        _length_field=length_field,
    )
