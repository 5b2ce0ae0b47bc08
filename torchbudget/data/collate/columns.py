"""One field of all samples, in a form that padding and packing can write from."""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torchbudget.cost.models.protocol import IntArray
from torchbudget.data.collate.structure import (
    Field,
    FieldPath,
    fail,
    fail_at_odd_one,
    kind_of,
    show,
)
from torchbudget.errors import CollateError

_CPU = torch.device("cpu")
_TYPECODES = {"int": "q", "float": "d"}


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device = _CPU) -> Tensor:
    """An uninitialised tensor; inside a `DataLoader` worker, in shared memory.

    A tensor in shared memory is sent to the main process as a file descriptor. Any other tensor is
    copied into shared memory when the worker sends it.
    """
    if get_worker_info() is None or device.type != "cpu" or 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    # As default_collate does; share_memory_() would copy the uninitialised bytes.
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)
    flat = torch.empty(0, dtype=dtype).set_(storage)
    return flat.view(shape)


class Column(NamedTuple):
    """One field of n samples.

    Attributes:
        path: the field's path in a sample.
        shapes: each sample's shape, `(n, d)`; d is 0 for a field of numbers.
        dtype: the dtype of the batch's tensor.
        device: where the samples' tensors are; the CPU for everything else.
        values: n tensors, or n NumPy arrays; None if there is `flat`.
        flat: the values of all samples, concatenated, `(total,)`; only for d ≤ 1.
    """

    path: FieldPath
    shapes: IntArray
    dtype: torch.dtype
    device: torch.device = _CPU
    values: Sequence[Tensor] | Sequence[npt.NDArray[Any]] | None = None
    flat: Tensor | None = None

    def each(self) -> Sequence[Tensor] | Sequence[npt.NDArray[Any]]:
        """The value of each sample, as tensors or as NumPy arrays.

        Raises:
            CollateError: a tensor is not dense, or not on the device of the first.
        """
        if self.flat is not None:
            if self.shapes.shape[1] == 0:
                return self.flat.unbind()
            return torch.split(self.flat, self.shapes[:, 0].tolist())
        assert self.values is not None  # noqa: S101  (a column has one of the two)
        if isinstance(self.values[0], Tensor):
            _check_dense(self.path, self.values)  # type: ignore[arg-type]  # all are like the first
        return self.values

    def join(self, out: Tensor | None = None) -> Tensor:
        """All samples in one tensor: concatenated along axis 0, or stacked if d is 0.

        The samples must agree in every other axis.

        Args:
            out: where to write them; contiguous, `(total, …)` or `(n,)`. Without it, the result
                may share memory with the samples: do not write to it.

        Raises:
            CollateError: a tensor is not dense, or not on the device of the first.
        """
        if self.flat is not None:
            return self.flat if out is None else out.copy_(self.flat)
        values: Any = self.values
        stacked = self.shapes.shape[1] == 0
        if isinstance(values[0], np.ndarray):
            join = np.stack if stacked else np.concatenate
            if out is None:
                return torch.from_numpy(join(values))
            join(values, out=out.numpy())
            return out
        try:
            joined = (torch.stack if stacked else torch.cat)(values, out=out)
        except RuntimeError:
            _check_dense(self.path, values)
            raise
        if joined.layout is not torch.strided:  # sparse ones make a sparse one
            _check_dense(self.path, values)
        return joined


def read_column(field: Field, list_dtype: torch.dtype | None = None) -> Column:
    """Read one field; every sample must have the dtype, axes and device of the first.

    Args:
        field: of all samples.
        list_dtype: of a field of lists, where all of them may be empty.

    Raises:
        CollateError: a sample differs, a list is ragged or not of numbers, torch has no such
            dtype, or all lists are empty and nothing says of which dtype they are.
    """
    if field.kind == "list":
        return _read_lists(field.path, field.values, list_dtype)
    read: Callable[[FieldPath, Any], Column] = _READERS.get(field.kind, _read_numbers)
    return read(field.path, field.values)


@functools.lru_cache(maxsize=16)  # the fields of a batch often agree in their shapes
def _shape_array(shapes: tuple[tuple[int, ...], ...]) -> IntArray:
    flat = np.fromiter(chain.from_iterable(shapes), dtype=np.int64)
    flat.flags.writeable = False
    return flat.reshape(len(shapes), len(shapes[0]))


def _shapes(path: FieldPath, shapes: Sequence[tuple[int, ...]]) -> IntArray:
    if len(set(map(len, shapes))) > 1:
        fail_at_odd_one(path, shapes, len, "{} axes".format)
    return _shape_array(tuple(shapes))


def _read_tensors(path: FieldPath, values: Sequence[Tensor]) -> Column:
    # For short samples a check takes as long as the copy. So only what torch.cat would accept
    # wrongly is checked here; Column.join explains what torch.cat refuses.
    if len({t.dtype for t in values}) > 1:
        fail_at_odd_one(path, values, lambda t: t.dtype, "dtype {}".format)
    try:
        shapes = [t.shape for t in values]
    except RuntimeError:
        _check_dense(path, values)
        raise
    return Column(path, _shapes(path, shapes), values[0].dtype, values[0].device, values)


