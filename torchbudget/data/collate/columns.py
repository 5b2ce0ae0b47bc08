"""Samples as columns: the fields of all samples, and the values of one field, read and checked."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from torchbudget.cost.protocol import IntArray
from torchbudget.errors import CollateError

FieldPath: TypeAlias = tuple[Any, ...]
"""The keys and positions from a sample to one of its fields; `()` is the sample itself."""

BoolArray: TypeAlias = npt.NDArray[np.bool_]

MISSING: Final = object()
"""Stands for an optional field in a sample that does not have the field."""

OPTIONAL: Final = "optional"

_CPU: Final = torch.device("cpu")

# The types of each kind, and its name. In this order, since np.float64 is a float, np.str_ a str,
# and bool an int.
_KINDS: dict[str, tuple[Any, str]] = {
    "tensor": (torch.Tensor, "a tensor"),
    "text": ((str, bytes), "a string"),
    "array": ((np.ndarray, np.generic), "a NumPy array or scalar"),
    "bool": (bool, "a bool"),
    "int": (int, "an int"),
    "float": (float, "a float"),
    "mapping": (Mapping, "a mapping"),
    "tuple": (tuple, "a tuple"),
    "list": (list, "a list"),
    "unknown": (object, "an object of another type"),
}


class Field(NamedTuple):
    """One field of n samples.

    Attributes:
        path: path from a sample to the field.
        kind: a key of `_KINDS`, or "listed" for values that are not looked at.
        values: the field's value in each sample that has it.
        present: False for samples without the field, `(n,)`; `None`: all samples have it.
    """

    path: FieldPath
    kind: str
    values: Sequence[Any]
    present: BoolArray | None = None

    def fail(self, index: int, expected: str, came: str) -> NoReturn:
        """Raise the error for the value of this index, which differs from the first one."""
        if self.present is not None and len(self.values) < len(self.present):
            index = int(np.flatnonzero(self.present)[index])
        raise CollateError(
            f"sample {index} of the batch, {show(self.path)}: expected {expected}, got {came}"
        )

    def fail_at_odd_one(self, named: Sequence[str]) -> NoReturn:
        """Raise the error for the first value that differs from the first one.

        All values are compared at once, as a set; only after a difference is the value searched
        for.

        Args:
            named: what differs, of each value, in words.
        """
        index = next(i for i, name in enumerate(named) if name != named[0])
        first = 0 if self.present is None else int(self.present.argmax())
        self.fail(index, f"{named[0]} as in sample {first}", named[index])


def show(path: FieldPath) -> str:
    """A path in an error message, written as an option's key.

    >>> show(("labels",)), show(("text", 0)), show(())
    ("field 'labels'", "field ('text', 0)", 'the sample')
    """
    return f"field {key_of(path)!r}" if path else "the sample"


def key_of(path: FieldPath) -> Any:
    """The path as users write it: the name itself for a field that is not nested."""
    return path[0] if len(path) == 1 else path


def path_of(name: Any) -> FieldPath:
    """The path that a user's name of a field stands for."""
    return name if isinstance(name, tuple) else (name,)


def find_path(name: Any, paths: Collection[FieldPath], option: str) -> FieldPath:
    """The path of the field that an option names.

    Raises:
        CollateError: there is no such field.
    """
    path = path_of(name)
    if path not in paths:
        raise CollateError(
            f"{option} names {show(path)}, which the samples do not have; their fields: "
            f"{', '.join(repr(key_of(path)) for path in paths)}"
        )
    return path


def _kind_of(cls: Any) -> str:
    if issubclass(cls, np.ma.MaskedArray):  # a tensor would lose its mask
        return "unknown"
    return next(kind for kind, (bases, _) in _KINDS.items() if issubclass(cls, bases))


def _holds_numbers(values: list[Any]) -> bool:
    """Whether a list is one field, of numbers or of lists of numbers, not a list of fields."""
    types = set(map(type, values))
    if all(issubclass(t, (int, float, np.integer, np.floating, np.bool_)) for t in types):
        return True
    return types == {list} and all(map(_holds_numbers, values))


def take_apart(
    samples: Sequence[Any], rules: Mapping[FieldPath, Collection[str]]
) -> tuple[Any, list[Field]]:
    """Turn samples into one column per field.

    Every sample must have the structure of the first. A mapping or a tuple is always a structure
    of fields; a list is one field if it is of numbers, else a structure.

    Args:
        samples: n samples, n ≥ 1.
        rules: of fields. The values of a "listed" one are one field, whatever they are. Samples may
            lack an "optional" one; a field that all samples lack is left out.

    Returns:
        The structure of a batch, as dicts and tuples with None in each field's place, and the
        fields in the order of those places.

    Raises:
        CollateError: there is no sample or no field, or the samples' structures differ.

    >>> take_apart([{"x": 1, "y": (2.0, "a")}, {"y": (3.0, "b"), "x": 4}], {})[0]
    {'x': None, 'y': (None, None)}
    """
    if not isinstance(samples, (list, tuple)) or not samples:
        raise CollateError(f"expected a list of at least one sample, got {samples!r:.50}")
    fields: list[Field] = []
    structure = _walk(Field((), "", samples), rules, fields)
    if not fields:
        raise CollateError(f"expected samples with at least one field, got {samples[0]!r}")
    return structure, fields


