"""Batches of ragged samples: padded or packed, read as a mapping, a sequence or a tensor."""

from __future__ import annotations

import sys
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import (
    register_pytree_node,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
)

from torchbudget.checks import is_int
from torchbudget.cost.protocol import IntArray
from torchbudget.data.collate.columns import (
    MISSING,
    FieldPath,
    find_path,
    path_of,
    put_together,
)
from torchbudget.data.collate.layouts import (
    JoinedLayout,
    Layout,
    PaddedLayout,
    on_device,
    own_padding,
)
from torchbudget.errors import CollateError, OptionError
from torchbudget.machine.device import may_return_early

BatchT = TypeVar("BatchT", bound="Batch")
LayoutT = TypeVar("LayoutT", bound=Layout)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrangement:
    """The samples of a batch, and the place of each in every field.

    Attributes:
        num_samples: n.
        layouts: layout of every field, by the path from the batch's data to it; in the order of
            `put_together`. Fields share layouts.
        measured: the path of the field whose lengths are the batch's.
        masked_rows: rows after the samples that fill up a shape.
    """

    num_samples: int
    layouts: Mapping[FieldPath, Layout]
    measured: FieldPath
    masked_rows: int = 0

    def fields(self, data: Any) -> list[Any]:
        """The value of every field in a batch's data."""
        return [reduce(getitem, path, data) for path in self.layouts]

    def fits(self, data: Any) -> bool:
        """Whether the samples can be in these fields, which a function may have changed."""
        fields = zip(self.fields(data), self.layouts.values(), strict=True)
        return all(layout.fits(field) for field, layout in fields)


