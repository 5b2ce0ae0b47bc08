"""The sizes of columns and lists, from their lengths, without reading a sample."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from torchbudget.data.sizes.key import SIZED, FieldName, SizeKey
from torchbudget.errors import SizesError

Lengths: TypeAlias = npt.NDArray[np.int64]

# Columns whose values are stored as samples have them; others, such as images, are decoded.
_STORED: Final = frozenset({"Value", "List", "LargeList", "Sequence", "list"})


def is_exactly(dataset: object, library: str, name: str) -> bool:
    """Whether the dataset is of that very class; a subclass may read its samples differently."""
    kind = getattr(sys.modules.get(library), name, None)
    return kind is not None and type(dataset) is kind


def quick_sizes(dataset: Any, key: SizeKey) -> Lengths | None:
    """The sizes that reading all samples would give, `(N,)` or `(N, d)`; None if not certain.

    Raises:
        SizesError: a column has a null.
    """
    if callable(key):
        return None
    axes = []
    for field in key if isinstance(key, tuple) else (key,):
        axis = _axis(dataset, field)
        if axis is None:
            return None
        axes.append(axis)
    sizes = np.stack(axes, axis=-1)
    if (nulls := np.argwhere(sizes < 0)).size:
        raise SizesError(f"sample {nulls[0, 0]} has no size for key {key!r}: it is null")
    return sizes if isinstance(key, tuple) else sizes[:, 0]


def _axis(dataset: Any, field: FieldName | None) -> Lengths | None:
    if is_exactly(dataset, "datasets", "Dataset"):
        return _arrow(dataset, field)
    if is_exactly(dataset, "pandas", "DataFrame"):
        known = list(dataset.columns).count(field) == 1
        return _lengths(dataset[field].tolist()) if known else None
    if is_exactly(dataset, "pandas", "Series"):
        return _items(dataset.tolist(), field)
    return _items(dataset, field) if type(dataset) in (list, tuple) else None


def _items(samples: Sequence[Any], field: FieldName | None) -> Lengths | None:
    kinds = set(map(type, samples))
    if field is None:
        return None if tuple in kinds else _lengths(samples)
    if not kinds <= {dict, list, tuple}:
        return None
    try:
        return _lengths([sample[field] for sample in samples])
    except (KeyError, IndexError, TypeError):
        return None


def _lengths(values: Sequence[Any]) -> Lengths | None:
    if not set(map(type, values)) <= SIZED:
        return None
    try:
        return np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    except TypeError:  # a 0-dimensional array
        return None


def _arrow(dataset: Any, field: FieldName | None) -> Lengths | None:
    """The lengths in a column of a `datasets.Dataset`, −1 for a null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    layout = dataset.format
    if field not in layout["columns"] or field not in dataset.features:
        return None
    if type(dataset.features[field]).__name__ not in _STORED:
        return None
    column, rows = dataset.data.column(field), dataset._indices
    kind = column.type
    formats: set[str | None] = {None}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = pc.list_value_length(column)
        if pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type):
            formats |= {"numpy", "torch"}
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.utf8_length(column)
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        lengths = pc.binary_length(column)
    else:
        return None
    if layout["type"] not in formats:
        return None
    sizes: Lengths = pc.fill_null(lengths, -1).to_numpy().astype(np.int64)
    return sizes if rows is None else sizes[rows.column(0).to_numpy()]