def _walk(node: Field, rules: Mapping[FieldPath, Collection[str]], fields: list[Field]) -> Any:
    path, _, column, _ = node
    first, rule = column[0], rules.get(path, ())
    if "listed" in rule:
        fields.append(node._replace(kind="listed"))
        return None
    kinds = set(map(_kind_of, set(map(type, column))))
    if len(kinds) > 1:
        node.fail_at_odd_one([_KINDS[_kind_of(type(value))][1] for value in column])
    (kind,) = kinds
    is_structure = kind in ("mapping", "tuple") or (kind == "list" and not _holds_numbers(first))
    if is_structure and OPTIONAL in rule:
        raise CollateError(
            f"an optional field is a tensor, an array, a list of numbers, a number or a text, and "
            f'{show(path)} is {_KINDS[kind][1]} of fields: name each of these, or make it "listed"'
        )
    if kind == "mapping":
        parts = _parts_of_mappings(node, rules)
        return {part.path[-1]: _walk(part, rules, fields) for part in parts}
    if is_structure:
        if set(map(len, column)) != {len(first)}:
            node.fail_at_odd_one([f"{len(value)} fields" for value in column])
        values = [
            _walk(Field((*path, i), "", part), rules, fields)
            for i, part in enumerate(zip(*column, strict=True))
        ]
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    if kind == "unknown":
        node.fail(
            0,
            "a tensor, an array, a list of numbers, a number, a string, or a mapping or tuple of "
            "those",
            f"{type(first).__name__}; convert it in the dataset, leave it out, or collate it with "
            f'fields={{{key_of(path)!r}: "listed"}}',
        )
    fields.append(node._replace(kind=kind))
    return None


def _parts_of_mappings(node: Field, rules: Mapping[FieldPath, Collection[str]]) -> Iterator[Field]:
    """The column of each key; of an optional one, the samples that have it."""
    path, _, column, _ = node
    own = {one[-1]: rule for one, rule in rules.items() if one and one[:-1] == path}
    optional = [key for key, rule in own.items() if OPTIONAL in rule]
    # As many keys as the first sample, and no others: faster than a look at each sample.
    alike = set(map(len, column)) == {len(column[0])} and set().union(*column) == set(column[0])
    if optional or not alike:
        _check_keys(node, set(optional))
    for key in column[0]:
        if key not in optional:
            yield Field((*path, key), "", [sample[key] for sample in column])
    for key in optional:
        values = [sample.get(key) for sample in column]
        present = np.array([value is not None for value in values])
        if present.any():
            found = [value for value in values if value is not None]
            yield Field((*path, key), "", found, None if present.all() else present)


def _check_keys(node: Field, optional: set[Any]) -> None:
    keys = node.values[0].keys() - optional
    for index, sample in enumerate(node.values):
        came = sample.keys() - optional
        if came != keys:
            expected = [key for key in node.values[0] if key in keys]
            node.fail(
                index,
                f"the keys {expected} as in sample 0",
                f"{list(sample)}; missing: {[k for k in expected if k not in came]}, unexpected: "
                f"{[k for k in sample if k in came - keys]}; if samples may lack a field, pass "
                f'fields={{name: "optional"}}',
            )


def put_together(structure: Any, fields: Iterator[Any]) -> Any:
    """The structure with the next of `fields` in the place of each field; missing ones left out."""
    # By hand: torch's tree_map takes five times as long, and this runs for every sample too.
    if isinstance(structure, dict):
        parts = [(key, put_together(value, fields)) for key, value in structure.items()]
        return {key: part for key, part in parts if part is not MISSING}
    if isinstance(structure, tuple):
        own = [put_together(part, fields) for part in structure]
        return type(structure)(*own) if hasattr(structure, "_fields") else tuple(own)
    return next(fields)


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
    """The values of one field, read.

    Attributes:
        field: the field that was read.
        shapes: the shape of each value, `(n, d)`; d is 0 for a field of numbers.
        dtype: the dtype of the batch's tensor.
        device: device of the samples' tensors; the CPU for everything else.
        values: n tensors, or n NumPy arrays; none if `joined` is given.
        joined: all values in one tensor, if they were read so; see `join`.
    """

    field: Field
    shapes: IntArray
    dtype: torch.dtype
    device: torch.device
    values: Any
    joined: Tensor | None = None

    def join(self, out: Tensor | None = None) -> Tensor:
        """All samples in one tensor: concatenated along axis 0, or stacked if d is 0.

        The samples must agree in every other axis.

        Args:
            out: where to write them; contiguous, `(total, …)` or `(n,)`.
        """
        if self.joined is not None:
            return self.joined if out is None else out.copy_(self.joined)
        stacked = self.shapes.shape[1] == 0
        if isinstance(self.values[0], Tensor):
            return (torch.stack if stacked else torch.cat)(self.values, out=out)
        array = None if out is None else out.numpy()
        return torch.from_numpy((np.stack if stacked else np.concatenate)(self.values, out=array))

    def write(self, out: Tensor, places: Iterable[Any]) -> None:
        """Write each sample into its place, an index of the tensor."""
        values = self.values
        if self.joined is not None:
            values = self.joined.split(self.shapes[:, 0].tolist())
        target: Any = out if isinstance(values[0], Tensor) else out.numpy()
        for place, value in zip(places, values, strict=True):
            target[place] = value


