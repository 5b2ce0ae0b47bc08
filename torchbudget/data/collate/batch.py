"""The base of all batches of ragged samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import (
    GetAttrKey,
    register_pytree_node,
    tree_leaves,
    tree_map,
    tree_map_only,
)

from torchbudget.checks import is_int
from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.arrangement import Arrangement, Layout, each_layout
from torchbudget.data.collate.length_field import choose_length_field
from torchbudget.data.collate.options import CollateOptions
from torchbudget.data.collate.structure import Field, find_path, put_together, take_apart
from torchbudget.errors import CollateError, OptionError
from torchbudget.machine.cuda import may_return_early
from torchbudget.protocols import SplittableBatch

BatchT = TypeVar("BatchT", bound="Batch")


class Batch:
    """Tensors of n ragged samples, and the position of each sample in them.

    The base of `PaddedBatch` and `PackedBatch`, made by a collate. A batch of dict samples is a
    `Mapping` from field to tensor, so that `model(**batch)` works. A batch of tuple samples is a
    `Sequence`, so that `x, y = batch` works. A batch of bare samples has its tensor in `data`.
    Batches are immutable; `dict(batch)` is not. A batch equals only itself.

    Hosts that move or cast a batch rebuild it as `type(batch)(fields)`. That gives a batch of those
    fields, which does not know its samples any more: whatever needs them raises a `CollateError`.
    Under `torch.utils._pytree` a batch is a container of its fields, and `tree_map` gives a batch
    that knows its samples, unless the function changed the fields' shapes.
    """

    def __init__(self, data: Any, arrangement: Arrangement | None = None) -> None:
        # No dataclass: Lightning copies those, and then assigns their fields.
        self._data = self._read(data)
        self._arrangement = arrangement

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register_pytree_node(
            cls, _flatten, partial(_unflatten, cls), flatten_with_keys_fn=_flatten_with_keys
        )

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

    @staticmethod
    def _read(data: Any) -> Any:
        """The data of a batch of this class, from fields that a host may have changed."""
        return data

    @property
    def data(self) -> Any:
        """The plain structure: a dict, a tuple (a named tuple where the samples were) or a tensor.

        Nested as the samples were. Texts are lists of `str`.
        """
        return self._data

    @property
    def num_samples(self) -> int:
        """The number of samples, n."""
        return self._known.num_samples

    def known_samples(self) -> int | None:
        """The number of samples; `None` of a batch that was rebuilt from its fields."""
        return None if self._arrangement is None else self._arrangement.num_samples

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
        return sum(sizes) + (0 if self._arrangement is None else self._arrangement.nbytes)

    def sample_shapes(self) -> list[IntArray]:
        """Each sample's own shape in every field: `(n, d)`, once for fields of equal shapes.

        Without the axes that all samples of a packed field share. The shape of a text is the
        number of its characters. A batch that was rebuilt from its fields knows none.
        """
        known = self._arrangement
        if known is None:
            return []
        texts = [
            np.fromiter(map(len, self._fields[index]), np.int64)[:, None]
            for index, layout in enumerate(known.layouts)
            if layout is None
        ]
        return [*each_layout(lambda layout: layout.shapes, known.layouts).values(), *texts]

    def has_at_most(self, amount: int, num_samples: int) -> bool:
        """Whether it has so many samples, and no field more in an axis, or in all if packed.

        False where that is not known at once: of texts, and of a batch that was rebuilt.
        """
        known = self._arrangement
        if known is None or known.num_samples != num_samples:
            return False
        for layout in known.layouts:  # noqa: SIM110  (asked of each batch: all() takes longer)
            if layout is None or layout.most > amount:
                return False
        return True

    @property
    def _known(self) -> Arrangement:
        if self._arrangement is None:
            raise CollateError(
                f"this {type(self).__name__} does not know the lengths and places of its samples: "
                "it was rebuilt from its fields, as type(batch)(fields), which transformers, "
                "Accelerate and Lightning do, or by a function that changed their shapes. Read "
                "lengths, mask, num_samples and the like before that, and split the batch before "
                "it; batch.to() moves a batch as it is"
            )
        return self._arrangement

    @property
    def _host_lengths(self) -> IntArray:  # (n, k) for k ragged axes
        lengths: IntArray = self._length_layout.lengths
        return lengths

    @property
    def _length_layout(self) -> Any:
        known = self._known
        layout = known.layouts[known.length_field]
        if layout is None:
            raise CollateError("this batch has only texts, which have no lengths")
        return layout

    def _map(self: BatchT, function: Callable[[Tensor], Tensor]) -> BatchT:
        arrangement = None if self._arrangement is None else self._arrangement.map(function)
        return type(self)(tree_map_only(Tensor, function, self.data), arrangement)

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
        known = self._known
        index = find_path(field, known.paths, "measured_by")
        layout = known.layouts[index]
        if layout is None or layout.lengths.shape[1] == 0:
            raise CollateError(f"field {field!r} has no ragged axis")
        return type(self)(self.data, replace(known, length_field=index))

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
            for value, layout in zip(self._fields, self._known.layouts, strict=True)
        ]
        return [self._structured(row) for row in zip(*columns, strict=True)]

    def _part(self: BatchT, start: int, stop: int) -> BatchT:
        """The batch of samples `start` to `stop`."""
        known = self._known
        parts = each_layout(lambda layout: layout.part(start, stop), known.layouts)
        texts = slice(start, stop), None
        cuts = [parts.get(id(layout), texts) for layout in known.layouts]
        # What is trimmed is copied, since some models need contiguous input; the rest are views.
        values = [
            value[cut] if layout is None else value[cut].contiguous()
            for value, (cut, layout) in zip(self._fields, cuts, strict=True)
        ]
        layouts = tuple(layout for _, layout in cuts)
        return self._of_fields(values, replace(known, num_samples=stop - start, layouts=layouts))

    def _of_fields(self: BatchT, values: Iterable[Any], arrangement: Any) -> BatchT:
        """The batch of the fields of a part."""
        return type(self)(self._structured(values), arrangement)

    def _structured(self, values: Iterable[Any]) -> Any:
        """The values of the fields, or of one sample's, in the structure of a sample."""
        return put_together(self.data, iter(values))

    @property
    def _fields(self) -> list[Any]:  # in the order of the arrangement's paths
        fields: list[Any] = self._known.fields(self.data)
        return fields

    def __repr__(self) -> str:
        known = self._arrangement
        samples = "rebuilt" if known is None else f"num_samples={known.num_samples}"
        fields = str(tree_map(_shown, self.data, is_leaf=_is_text)).replace("'", "")
        return f"{type(self).__name__}({samples}, {fields})"