class Batch:
    """Tensors of n ragged samples, and the position of each sample in them.

    The base of `PaddedBatch` and `PackedBatch`, made by a collate. A batch of dict samples is a
    `Mapping` from field to tensor, so that `model(**batch)` works. A batch of tuple samples is a
    `Sequence`, so that `x, y = batch` works. A batch of bare samples has its tensor in `data`.
    A batch equals only itself.

    Frameworks that move or cast a batch rebuild it as `type(batch)(fields)`. The new batch does not
    know its samples: `lengths` and everything else that needs them raise a `CollateError`. For
    `torch.utils._pytree` a batch is a container of its fields, and `tree_map` returns a batch that
    knows its samples, unless the function changed the fields' shapes.
    """

    def __init__(self, data: Any, arrangement: Arrangement | None = None) -> None:
        # No dataclass: Lightning copies those, and then assigns their fields.
        # Hosts rebuild batches from any mapping, list or generator.
        kind: Any = type(self)
        self._data = dict(data) if issubclass(kind, Mapping) else data
        if issubclass(kind, Sequence) and not isinstance(data, tuple):
            self._data = tuple(data)
        self._arrangement = arrangement

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register_pytree_node(cls, _flatten, partial(_unflatten, cls))

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
    def data(self) -> Any:
        """The plain structure: a dict, a tuple (a named tuple if the samples were) or a tensor.

        Nested as the samples were. Texts are lists of `str`.
        """
        return self._data

    @property
    def num_samples(self) -> int:
        """The number of samples, n; rows that fill up a shape of `max_shapes` do not count."""
        return self._known.num_samples

    @property
    def lengths(self) -> Tensor:
        """Each sample's length, without padding.

        Int64, shape `(n,)`, or `(n, k)` for k ragged axes; `(n, 0)` if no field is ragged. Always
        on the CPU: reading it does not wait for the device, and
        `torch.nn.utils.rnn.pack_padded_sequence` takes it.
        """
        lengths = self._host_lengths
        return torch.from_numpy((lengths[:, 0] if lengths.shape[1] == 1 else lengths) + 0)  # a copy

    @property
    def num_tokens(self) -> int:
        """Positions without padding: Σ lengths, or for k ragged axes Σ of their products.

        It is the weight of the batch in a mean over positions.
        """
        return int(self._host_lengths.prod(axis=1).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' elements, padding included, and of the texts."""
        leaves = tree_leaves(self.data)
        return sum(x.nbytes if isinstance(x, Tensor) else sys.getsizeof(x) for x in leaves)

    def sample_shapes(self) -> list[IntArray]:
        """The shape of each sample in every field: `(n, d)`, once for fields of equal shapes.

        Axes that all samples of a packed field share are left out. Texts and other lists have no
        shape. A batch that was rebuilt from its fields knows no shapes.
        """
        known = self._arrangement
        if known is None:
            return []
        each = dict.fromkeys(known.layouts.values())
        return [layout.shapes[: known.num_samples] for layout in each]

    def present(self, field: Any) -> Tensor:
        """Return which samples have an optional field: bool, `(n,)`, on the CPU.

        Args:
            field: a name or a position; a tuple of those if samples are nested.
        """
        known = self._known
        layout = known.layouts.get(path_of(field))
        if layout is None or layout.present is None:
            return torch.full((known.num_samples,), layout is not None)
        return torch.from_numpy(layout.present[: known.num_samples].copy())

    @property
    def _known(self) -> Arrangement:
        if self._arrangement is None:
            raise CollateError(
                f"this {type(self).__name__} does not know the lengths and places of its samples: "
                "a framework rebuilt it from its fields, as type(batch)(fields), or a function "
                "changed their shapes. Read lengths, mask, num_samples and the like, and split the "
                "batch, before that; batch.to() keeps them"
            )
        return self._arrangement

    @property
    def _host_lengths(self) -> IntArray:  # (n, k) for k ragged axes
        known = self._known
        return known.layouts[known.measured].lengths[: known.num_samples]

    @property
    def _device(self) -> Any:  # of the field whose lengths are the batch's
        return reduce(getitem, self._known.measured, self.data).device

    def _measured(self, kind: type[LayoutT]) -> LayoutT:
        """The layout of the field whose lengths are the batch's."""
        layout = self._known.layouts[self._known.measured]
        if not isinstance(layout, kind):
            way = "padded" if kind is PaddedLayout else "joined"
            raise CollateError(f"the field with the batch's lengths is not {way}")
        return layout

    def _map(self: BatchT, function: Callable[[Tensor], Tensor]) -> BatchT:
        return type(self)(tree_map_only(Tensor, function, self.data), self._arrangement)

    def to(
        self: BatchT,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> BatchT:
        """Return the batch on another device, or with its floating-point fields in another dtype.

        All other fields keep their dtype, as in `torch.nn.Module.to`, and so does `cu_seqlens`.
        `lengths` stays on the CPU.

        Args:
            device: as in `torch.Tensor.to`; a dtype too.
            dtype: dtype of the fields of floating-point numbers.
            non_blocking: return before the copy from pinned memory is done; ignored if the
                copy could then be read too early, as on the way to the CPU.

        Raises:
            OptionError: the dtype is not of floating-point numbers.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(
                f"batch.to(dtype) casts floating-point fields only, got {dtype}: cast another "
                "field alone, as in batch['ids'].to(dtype)"
            )

        early = non_blocking and may_return_early(device)

        def move(tensor: Tensor) -> Tensor:
            own = dtype if tensor.is_floating_point() else None
            return tensor.to(device, own, non_blocking=early)

        return self._map(move)

    def pin_memory(self: BatchT) -> BatchT:
        """Return the batch in page-locked memory, for `DataLoader(pin_memory=True)`."""
        return self._map(lambda t: t.pin_memory())

    def measured_by(self: BatchT, field: Any) -> BatchT:
        """Return the same batch with the lengths of another field.

        `mask`, `num_tokens` and the like follow. In a batch of sources and targets, `batch.mask` is
        the mask of the sources and `batch.measured_by("target").mask` that of the targets.

        Args:
            field: a name or a position; a tuple of those if samples are nested.

        Raises:
            CollateError: there is no such field, or it is not ragged.
        """
        known = self._known
        path = find_path(field, known.layouts, "measured_by")
        if not known.layouts[path].lengths.shape[1]:
            raise CollateError(f"field {field!r} has no ragged axis")
        return type(self)(self.data, replace(known, measured=path))

    def split(self: BatchT, n: int) -> list[BatchT]:
        """Cut the batch into n batches of nearly equal numbers of samples, in order.

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

    split.cuts_units = True  # type: ignore[attr-defined]  # see `torchbudget.train.batches`

    def samples(self) -> list[Any]:
        """Return the n samples as they were before collating, their fields as views of the batch.

        Arrays, lists and numbers become tensors. You can collate the samples again, also by another
        collate: `PackCollate()(padded_batch.samples())`.
        """
        known = self._known
        pairs = zip(known.layouts.values(), known.fields(self.data), strict=True)
        columns = [layout.samples(field)[: known.num_samples] for layout, field in pairs]
        return [self._structured(row) for row in zip(*columns, strict=True)]

    def _part(self: BatchT, start: int, stop: int) -> BatchT:
        """The batch of samples `start` to `stop`."""
        known = self._known
        values, layouts = [], {}
        fields = known.fields(self.data)
        for (path, whole), field in zip(known.layouts.items(), fields, strict=True):
            index, layout = whole.part(start, stop)
            if whole.present is not None:
                layout = replace(layout, present=whole.present[start:stop])
                if not whole.present[start:stop].any() and path != known.measured:
                    values.append(MISSING)  # as if these samples were collated by themselves
                    continue
            # What is trimmed is copied, since some models need contiguous input; the rest are
            # views.
            value = field[index]
            value = value.contiguous() if isinstance(value, Tensor) else value
            if isinstance(layout, JoinedLayout):
                value = layout.filled(value, own_padding(self.data, path) or 0)
            values.append(value)
            layouts[path] = layout
        part = replace(known, num_samples=stop - start, layouts=layouts, masked_rows=0)
        return type(self)(self._structured(values), part)

    def _structured(self, values: Iterable[Any]) -> Any:
        """The values of the fields, or of one sample's, in the structure of a sample."""
        return put_together(self.data, iter(values))

    def __repr__(self) -> str:
        known = self._arrangement
        samples = "rebuilt" if known is None else f"num_samples={known.num_samples}"
        shown = tree_map(_shown, self.data, is_leaf=lambda value: isinstance(value, list))
        fields = str(shown).replace("'", "")
        return f"{type(self).__name__}({samples}, {fields})"


def _shown(field: Any) -> str:
    if isinstance(field, Tensor):
        return f"{str(field.dtype).removeprefix('torch.')}{list(field.shape)}"
    return f"list[{len(field)}]" if isinstance(field, list) else str(field)


def _flatten(batch: Batch) -> tuple[list[Any], Arrangement | None]:
    return [batch.data], batch._arrangement


def _unflatten(
    kind: type[BatchT], children: Iterable[Any], arrangement: Arrangement | None
) -> BatchT:
    [data] = children
    return kind(data, arrangement if arrangement is not None and arrangement.fits(data) else None)


class MappingView(Batch, Mapping[Any, Any]):
    """A batch of dict samples: a mapping from field to tensor."""

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def update(self, fields: Mapping[Any, Any]) -> None:
        """Take over fields of the same shapes: copies that were pinned or converted.

        A `DataLoader` with `batch_size=None` copies each mapping and updates the copy with its own
        fields; torch 2.6 pins a mapping that way. Without this method both would return a plain
        dict instead.

        Raises:
            TypeError: the fields are others.
            CollateError: they have other shapes.
        """
        _take_over(self, {**self.data, **fields})


class SequenceView(Batch, Sequence[Any]):
    """A batch of tuple samples: a sequence of tensors."""

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        fields = list(self.data)
        fields[index] = value
        named = hasattr(self.data, "_fields")  # as in MappingView.update
        _take_over(self, type(self.data)(*fields) if named else tuple(fields))

    def __len__(self) -> int:
        return len(self.data)


# `torch.utils.data.default_convert` keeps the type of mutable containers only.
MutableMapping.register(MappingView)
MutableSequence.register(SequenceView)


def _take_over(batch: Batch, data: Any) -> None:
    known = batch._arrangement
    if known is not None and not known.fits(data):
        # No TypeError: torch would make a plain dict of shape (1, n, L) instead.
        raise CollateError(
            "a batch cannot take fields of other shapes: change a copy, dict(batch). If a "
            "DataLoader batches the batches of a stream again, pass batch_size=None to it"
        )
    if tree_structure(data) != tree_structure(batch.data):
        raise TypeError("a batch cannot change its fields: change a copy, dict(batch)")
    batch._data = data


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
        """The padded lengths of the ragged axes; `()` if no field is ragged."""
        if not self._host_lengths.shape[1]:
            return ()
        layout = self._measured(PaddedLayout)
        return tuple([layout.shape[1 + axis] for axis in layout.length_axes])

    @property
    def masked_rows(self) -> int:
        """The number of rows that only fill a shape of `max_shapes` up: see `PadCollate`."""
        return 0 if self._arrangement is None else self._arrangement.masked_rows

    @property
    def row_mask(self) -> Tensor:
        """False at masked rows: bool, `(rows,)`, on the device of `mask`."""
        known = self._known
        rows = torch.arange(known.num_samples + self.masked_rows, device=self._device)
        return rows < known.num_samples

    @property
    def mask(self) -> Tensor:
        """False at padding, and in masked rows.

        Bool, `(n, L)`, or `(n, L₁, …, Lₖ)` for k ragged axes, on the device of the field whose
        lengths are the batch's. It is computed at each access, and not kept in memory.
        """
        mask = self._measured(PaddedLayout).mask(self._device)
        if self.masked_rows:
            mask[self.num_samples :] = False
        return mask


class PackedBatch(Batch):
    """n concatenated samples: tensors `(total, …)`, where total is Σ lengths.

    Made by `PackCollate`. `flash_attn_varlen_func` and `torch.nn.attention.varlen.varlen_attn` take
    `cu_seqlens` and `max_seqlen`. Fields of numbers are stacked: `(n,)`. If the collate pads
    samples or the total, the padding forms segments of its own. `cu_seqlens` and `position_ids`
    include these; `lengths` and `num_tokens` do not.

    >>> batch = PackCollate()([{"ids": [7, 8, 9], "label": 0}, {"ids": [4], "label": 1}])
    >>> batch["ids"], batch["label"]
    (tensor([7, 8, 9, 4]), tensor([0, 1]))
    >>> batch.cu_seqlens, batch.max_seqlen
    (tensor([0, 3, 4], dtype=torch.int32), 3)
    >>> batch.position_ids
    tensor([0, 1, 2, 0])
    """

    @property
    def max_seqlen(self) -> int:
        """The length of the longest sample, and so of the longest segment."""
        return int(np.diff(self._measured(JoinedLayout).bounds).max(initial=0))

    @property
    def cu_seqlens(self) -> Tensor:
        """0 and the end of each sample: int32, `(n + 1,)`, on the batch's device.

        It is computed at each access, without waiting for the device: read it once for each batch.

        Raises:
            CollateError: no field is ragged.
        """
        layout = self._measured(JoinedLayout)
        if layout.rule[:3] == (1, 1, None):  # no segments of padding
            # No function of NumPy's: in a trace the lengths are a symbolic tensor.
            ends = on_device(layout.shapes[:, 0].cumsum(0), self._device)
            return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)
        return on_device(layout.bounds.astype(np.int32), self._device)

    @property
    def padded_total(self) -> int:
        """Positions of the samples and of their padding to multiples."""
        return self._measured(JoinedLayout).shape[-1]

    @property
    def position_ids(self) -> Tensor:
        """The position of each element in its own segment: int64, `(total,)`.

        It is on the batch's device, and computed at each access, without waiting for the device.
        """
        bounds = self._measured(JoinedLayout).bounds
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], np.diff(bounds))
        return on_device(positions, self._device)


class PaddedMapping(PaddedBatch, MappingView):
    """A padded batch of dict samples."""


class PaddedSequence(PaddedBatch, SequenceView):
    """A padded batch of tuple samples."""


class PackedMapping(PackedBatch, MappingView):
    """A packed batch of dict samples."""


class PackedSequence(PackedBatch, SequenceView):
    """A packed batch of tuple samples."""