def _check_dense(path: FieldPath, values: Iterable[Tensor]) -> None:
    for position, tensor in enumerate(values):
        if tensor.is_nested:
            fail(path, position, "a dense tensor", "a nested one")
        if tensor.layout is not torch.strided:
            fail(path, position, "a dense tensor", f"one of layout {tensor.layout}")
    if len({t.device for t in values}) > 1:
        fail_at_odd_one(path, values, lambda t: t.device, "a tensor on {}".format)


@functools.lru_cache(maxsize=128)
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        return None


def _read_arrays(path: FieldPath, values: Sequence[npt.NDArray[Any] | np.generic]) -> Column:
    arrays = [np.asarray(value) for value in values]
    if len({a.dtype for a in arrays}) > 1:
        fail_at_odd_one(path, arrays, lambda a: a.dtype, "dtype {}".format)
    dtype = _torch_dtype(arrays[0].dtype)
    if dtype is None:
        fail(path, 0, "an array of numbers or bools", f"dtype {arrays[0].dtype}")
    return Column(path, _shapes(path, [a.shape for a in arrays]), dtype, values=arrays)


def _read_numbers(path: FieldPath, values: Sequence[Any]) -> Column:
    try:
        flat = _numbers(kind_of(values[0]), values)
    except OverflowError:
        position = next(i for i, v in enumerate(values) if not -(2**63) <= v < 2**63)
        fail(path, position, "an int of 64 bits", str(values[position]))
    return Column(path, np.empty((len(values), 0), np.int64), flat.dtype, flat=flat)


def _numbers(kind: str, values: Sequence[Any]) -> Tensor:
    """Numbers as one tensor; ints and floats an order of magnitude faster than `torch.tensor`.

    Raises:
        TypeError: a value is not a number of this kind.
        OverflowError: an int exceeds 64 bits.
    """
    if kind not in _TYPECODES:
        return torch.tensor(values)
    flat = torch.from_numpy(np.asarray(array(_TYPECODES[kind], values)))
    return flat if kind == "int" else flat.to(torch.get_default_dtype())


def _read_lists(path: FieldPath, values: Sequence[Any], dtype: torch.dtype | None) -> Column:
    """Lists of numbers: int64, the default dtype or bool, as `torch.tensor` gives.

    An empty list has no dtype of its own and takes the others'. If all are empty it is `dtype`,
    which the others must have.
    """
    column = _read_flat_lists(path, values) or _read_tensors(
        path, _lists_to_tensors(path, values, dtype)
    )
    if dtype not in (None, column.dtype):
        raise CollateError(
            f"{show(path)}: expected lists of {dtype}, as the collate's dtype says, got lists of "
            f"{column.dtype}; convert them in the data set, or leave dtype out"
        )
    return column


def _read_flat_lists(path: FieldPath, values: Sequence[Any]) -> Column | None:
    """The column of lists of ints or of floats alone; `None` of others."""
    kinds = {kind_of(v[0]) for v in values if v}
    if len(kinds) == 1 and (kind := min(kinds)) in _TYPECODES:
        # [1, 0.5] or a mistake: the slow way reads the one, explains the other.
        with suppress(TypeError, OverflowError):
            flat = _numbers(kind, list(chain.from_iterable(values)))
            lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
            return Column(path, lengths[:, None], flat.dtype, flat=flat)
    return None


def _lists_to_tensors(
    path: FieldPath, values: Sequence[Any], dtype: torch.dtype | None
) -> list[Tensor]:
    tensors = [_list_to_tensor(path, i, value) for i, value in enumerate(values)]
    model = next((t for t in tensors if t.numel()), None)
    if model is None and dtype is None:
        raise CollateError(
            f"{show(path)}: all {len(values)} lists of this batch are empty, and so have no dtype: "
            "give the collate that of other batches, as in dtype=torch.int64 or "
            "dtype={field: torch.int64}, or make tensors in the data set"
        )
    if model is None:
        model = max(tensors, key=Tensor.dim).to(dtype)
    for position, tensor in enumerate(tensors):
        if not tensor.numel():
            shape = (0, *model.shape[1:]) if not values[position] else tensor.shape
            tensors[position] = torch.empty(shape, dtype=model.dtype)
    return tensors


def _list_to_tensor(path: FieldPath, position: int, values: list[Any]) -> Tensor:
    try:
        read = np.array(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CollateError(
            f"sample {position} of the batch, {show(path)}: expected a rectangular list of "
            f"numbers, got one that NumPy cannot read: {error}"
        ) from error
    kind = read.dtype.kind
    # NumPy reads ints beyond 64 bits as uint64 and, beside negative ones, as float64.
    beyond = kind in "uf" and bool((np.abs(read) >= 2.0**63).any()) and not _has_float(values)
    if kind not in "biufc" or beyond:
        came = "one of larger ints" if beyond else f"one of {read.dtype}"
        fail(path, position, "a list of bools, 64-bit ints or floats", came)
    if kind == "c":
        return torch.tensor(values)
    if kind == "f":
        return torch.from_numpy(read).to(torch.get_default_dtype())
    return torch.from_numpy(read if kind == "b" else read.astype(np.int64, copy=False))


def _has_float(values: list[Any]) -> bool:
    return any(
        _has_float(value) if isinstance(value, list) else isinstance(value, (float, np.floating))
        for value in values
    )


_READERS: dict[str, Callable[[FieldPath, Any], Column]] = {
    "tensor": _read_tensors,
    "array": _read_arrays,
}
