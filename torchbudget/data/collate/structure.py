"""The structure of samples: their fields as columns, and the same structure of a batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from torchbudget.errors import CollateError

FieldPath: TypeAlias = tuple[Any, ...]
"""The keys and positions from a sample to one of its fields; `()` is the sample itself."""

# What is of each kind, and what it is called. In this order, since np.float64 is a float, np.str_ a
# str, and bool an int.
_KINDS: dict[str, tuple[Any, str]] = {
    "tensor": (torch.Tensor, "a tensor"),
    "text": ((str, bytes), "a string"),
    "array": ((np.ndarray, np.generic), "a NumPy array or scalar"),
    "bool": (bool, "a bool"),
    "int": (int, "an int"),
    "float": (float, "a float"),
    "complex": (complex, "a complex number"),
    "mapping": (Mapping, "a mapping"),
    "tuple": (tuple, "a tuple"),
    "list": (list, "a list"),
    "unknown": (object, "an object of another type"),
}


class Field(NamedTuple):
    """One field of all samples.

    Attributes:
        path: from a sample to it.
        names: the path, with the names of named tuples' fields instead of their positions.
        kind: a key of `_KINDS`.
        values: its value in each sample.
    """

    path: FieldPath
    names: FieldPath
    kind: str
    values: Sequence[Any]


def show(path: FieldPath) -> str:
    """A path in an error message, written as an option's key.

    >>> show(("labels",)), show(("text", 0)), show(())
    ("field 'labels'", "field ('text', 0)", 'the sample')
    """
    if not path:
        return "the sample"
    return f"field {path[0]!r}" if len(path) == 1 else f"field {path!r}"


def find_path(name: Any, paths: Sequence[FieldPath], option: str) -> int:
    """The index in `paths` of the field that an option names: by a path, or at the top by its key.

    Raises:
        CollateError: there is no such field.
    """
    path = name if isinstance(name, tuple) else (name,)
    try:
        return paths.index(path)
    except ValueError:
        known = ", ".join(repr(p[0] if len(p) == 1 else p) for p in paths)
        raise CollateError(
            f"{option} names {show(path)}, which the samples do not have; their fields: {known}"
        ) from None


def fail(path: FieldPath, position: int, expected: str, came: str) -> NoReturn:
    """Raise the error for one sample that differs from the first."""
    raise CollateError(
        f"sample {position} of the batch, {show(path)}: expected {expected}, got {came}"
    )


def fail_at_odd_one(
    path: FieldPath,
    values: Iterable[Any],
    key: Callable[[Any], Any],
    describe: Callable[[Any], str] = str,
) -> NoReturn:
    """Raise the error for the first sample whose `key` differs from sample 0's.

    Collating compares all samples at once, by the set of their keys; only after a difference is
    the sample searched for.
    """
    keys = [key(value) for value in values]
    position = next(i for i, k in enumerate(keys) if k != keys[0])
    fail(path, position, f"{describe(keys[0])} as in sample 0", describe(keys[position]))


def kind_of(value: Any) -> str:
    """The kind of a value: a key of `_KINDS`."""
    return kind_of_type(type(value))  # type: ignore[arg-type]  # types are hashable


@functools.lru_cache(maxsize=1024)
def kind_of_type(cls: Any) -> str:
    """The kind of the values of a type."""
    if issubclass(cls, np.ma.MaskedArray):  # whose mask a tensor would not have
        return "unknown"
    return next(kind for kind, (bases, _) in _KINDS.items() if issubclass(cls, bases))


def holds_numbers(values: list[Any]) -> bool:
    """Whether a list is one field, of numbers or of lists of numbers, not a list of fields."""
    types = set(map(type, values))
    if all(issubclass(t, (int, float, complex, np.generic)) for t in types):
        return True
    return types == {list} and all(map(holds_numbers, values))


def take_apart(samples: Sequence[Any]) -> tuple[Any, list[Field]]:
    """One column per field.

    Every sample must have the structure of the first. A mapping or a tuple is always a structure
    of fields; a list is one field if it is of numbers, else a structure.

    Args:
        samples: n samples, n ≥ 1.

    Returns:
        The structure of a batch, as dicts and tuples with None in each field's place, and the
        fields in the order of those places.

    Raises:
        CollateError: there is no sample or no field, or the samples' structures differ.

    >>> take_apart([{"x": 1, "y": (2.0, "a")}, {"y": (3.0, "b"), "x": 4}])[0]
    {'x': None, 'y': (None, None)}
    """
    if not samples:
        raise CollateError("expected at least one sample, got an empty batch")
    fields: list[Field] = []
    structure = _walk((), (), samples, fields)
    if not fields:
        raise CollateError(f"expected samples with at least one field, got {samples[0]!r}")
    return structure, fields


def _walk(path: FieldPath, names: FieldPath, column: Sequence[Any], fields: list[Field]) -> Any:
    types = set(map(type, column))
    kinds = {kind_of_type(t) for t in types}
    if len(kinds) > 1:
        fail_at_odd_one(path, column, kind_of, lambda kind: _KINDS[kind][1])
    (kind,) = kinds
    first = column[0]
    if kind == "mapping":
        # Dicts have the same keys if they have as many as the first and none of its keys is
        # missing, which the loop below finds. A defaultdict would make up a missing key.
        if types == {dict}:
            alike = set(map(len, column)) == {len(first)}
        else:
            alike = all(sample.keys() == first.keys() for sample in column)
        if not alike:
            _fail_at_keys(path, column)
        try:
            columns = {key: [sample[key] for sample in column] for key in first}
        except KeyError:
            _fail_at_keys(path, column)
        return {
            key: _walk((*path, key), (*names, key), values, fields)
            for key, values in columns.items()
        }
    if kind == "tuple" or (kind == "list" and not holds_numbers(first)):
        if set(map(len, column)) != {len(first)}:
            fail_at_odd_one(path, column, len, "{} fields".format)
        own = getattr(first, "_fields", range(len(first)))
        parts = [
            _walk((*path, i), (*names, name), part, fields)
            for i, (name, part) in enumerate(zip(own, zip(*column, strict=True), strict=True))
        ]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if kind == "unknown":
        raise CollateError(
            f"sample 0 of the batch, {show(path)}: expected a tensor, an array, a list of numbers, "
            f"a number, a string, or a mapping or tuple of those, got {type(first).__name__}; "
            "convert it in the dataset, or leave it out"
        )
    fields.append(Field(path, names, kind, column))
    return None


def _fail_at_keys(path: FieldPath, column: Sequence[Mapping[Any, Any]]) -> NoReturn:
    keys = column[0].keys()
    position = next(i for i, sample in enumerate(column) if sample.keys() != keys)
    came = column[position].keys()
    raise CollateError(
        f"sample {position} of the batch, {show(path)}: expected the keys {list(keys)} as in "
        f"sample 0, got {list(came)}; missing: {[k for k in keys if k not in came]}, "
        f"unexpected: {[k for k in came if k not in keys]}"
    )


def put_together(structure: Any, fields: Iterator[Any]) -> Any:
    """The structure with the next of `fields` in the place of each field."""
    # By hand: torch's tree_map takes five times as long, and this runs for every sample too.
    if isinstance(structure, dict):
        return {key: put_together(value, fields) for key, value in structure.items()}
    if isinstance(structure, tuple):
        parts = [put_together(part, fields) for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else tuple(parts)
    return next(fields)


def field_at(data: Any, path: FieldPath) -> Any:
    """The field of a batch's data, or of a sample, that a path leads to."""
    for key in path:
        data = data[key]
    return data