def _is_text(value: Any) -> bool:
    return isinstance(value, list)  # one string per sample


def _shown(field: Any) -> str:
    if isinstance(field, Tensor):
        return f"{str(field.dtype).removeprefix('torch.')}{list(field.shape)}"
    return f"text[{len(field)}]" if isinstance(field, list) else str(field)


def _flatten(batch: Batch) -> tuple[list[Any], Arrangement | None]:
    return [batch.data], batch._arrangement


def _flatten_with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], Arrangement | None]:
    return [(GetAttrKey("data"), batch.data)], batch._arrangement


def _unflatten(
    kind: type[BatchT], children: Iterable[Any], arrangement: Arrangement | None
) -> BatchT:
    [data] = children
    return kind(data, None if arrangement is None else arrangement.of(data))


if TYPE_CHECKING:
    # Training splits batches by this protocol, without importing them: mypy checks that it fits.
    def _splittable(batch: Batch) -> SplittableBatch:
        return batch


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
    arrangement = Arrangement(
        num_samples=len(samples),
        paths=paths,
        layouts=layouts,
        length_field=choose_length_field(
            options.length_field, options._sized_field, paths, lengths
        ),
    )
    plain, mapping, sequence = kinds
    kind = mapping if isinstance(data, dict) else sequence if isinstance(data, tuple) else plain
    return kind(data, arrangement)