def read_column(field: Field) -> Column:
    """Read one field; every value must have the dtype, axes and device of the first.

    Raises:
        CollateError: a value differs, a list is ragged or not of numbers, torch has no such
            dtype, or all lists are empty, which says nothing of their dtype.
    """
    if field.kind == "array":
        return _read_arrays(field)
    if field.kind == "list":
        return _read_flat_lists(field) or _read_tensors(field, _lists_to_tensors(field))
    if field.kind == "tensor":
        return _read_tensors(field, field.values)
    too_large = (i for i, v in enumerate(field.values) if not -(2**63) <= v < 2**63)
    numbers = _tensor(field, next(too_large, 0), field.values, "a number of 64 bits")
    no_axes = np.empty((len(numbers), 0), np.int64)
    return Column(field, no_axes, numbers.dtype, _CPU, (), numbers)


def _shapes(field: Field, values: Sequence[Any]) -> IntArray:
    shapes = [value.shape for value in values]
    if len(set(map(len, shapes))) > 1:
        field.fail_at_odd_one([f"{len(shape)} axes" for shape in shapes])
    flat = np.fromiter(chain.from_iterable(shapes), dtype=np.int64)
    return flat.reshape(len(shapes), len(shapes[0]))


def _read_tensors(field: Field, values: Sequence[Tensor]) -> Column:
    dtype = values[0].dtype
    if len({t.dtype for t in values}) > 1:
        field.fail_at_odd_one([f"dtype {t.dtype}" for t in values])
    return Column(field, _shapes(field, values), dtype, values[0].device, values)


def _read_arrays(field: Field) -> Column:
    arrays = [np.asarray(value) for value in field.values]
    if len({a.dtype for a in arrays}) > 1:
        field.fail_at_odd_one([f"dtype {a.dtype}" for a in arrays])
    try:
        dtype = torch.from_numpy(np.empty(0, arrays[0].dtype.newbyteorder("="))).dtype
    except TypeError:
        field.fail(0, "an array of numbers or bools", f"dtype {arrays[0].dtype}")
    return Column(field, _shapes(field, arrays), dtype, _CPU, arrays)


def _read_flat_lists(field: Field) -> Column | None:
    """The column of lists of ints or of floats alone; `None` of others.

    It takes a tenth of the time of `torch.tensor` for each list.
    """
    kinds = set(map(_kind_of, {type(value[0]) for value in field.values if value}))
    if kinds not in ({"int"}, {"float"}):
        return None
    code, dtype = ("q", torch.int64) if kinds == {"int"} else ("d", torch.get_default_dtype())
    # [1, 0.5] or a mistake: the slow way reads the one, and explains the other.
    with suppress(TypeError, OverflowError):
        flat = np.asarray(array(code, list(chain.from_iterable(field.values))))
        shapes = np.array(list(map(len, field.values)), np.int64)[:, None]
        return Column(field, shapes, dtype, _CPU, (), torch.from_numpy(flat).to(dtype))
    return None


def _lists_to_tensors(field: Field) -> list[Tensor]:
    """Lists of numbers: int64, the default dtype or bool, as `torch.tensor` gives.

    An empty list has no dtype of its own and takes that of the others.
    """
    values = field.values
    expected = "a rectangular list of bools, 64-bit ints or floats"
    tensors = [_tensor(field, i, value, expected) for i, value in enumerate(values)]
    model = next((t for t in tensors if t.numel()), None)
    if model is None:
        raise CollateError(
            f"{show(field.path)}: all {len(tensors)} lists of this batch are empty, so their dtype "
            "is unknown: make tensors in the data set, such as torch.tensor(ids, dtype=torch.int64)"
        )
    return [
        t if t.numel() else model.new_empty(t.shape if value else (0, *model.shape[1:]))
        for t, value in zip(tensors, values, strict=True)
    ]


def _tensor(field: Field, index: int, values: Any, expected: str) -> Tensor:
    try:
        tensor = torch.tensor(values)
    except (ValueError, TypeError, RuntimeError) as error:
        field.fail(index, expected, f"one that torch cannot read: {error}")
    if tensor.dtype is torch.bool:
        return tensor
    # NumPy's numbers in a list are read as Python's are.
    return tensor.to(torch.get_default_dtype() if tensor.is_floating_point() else torch.int64)
